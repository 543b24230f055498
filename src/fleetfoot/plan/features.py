"""The features that settings and a model require, and which of them a runner lacks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.runner.features import Feature, Support
from fleetfoot.runner.v1 import capabilities as v1
from fleetfoot.runner.v2 import capabilities as v2

CAPABILITIES: Mapping[str, Mapping[Feature, Support]] = {"v1": v1.CAPABILITIES, "v2": v2.CAPABILITIES}
"""Runner -> feature -> whether it is supported."""

_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_HYBRID_FIELDS = (
    *("ssm_cfg", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "attn_layer_period"),
    *("hybrid_override_pattern", "layers_block_type", "linear_num_key_heads"),
)
"""Only models with state-space, linear attention or mixed layers have one of these."""
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")

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
_SWITCHES = {
    "enable_lora": Feature.LORA,
    "enable_prompt_embeds": Feature.PROMPT_EMBEDDINGS,
    "enable_sleep_mode": Feature.SLEEP,
    "enable_chunked_prefill": Feature.CHUNKED_PREFILL,
    "enable_prefix_caching": Feature.PREFIX_CACHING,
    "async_scheduling": Feature.ASYNC_SCHEDULING,
}


# --- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """What a checkpoint's ``config.json`` requires of a runner, also of models that cannot be loaded."""

    architecture: str
    quantization: str | None = None
    """The method of weights that are stored quantized."""
    has_experts: bool = False
    is_hybrid: bool = False
    has_windows: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any], model: ModelConfig | None) -> ModelFeatures:
        """From the object in ``config.json`` and the config parsed from it; None: its kind is not supported."""
        fields = {**content, **_object(content.get("text_config"))}  # multimodal configs nest the decoder's
        return cls(
            architecture=_architecture(content) if model is None else model.architecture,
            quantization=_quantization(fields),
            has_experts=any(_is_count(fields.get(name), above=1) for name in _EXPERT_FIELDS),
            is_hybrid=_is_hybrid(fields),
            has_windows=model is not None and any(window is not None for window in model.layer_windows),
        )

    @property
    def is_loadable(self) -> bool:
        """Whether some runner can load a model of this kind, if its other fields are valid."""
        special = self.quantization is not None or self.has_experts or self.is_hybrid
        return not special and self.architecture in ARCHITECTURES


def _architecture(content: Mapping[str, Any]) -> str:
    names = content.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return f"model_type {content.get('model_type')!r}"


def _quantization(fields: Mapping[str, Any]) -> str | None:
    for name in ("quantization_config", "compression_config"):
        settings = fields.get(name)
        if settings:
            return str(_object(settings).get("quant_method", "of an unnamed method"))
    return None


def _is_hybrid(fields: Mapping[str, Any]) -> bool:
    layer_types = fields.get("layer_types")
    mixed = isinstance(layer_types, list) and any(kind not in _ATTENTION_LAYERS for kind in layer_types)
    return mixed or any(fields.get(name) is not None for name in _HYBRID_FIELDS)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Any, *, above: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > above


# --- what is required, and what is lacking --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A required feature that a runner lacks."""

    name: str
    requested_by: str
    """The setting that requires it: ``tensor_parallel_size is 2``."""
    why_not: str
    """A sentence."""

    def __str__(self) -> str:
        return f"{self.name} ({self.requested_by}): {self.why_not}"


def required_features(config: EngineConfig, model: ModelFeatures) -> dict[Feature, str]:
    """Each feature that these settings and this model require, with the setting that does, in a fixed order.

    What a single request may require (logprobs, penalties, ...) is not among them.
    """
    required = _of_model(config, model)
    if config.compilation_config is not None and config.compilation_config.uses_torch_compile:
        required[Feature.TORCH_COMPILE] = "compilation_config has mode STOCK_TORCH_COMPILE; only NONE works"
    for name, feature in _PARALLEL.items():
        size = getattr(config, name)
        if size > 1:
            required[feature] = f"{name} is {size}"
    if config.speculative_config is not None:
        method = config.speculative_config.method
        feature = _SPECULATIVE.get(method, Feature.SPECULATIVE_DRAFT_MODEL)  # the others are a `Drafter` as well
        required[feature] = f"speculative_config has method {method!r}"
    for name, feature in _SWITCHES.items():
        if getattr(config, name):
            required[feature] = f"{name} is on"
    required[Feature.PREEMPTION] = "every scheduler may preempt"
    if config.scheduling_policy == "priority":
        required[Feature.PRIORITY_SCHEDULING] = "scheduling_policy is 'priority'"
    if config.kv_offloading_size is not None:
        required[Feature.KV_OFFLOADING] = f"kv_offloading_size is {config.kv_offloading_size:g}"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.is_active:
        required[Feature.KV_CONNECTOR] = f"kv_transfer_config has {transfer.kv_connector} as {transfer.kv_role}"
    return required


def _of_model(config: EngineConfig, model: ModelFeatures) -> dict[Feature, str]:
    required = {}
    if config.quantization is not None:
        required[Feature.QUANTIZED_WEIGHTS] = f"quantization is {config.quantization!r}"
    elif model.quantization is not None:
        required[Feature.QUANTIZED_WEIGHTS] = f"the checkpoint's weights are quantized, {model.quantization}"
    if model.has_experts:
        required[Feature.MIXTURE_OF_EXPERTS] = f"{model.architecture} has experts"
    if model.is_hybrid:
        required[Feature.HYBRID_LAYERS] = f"{model.architecture} has layers that are not attention"
    if model.has_windows:
        required[Feature.SLIDING_WINDOW] = f"{model.architecture} has layers that see a window"
    if config.task != "generate":
        required[Feature.POOLING] = f"task is {config.task!r}; only 'generate' works"
    return required


def unsupported_features(runner: str, required: Mapping[Feature, str]) -> tuple[Unsupported, ...]:
    """The required features that ``runner`` (``v1`` or ``v2``) does not support."""
    declared = CAPABILITIES[runner]
    return tuple(
        Unsupported(feature.value, requested_by, declared[feature].why_not)
        for feature, requested_by in required.items()
        if not declared[feature].is_supported
    )
