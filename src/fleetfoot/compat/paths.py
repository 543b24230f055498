"""vLLM's import paths: the names that are defined elsewhere here, and advice for those that there are not.

With it, ``sed s/vllm/fleetfoot/`` is all that a script of vLLM's needs. A module of `NAMES` that is no file here is
made when it is imported, and a name in it is imported on first access. docs/vllm_names.md lists all of them.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOT = "fleetfoot"
init_logger = logging.getLogger
"""vLLM's name."""
safe_hash = hashlib.md5
"""vLLM's name; for names of files, not for secrets."""


def print_embeddings(embeds: Sequence[Any], indent: int = 4) -> None:
    """vLLM's name: print the first values of an embedding and its size."""
    first = ", ".join(str(value) for value in embeds[:4])
    print(f"{' ' * indent}Embedding: [{first}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


_PROCESSORS = " ".join(
    f"sampling.custom_processors.{name}"
    for name in (
        "AdapterLogitsProcessor",
        "AddedRequest",
        "BatchUpdate",
        "LogitsProcessor",
        "MoveDirectionality",
        "MovedRequest",
        "RemovedRequest",
    )
)
_CONNECTORS = "kv_transfer.vllm"
_KV = "distributed.kv_transfer.kv_connector"


def _connector_names(place: str, *names: str) -> str:
    return " ".join(f"{_CONNECTORS}.{place}.{name}" for name in names)


NAMES = {
    "": "async_llm.AsyncLLM async_llm.AsyncLLMEngine config.engine.EngineConfig "
        "config.model_registry.ModelRegistry engine.arg_utils.AsyncEngineArgs engine.arg_utils.EngineArgs "
        "engine.engine.LLMEngine engine.errors.EngineDeadError inputs.PromptType inputs.TextPrompt "
        "inputs.TokensPrompt llm.LLM outputs.ClassificationOutput outputs.ClassificationRequestOutput "
        "outputs.CompletionOutput outputs.EmbeddingOutput outputs.EmbeddingRequestOutput outputs.PoolingOutput "
        "outputs.PoolingRequestOutput outputs.RequestOutput outputs.ScoringOutput outputs.ScoringRequestOutput "
        "records.pooling_params.PoolingParams records.sampling_params.RequestOutputKind "
        "records.sampling_params.SamplingParams records.structured_outputs.StructuredOutputsParams",
    "attention.backends.abstract": _connector_names("records", "AttentionMetadata"),
    "beam_search": "engine.beam_search.BeamSearchOutput engine.beam_search.BeamSearchSequence",
    "config": "config.engine.CompilationConfig config.engine.CompilationMode config.engine.VllmConfig "
              "config.kv_events.KVEventsConfig config.kv_transfer.KVTransferConfig "
              "config.pooling.PoolerConfig config.profiler.ProfilerConfig "
              "config.speculative.SpeculativeConfig compat.names.AttentionConfig "
              "config.weight_transfer.WeightTransferConfig",
    f"{_KV}.base": _connector_names("base", "KVConnectorBase"),
    f"{_KV}.factory": _connector_names("factory", "KVConnectorFactory"),
    f"{_KV}.v1": _connector_names("base", "KVConnectorBase_V1", "KVConnectorRole"),
    f"{_KV}.v1.base": _connector_names(
        "base", "KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole", "SupportsHMA"
    ),
    f"{_KV}.v1.example_connector": "kv_transfer.example.ExampleConnector kv_transfer.example.ExampleConnectorMetadata",
    "distributed.kv_events": "engine.kv_events.AllBlocksCleared engine.kv_events.BlockRemoved "
                             "engine.kv_events.BlockStored engine.kv_events.KVEventBatch",
    "distributed.parallel_state": "distributed.cleanup_dist_env_and_memory",
    "distributed.weight_transfer.base": "weights.transfer.WeightTransferInitRequest "
                                        "weights.transfer.WeightTransferUpdateRequest",
    "distributed.weight_transfer.nccl_engine": "weights.transfer.NCCLTrainerSendWeightsArgs "
                                               "weights.transfer.NCCLWeightTransferEngine",
    "engine.async_llm_engine": "async_llm.AsyncLLMEngine",
    "engine.llm_engine": "engine.engine.LLMEngine",
    "entrypoints.llm": "llm.LLM",
    "forward_context": _connector_names("records", "ForwardContext"),
    "logger": "compat.paths.init_logger",
    "logprobs": "outputs.Logprob",
    "model_executor.layers.attention.mla_attention": _connector_names("records", "MLACommonMetadata"),
    "model_executor.models": "config.model_registry.ModelRegistry",
    "model_executor.models.registry": "config.model_registry.ModelRegistry",
    "platforms": "plan.machine.current_platform",
    "pooling_params": "records.pooling_params.PoolingParams",
    "utils": "compat.arguments.FlexibleArgumentParser utils.validation.get_open_port",
    "utils.argparse_utils": "compat.arguments.FlexibleArgumentParser",
    "utils.hashing": "compat.paths.safe_hash",
    "utils.print_utils": "compat.paths.print_embeddings",
    "utils.network_utils": "utils.validation.get_open_port",
    "v1.attention.backend": _connector_names("records", "AttentionMetadata"),
    "v1.attention.backends.mla.common": _connector_names("records", "MLACommonMetadata"),
    "v1.attention.backends.triton_attn": _connector_names("records", "TritonAttentionMetadata"),
    "v1.core.kv_cache_manager": _connector_names("records", "KVCacheBlocks"),
    "v1.core.sched.output": _connector_names("records", "CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "v1.attention.backends.registry": "compat.names.AttentionBackendEnum",
    "v1.engine.async_llm": "async_llm.AsyncLLM",
    "v1.engine.exceptions": "engine.errors.EngineDeadError",
    "v1.engine.llm_engine": "engine.engine.LLMEngine",
    "v1.kv_cache_interface": _connector_names("records", "KVCacheConfig", "KVCacheGroupSpec"),
    "v1.metrics.reader": "engine.metrics.Counter engine.metrics.Gauge engine.metrics.Histogram engine.metrics.Metric "
                         "engine.metrics.Vector",
    "v1.outputs": _connector_names("records", "KVConnectorOutput"),
    "v1.request": _connector_names("records", "Request", "RequestStatus"),
    "v1.sample.logits_processor": f"{_PROCESSORS} sampling.custom_processors.RequestLogitsProcessor "
                                  "sampling.custom_processors.process_dict_updates",
    "v1.sample.logits_processor.builtin": "sampling.custom_processors.process_dict_updates",
    "v1.sample.logits_processor.interface": _PROCESSORS,
    "version": "_version.__version__",
}  # fmt: skip
"""Module of vLLM's -> the places of its names; all without the package."""

NO_LORA = "LoRA adapters are not served; merge the adapter into the checkpoint"
NO_MULTIMODAL = "models take text alone; leave it out"
NO_PARSER = "leave it out: the chat template has the format; fleetfoot serve takes the names of parsers"

_BY_ADVICE = {
    NO_LORA: "lora",
    NO_MULTIMODAL: "multimodal assets.audio assets.base assets.image assets.video inputs.EmbedsPrompt "
                   "inputs.ExplicitEncoderDecoderPrompt",
    NO_PARSER: "reasoning tool_parsers",
    "SamplingParams(logits_processors=[...]) takes functions, LLM(logits_processors=[...]) classes":
        "logits_process v1.sample.logits_processor.LogitsProcessors",
    "weights.transfer has the trainer's side, for NCCL, gloo and CUDA IPC": "distributed.weight_transfer",
    "LLM.start_profile() and stop_profile() write traces; set profiler_config": "profiler",
    "vllm_config.parallel_config has a KV connector's rank and the sizes":
        "distributed.parallel_state.get_tensor_model_parallel_rank "
        "distributed.parallel_state.get_tensor_model_parallel_world_size distributed.parallel_state.get_tp_group "
        "distributed.parallel_state.get_world_group",
    "fleetfoot bench measures, with --prompts-file or made prompts; give the script its own": "benchmarks",
    "load_format says how weights are read; docs/live_weights.md has later ones": "model_executor.model_loader",
    "CONTRIBUTING.md shows how to add an architecture, a kernel or a method": "model_executor",
    "docs/kv_connectors.md has the connectors, and how to write one": "distributed.kv_transfer",
    "fleetfoot serve is the HTTP server; AsyncLLM works in one of your own": "entrypoints",
    "LLM.get_tokenizer() returns the tokenizer": "transformers_utils tokenizers",
    "settings are keywords of LLM":
        "envs config.CacheConfig config.LoadConfig config.ModelConfig config.ParallelConfig config.SchedulerConfig "
        "config.StructuredOutputsConfig",
    "collective_rpc takes a function of the worker": "LLM.apply_model",
    "it belongs to vLLM's own code; docs/vllm_names.md lists what there is":
        "attention compilation distributed engine.protocol exceptions executor forward_context plugins usage "
        "utils.mem_constants utils.torch_utils v1 worker",
}  # fmt: skip
ADVICE = {name: advice for advice, names in _BY_ADVICE.items() for name in names.split()}
"""Module, name or attribute of vLLM's, without the package -> what to do instead; modules include those below them, and
what is missing in the package is missing in ``outputs`` as well."""


def names_of(module: str) -> dict[str, str]:
    """The names of a module in NAMES, and the modules that define them."""
    places = [place.rpartition(".") for place in NAMES.get(module, "").split()]
    return {name: f"{ROOT}.{source}" for source, _, name in places}


def missing_attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that is missing, with advice if vLLM has it."""
    advice = ADVICE.get(f"{owner}.{name}")
    return AttributeError(f"{owner!r} object has no attribute {name!r}{(advice and f'; {advice}') or ''}")


def provide_names(module: str) -> None:
    """Give a module a ``__getattr__`` for its names in NAMES and ADVICE.

    Names with advice raise ImportError: the message of an AttributeError would not reach an ``import`` statement.
    """
    path = module.removeprefix(ROOT).removeprefix(".")

    def get(name: str) -> Any:
        if source := names_of(path).get(name):
            value = getattr(import_module(source), name)
            setattr(sys.modules[module], name, value)  # later accesses do not call this function
            return value
        if advice := ADVICE.get(f"{path}.{name}") or ADVICE.get(name if path in ("", "outputs") else ""):
            raise ImportError(f"{module} has no {name}; {advice}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    sys.modules[module].__getattr__ = get  # type: ignore[method-assign]


class VllmPaths:  # without importlib.abc, which takes as long to import as the rest of this package
    """The last finder: makes modules of NAMES where there are no files, and refuses those of ADVICE."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, _, inner = name.partition(".")
        is_package = any(known.startswith(f"{inner}.") for known in NAMES)
        if root == ROOT and (inner in NAMES or is_package):
            return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]
        while root == ROOT and inner:
            if advice := ADVICE.get(inner):
                raise ModuleNotFoundError(f"there is no {name}; {advice}", name=name)
            inner = inner.rpartition(".")[0]
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """None: Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        provide_names(module.__name__)


def install() -> None:
    """Let ``import`` find the paths."""
    if not any(isinstance(finder, VllmPaths) for finder in sys.meta_path):
        sys.meta_path.append(VllmPaths())
