"""Fleetfoot: an LLM inference and serving engine.

Names are loaded when they are first used, so that ``import fleetfoot`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleetfoot._version import __version__

if TYPE_CHECKING:
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.engine.async_llm import AsyncLLM
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.errors import EngineDeadError
    from fleetfoot.inputs import TextPrompt, TokensPrompt
    from fleetfoot.llm import LLM
    from fleetfoot.outputs import CompletionOutput, RequestOutput
    from fleetfoot.sampling.params import RequestOutputKind, SamplingParams

_HOMES = {
    "AsyncLLM": "fleetfoot.engine.async_llm",
    "CompletionOutput": "fleetfoot.outputs",
    "EngineConfig": "fleetfoot.config.engine",
    "EngineDeadError": "fleetfoot.engine.errors",
    "LLM": "fleetfoot.llm",
    "LLMEngine": "fleetfoot.engine.engine",
    "RequestOutput": "fleetfoot.outputs",
    "RequestOutputKind": "fleetfoot.sampling.params",
    "SamplingParams": "fleetfoot.sampling.params",
    "TextPrompt": "fleetfoot.inputs",
    "TokensPrompt": "fleetfoot.inputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fleetfoot' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
