"""Fleetfoot: an LLM inference and serving engine.

Public names are imported on first access, so ``import fleetfoot`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot._version import __version__
from fleetfoot.utils.vllm_paths import install, provide_names

if TYPE_CHECKING:
    from fleetfoot.async_llm import AsyncLLM
    from fleetfoot.async_llm import AsyncLLM as AsyncLLMEngine
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.errors import EngineDeadError
    from fleetfoot.inputs import PromptType, TextPrompt, TokensPrompt
    from fleetfoot.llm import LLM
    from fleetfoot.outputs import CompletionOutput, RequestOutput
    from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


install()
provide_names(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
