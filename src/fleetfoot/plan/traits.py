"""What a checkpoint's ``config.json`` says that decides which runner can run it, also where the model itself cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import SUPPORTED_ARCHITECTURES

_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Each of these is a size that only models with state-space, linear attention or mixed layers have.
_HYBRID_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "state_size",
    "attn_layer_period",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_num_key_heads",
)
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The kind of model, as far as runners differ about it."""

    architecture: str
    quantization: str | None = None
    """The method of weights that are stored quantized."""
    has_experts: bool = False
    is_hybrid: bool = False
    has_windows: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any], model: ModelConfig | None) -> ModelTraits:
        """From the object in ``config.json``, and from what was made of it; None: it is of no supported kind."""
        fields = {**content, **_object(content.get("text_config"))}  # multimodal configs nest the decoder's
        return cls(
            architecture=_architecture(content) if model is None else model.architecture,
            quantization=_quantization(fields),
            has_experts=any(_is_count(fields.get(name), above=1) for name in _EXPERT_FIELDS),
            is_hybrid=_is_hybrid(fields),
            has_windows=model is not None and any(window is not None for window in model.layer_windows),
        )

    @property
    def is_of_another_kind(self) -> bool:
        """Whether no runner could load it whatever its other fields say."""
        special = self.quantization is not None or self.has_experts or self.is_hybrid
        return special or self.architecture not in SUPPORTED_ARCHITECTURES


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
