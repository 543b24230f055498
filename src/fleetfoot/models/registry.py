"""Model classes by architecture, imported when one is used. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetfoot.models.interface import CausalLM

_CLASSES = {
    "LlamaForCausalLM": "fleetfoot.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "fleetfoot.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "fleetfoot.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "fleetfoot.models.llama:LlamaForCausalLM",
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_CLASSES)


def model_class(architecture: str) -> type[CausalLM]:
    """The class that runs ``architecture``.

    Raises:
        ValueError: it is not supported; the message lists those that are.
    """
    if architecture not in _CLASSES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(_CLASSES)}")
    module, _, name = _CLASSES[architecture].partition(":")
    return getattr(import_module(module), name)
