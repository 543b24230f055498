"""vLLM's import paths: the names that are defined elsewhere here, and advice for those that there are not.

With it, ``sed s/vllm/fleetfoot/`` is all that a script of vLLM's needs. A module of `NAMES` that is no file here is
made when it is imported, and a name in it is imported on first access. docs/vllm_names.md lists all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = "fleetfoot"

_PLACES = {
    "async_llm": "AsyncLLM", "config.engine": "CompilationConfig EngineConfig",
    "config.kv_transfer": "KVTransferConfig", "config.speculative": "SpeculativeConfig",
    "distributed.groups": "cleanup_dist_env_and_memory", "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.engine": "LLMEngine", "engine.errors": "EngineDeadError", "llm": "LLM",
    "inputs": "PromptType TextPrompt TokensPrompt", "outputs": "CompletionOutput Logprob RequestOutput",
    "plan.machine": "current_platform", "records.sampling_params": "RequestOutputKind SamplingParams",
    "utils.argparse_utils": "FlexibleArgumentParser", "utils.network_utils": "get_open_port", "_version": "__version__",
}  # fmt: skip
_RENAMED = {"AsyncLLMEngine": "AsyncLLM", "VllmConfig": "EngineConfig"}
_PLACE = {name: module for module, names in _PLACES.items() for name in names.split()}

NAMES = {
    "": "AsyncEngineArgs AsyncLLM AsyncLLMEngine CompletionOutput EngineArgs EngineConfig EngineDeadError LLM "
        "LLMEngine PromptType RequestOutput RequestOutputKind SamplingParams TextPrompt TokensPrompt",
    "config": "CompilationConfig KVTransferConfig SpeculativeConfig VllmConfig",
    "distributed": "cleanup_dist_env_and_memory",
    "distributed.parallel_state": "cleanup_dist_env_and_memory",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "logprobs": "Logprob",
    "platforms": "current_platform",
    "utils": "FlexibleArgumentParser get_open_port",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.exceptions": "EngineDeadError",
    "v1.engine.llm_engine": "LLMEngine",
    "version": "__version__",
}  # fmt: skip
"""Module of vLLM's, without the package -> its names."""

NO_LORA = "LoRA adapters are not served; merge the adapter into the checkpoint"
NO_MULTIMODAL = "models take text alone; leave it out"
NO_GRAMMAR = "output is not constrained by grammars; leave it out"
NO_POOLING = "models generate text; SamplingParams(prompt_logprobs=...) scores a text"
NO_CALLBACK = "the sampler calls no code of the user's; SamplingParams has logit_bias, allowed_token_ids and bad_words"
NO_UPDATE = "a running engine keeps its weights; make a new LLM of the changed checkpoint"
_NO_PROFILER = "run the script under torch.profiler or py-spy; stats() has the engine's own times"
_INTERNAL = "it belongs to vLLM's own code; docs/vllm_names.md lists what there is"

_BY_ADVICE = {
    NO_LORA: "lora",
    NO_MULTIMODAL: "multimodal assets.audio assets.base assets.image assets.video inputs.EmbedsPrompt "
                   "inputs.ExplicitEncoderDecoderPrompt",
    NO_GRAMMAR: "reasoning tool_parsers sampling_params.GuidedDecodingParams sampling_params.StructuredOutputsParams",
    NO_POOLING: "pooling_params PoolingParams config.PoolerConfig PoolingOutput PoolingRequestOutput "
                "ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput ScoringOutput "
                "ScoringRequestOutput",
    NO_CALLBACK: "v1.sample logits_process",
    NO_UPDATE: "config.WeightTransferConfig distributed.weight_transfer",
    _NO_PROFILER: "config.ProfilerConfig profiler",
    "fleetfoot bench measures; give the script prompts of its own": "benchmarks",
    "CONTRIBUTING.md shows how to add an architecture, a kernel or a method": "ModelRegistry model_executor",
    "docs/kv_connectors.md has the connectors, and how to write one": "distributed.kv_transfer",
    "there is no HTTP server; AsyncLLM works in one of your own": "entrypoints",
    "LLM.get_tokenizer() returns the tokenizer": "transformers_utils tokenizers",
    "settings are keywords of LLM": "envs",
    "use logging.getLogger": "logger",
    _INTERNAL: "attention compilation distributed executor forward_context usage v1 worker",
}  # fmt: skip
ADVICE = {name: advice for advice, names in _BY_ADVICE.items() for name in names.split()}
"""Module or name of vLLM's, without the package -> what to do instead; modules include those below them, and what is
missing in the package is missing in ``outputs`` as well."""


def provide_names(module: str) -> None:
    """Give a module a ``__getattr__`` for its names in NAMES and ADVICE.

    Names with advice raise ImportError: the message of an AttributeError would not reach an ``import`` statement.
    """
    path = module.removeprefix(ROOT).removeprefix(".")

    def get(name: str) -> Any:
        if name in NAMES.get(path, "").split():
            name_here = _RENAMED.get(name, name)
            value = getattr(import_module(f"{ROOT}.{_PLACE[name_here]}"), name_here)
            setattr(sys.modules[module], name, value)  # later accesses do not call this function
            return value
        advice = ADVICE.get(f"{path}.{name}") or ADVICE.get(name if path in ("", "outputs") else "")
        if advice:
            raise ImportError(f"{module} has no {name}; {advice}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    sys.modules[module].__getattr__ = get  # type: ignore[method-assign]


class VllmPaths(MetaPathFinder, Loader):
    """Makes modules of NAMES, and refuses those of ADVICE. It is asked last, so files take precedence."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, _, inner = name.partition(".")
        if root != ROOT:
            return None
        is_package = any(known.startswith(f"{inner}.") for known in NAMES)
        if inner in NAMES or is_package:
            return ModuleSpec(name, self, is_package=is_package)
        parts = inner.split(".")
        for end in range(len(parts), 0, -1):  # the most specific one
            if advice := ADVICE.get(".".join(parts[:end])):
                raise ModuleNotFoundError(f"there is no {name}; {advice}", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        provide_names(module.__name__)


def install() -> None:
    """Let ``import`` find the paths."""
    if not any(isinstance(finder, VllmPaths) for finder in sys.meta_path):
        sys.meta_path.append(VllmPaths())
