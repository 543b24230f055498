"""Fleetfoot: an LLM inference and serving engine.

Public names are imported on first access, so ``import fleetfoot`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleetfoot._version import __version__

if TYPE_CHECKING:
    from fleetfoot.async_llm import AsyncLLM
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.errors import EngineDeadError
    from fleetfoot.inputs import TextPrompt, TokensPrompt
    from fleetfoot.llm import LLM
    from fleetfoot.outputs import CompletionOutput, RequestOutput
    from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

_MODULES = {
    "AsyncLLM": "fleetfoot.async_llm",
    "CompletionOutput": "fleetfoot.outputs",
    "EngineConfig": "fleetfoot.config.engine",
    "EngineDeadError": "fleetfoot.engine.errors",
    "LLM": "fleetfoot.llm",
    "LLMEngine": "fleetfoot.engine.engine",
    "RequestOutput": "fleetfoot.outputs",
    "RequestOutputKind": "fleetfoot.records.sampling_params",
    "SamplingParams": "fleetfoot.records.sampling_params",
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
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'fleetfoot' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
