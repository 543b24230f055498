"""Which features a configuration asks for, and which of them a runner lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan.traits import ModelTraits
from fleetfoot.runner.features import Feature, Support
from fleetfoot.runner.v1 import capabilities as v1
from fleetfoot.runner.v2 import capabilities as v2

CAPABILITIES: Mapping[str, Mapping[Feature, Support]] = {"v1": v1.CAPABILITIES, "v2": v2.CAPABILITIES}
"""Runner -> feature -> whether it is supported."""

_SPECULATIVE = {
    "ngram": Feature.SPECULATIVE_NGRAM,
    "draft_model": Feature.SPECULATIVE_DRAFT_MODEL,
    "eagle": Feature.SPECULATIVE_EAGLE,
}
_PARALLEL = {
    "tensor_parallel_size": Feature.TENSOR_PARALLELISM,
    "pipeline_parallel_size": Feature.PIPELINE_PARALLELISM,
    "prefill_context_parallel_size": Feature.PREFILL_CONTEXT_PARALLELISM,
}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A feature that is asked for and that a runner lacks."""

    name: str
    asked_by: str
    """The setting that asks for it: ``tensor_parallel_size is 2``."""
    why_not: str
    """A sentence."""

    def __str__(self) -> str:
        return f"{self.name} ({self.asked_by}): {self.why_not}"


def wanted_features(config: EngineConfig, model: ModelTraits) -> dict[Feature, str]:
    """Each feature that is on with these settings and this model, with what asks for it, in a fixed order.

    What a single request may ask for (logprobs, penalties, ...) is not among them.
    """
    return {**_of_model(config, model), **_of_running(config), **_of_scheduling(config)}


def unsupported_features(runner: str, wanted: Mapping[Feature, str]) -> tuple[Unsupported, ...]:
    """The wanted features that ``runner`` (``v1`` or ``v2``) does not support."""
    declared = CAPABILITIES[runner]
    return tuple(
        Unsupported(feature.value, asked_by, declared[feature].why_not)
        for feature, asked_by in wanted.items()
        if not declared[feature].is_supported
    )


def _of_model(config: EngineConfig, model: ModelTraits) -> dict[Feature, str]:
    wanted = {}
    if config.quantization is not None:
        wanted[Feature.QUANTIZED_WEIGHTS] = f"quantization is {config.quantization!r}"
    elif model.quantization is not None:
        wanted[Feature.QUANTIZED_WEIGHTS] = f"the checkpoint's weights are quantized, {model.quantization}"
    if model.has_experts:
        wanted[Feature.MIXTURE_OF_EXPERTS] = f"{model.architecture} has experts"
    if model.is_hybrid:
        wanted[Feature.HYBRID_LAYERS] = f"{model.architecture} has layers that are not attention"
    if model.has_windows:
        wanted[Feature.SLIDING_WINDOW] = f"{model.architecture} has layers that see a window"
    if config.task != "generate":
        wanted[Feature.POOLING] = f"task is {config.task!r}; only 'generate' works"
    return wanted


def _of_running(config: EngineConfig) -> dict[Feature, str]:
    wanted = {}
    if config.compilation_config is not None and config.compilation_config.uses_torch_compile:
        wanted[Feature.TORCH_COMPILE] = "compilation_config has mode STOCK_TORCH_COMPILE; only NONE works"
    if config.async_scheduling:
        wanted[Feature.ASYNC_SCHEDULING] = "async_scheduling is on"
    for name, feature in _PARALLEL.items():
        size = getattr(config, name)
        if size > 1:
            wanted[feature] = f"{name} is {size}"
    if config.speculative_config is not None:
        method = config.speculative_config.method
        wanted[_SPECULATIVE[method]] = f"speculative_config has method {method!r}"
    for name, feature in (
        ("enable_lora", Feature.LORA),
        ("enable_prompt_embeds", Feature.PROMPT_EMBEDDINGS),
        ("enable_sleep_mode", Feature.SLEEP),
    ):
        if getattr(config, name):
            wanted[feature] = f"{name} is on"
    return wanted


def _of_scheduling(config: EngineConfig) -> dict[Feature, str]:
    wanted = {Feature.PREEMPTION: "every scheduler may preempt"}
    if config.enable_chunked_prefill:
        wanted[Feature.CHUNKED_PREFILL] = "enable_chunked_prefill is on"
    if config.enable_prefix_caching:
        wanted[Feature.PREFIX_CACHING] = "enable_prefix_caching is on"
    if config.scheduling_policy == "priority":
        wanted[Feature.PRIORITY_SCHEDULING] = "scheduling_policy is 'priority'"
    if config.kv_offloading_size is not None:
        wanted[Feature.KV_OFFLOADING] = f"kv_offloading_size is {config.kv_offloading_size:g}"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.is_active:
        wanted[Feature.KV_CONNECTOR] = f"kv_transfer_config has {transfer.kv_connector} as {transfer.kv_role}"
    return wanted
