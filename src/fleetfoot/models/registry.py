"""From an architecture's name to its class, imported when it is wanted."""

from __future__ import annotations

from importlib import import_module

from fleetfoot.models.interface import CausalLM

_MODULES = {
    "LlamaForCausalLM": "fleetfoot.models.llama",
    "MistralForCausalLM": "fleetfoot.models.mistral",
    "Qwen2ForCausalLM": "fleetfoot.models.qwen2",
    "Qwen3ForCausalLM": "fleetfoot.models.qwen3",
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODULES)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that runs ``architecture``.

    Raises:
        ValueError: it is not supported; the message lists those that are.
    """
    if architecture not in _MODULES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(_MODULES)}")
    return getattr(import_module(_MODULES[architecture]), architecture)
