"""Fleetfoot: an LLM inference and serving engine.

Public names are imported on first access, so ``import fleetfoot`` is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleetfoot._version import __version__ as __version__

try:
    from fleetfoot.compat.paths import install, names_of, provide_names
except KeyboardInterrupt:
    if sys.argv[:1] == ["-m"] or sys.argv[0].endswith(("/fleetfoot", "/fleetfoot/__main__.py")):
        raise SystemExit(130) from None  # a command, which shows no traceback
    raise

if TYPE_CHECKING:
    from fleetfoot.async_llm import AsyncLLM as AsyncLLM
    from fleetfoot.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from fleetfoot.config.engine import EngineConfig as EngineConfig
    from fleetfoot.config.model_registry import ModelRegistry as ModelRegistry
    from fleetfoot.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from fleetfoot.engine.arg_utils import EngineArgs as EngineArgs
    from fleetfoot.engine.engine import LLMEngine as LLMEngine
    from fleetfoot.engine.errors import EngineDeadError as EngineDeadError
    from fleetfoot.inputs import PromptType as PromptType
    from fleetfoot.inputs import TextPrompt as TextPrompt
    from fleetfoot.inputs import TokensPrompt as TokensPrompt
    from fleetfoot.llm import LLM as LLM
    from fleetfoot.outputs import ClassificationOutput as ClassificationOutput
    from fleetfoot.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from fleetfoot.outputs import CompletionOutput as CompletionOutput
    from fleetfoot.outputs import EmbeddingOutput as EmbeddingOutput
    from fleetfoot.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from fleetfoot.outputs import PoolingOutput as PoolingOutput
    from fleetfoot.outputs import PoolingRequestOutput as PoolingRequestOutput
    from fleetfoot.outputs import RequestOutput as RequestOutput
    from fleetfoot.outputs import ScoringOutput as ScoringOutput
    from fleetfoot.outputs import ScoringRequestOutput as ScoringRequestOutput
    from fleetfoot.records.pooling_params import PoolingParams as PoolingParams
    from fleetfoot.records.sampling_params import RequestOutputKind as RequestOutputKind
    from fleetfoot.records.sampling_params import SamplingParams as SamplingParams
    from fleetfoot.records.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

__all__ = [*names_of(""), "__version__"]  # names
install()
provide_names(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
