"""How ``config.json`` describes mixtures of experts. No torch.

Each family has names of its own for the same numbers. A field of a mixture that none of these functions reads is
refused (`fleetfoot.config.foreign_fields`), so that no unknown spelling is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fleetfoot.config.json_fields import Fields
from fleetfoot.config.model import ExpertsSpec, LayerSpec, MLPSpec, RouterSpec

Layers = tuple[LayerSpec, ...]

ROUTER_DEFAULTS: dict[str, Any] = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
_OF_TRAINING = (
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "router_z_loss_coef"),
    *("seq_aux", "aux_loss_alpha"),
)
"""Fields without an effect on the output."""


def mixtral_layers(fields: Fields, layers: Layers) -> Layers:
    """Mixtral (Jiang et al. 2024): every layer has experts, weighted by a softmax over the chosen ones."""
    return _sparse(layers, _experts(fields, fields.integer("intermediate_size"), RouterSpec()))


def granite_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """Granite-MoE (IBM 2024): experts as in Mixtral."""
    return mixtral_layers(fields, layers)


def olmoe_layers(fields: Fields, layers: Layers) -> Layers:
    """OLMoE (Muennighoff et al. 2024): every layer has experts, weighted by a softmax over all of them."""
    router = RouterSpec(is_normalized=fields.boolean("norm_topk_prob"))
    return _sparse(layers, _experts(fields, fields.integer("intermediate_size"), router))


def qwen3_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """Qwen3-MoE (Yang et al. 2025): every ``decoder_sparse_step``-th layer but ``mlp_only_layers`` has experts."""
    router = RouterSpec(is_normalized=fields.boolean("norm_topk_prob"))
    return _qwen_moe_layers(fields, layers, _experts(fields, fields.integer("moe_intermediate_size"), router))


def qwen2_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """Qwen2-MoE (Yang et al. 2024): beside the experts an MLP for every token, with a gate."""
    router = RouterSpec(is_normalized=fields.boolean("norm_topk_prob"))
    size = fields.integer("shared_expert_intermediate_size")
    shared: dict[str, Any] = {"shared_size": size, "has_shared_gate": True, "shared_name": "shared_expert"}
    return _qwen_moe_layers(fields, layers, _experts(fields, fields.integer("moe_intermediate_size"), router, **shared))


def gpt_oss_layers(fields: Fields, layers: Layers) -> Layers:
    """GPT-OSS (OpenAI 2025): biases in router and experts, and a SwiGLU of limited values."""
    fields.raw("initial_context_length")  # also in the rope's parameters
    limits: dict[str, Any] = {"alpha": fields.number("swiglu_alpha"), "limit": fields.number("swiglu_limit")}
    router = RouterSpec(has_bias=True)
    size = fields.integer("intermediate_size")
    return _sparse(layers, _experts(fields, size, router, has_bias=True, activation="clamped", **limits))


def glm4_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """GLM-4.5 (Zeng et al. 2025): DeepSeek-V3's router, an MLP for every token, and first layers without experts."""
    num_groups, num_experts = fields.integer("n_group"), _number(fields, "n_routed_experts", "num_local_experts")
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise fields.error("n_group", f"expected a divisor of {num_experts} experts, with at least 2 in a group")
    router = RouterSpec(
        "sigmoid",
        fields.boolean("norm_topk_prob"),
        fields.number("routed_scaling_factor"),
        has_correction=True,
        num_groups=num_groups,
        num_chosen_groups=fields.integer("topk_group", maximum=num_groups),
    )
    size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", minimum=0) * size
    names = ("n_routed_experts", "num_local_experts")
    experts = _experts(fields, size, router, names=names, shared_size=shared)
    first = fields.integer("first_k_dense_replace", minimum=0)
    return _sparse(layers, experts, lambda layer: layer >= first)


def _qwen_moe_layers(fields: Fields, layers: Layers, experts: ExpertsSpec) -> Layers:
    step, dense = fields.integer("decoder_sparse_step"), fields.raw("mlp_only_layers")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error("mlp_only_layers", "expected a list of numbers of layers")
    return _sparse(layers, experts, lambda layer: layer not in dense and (layer + 1) % step == 0)


def _experts(
    fields: Fields,
    size: int,
    router: RouterSpec,
    *,
    names: tuple[str, ...] = ("num_experts", "num_local_experts"),
    **more: Any,
) -> ExpertsSpec:
    """``size``: of an expert; ``names``: those that the number of experts can have."""
    for name in _OF_TRAINING:
        fields.raw(name)
    num_experts = _number(fields, *names)
    num_chosen = _number(fields, "num_experts_per_tok", "experts_per_token")
    available = num_experts // router.num_groups * router.num_chosen_groups
    if num_chosen > available:
        raise fields.error("num_experts_per_tok", f"expected at most {available}, the experts that can be chosen")
    return ExpertsSpec(num_experts, num_chosen, size, router, **more)


def _number(fields: Fields, *names: str) -> int:
    """The value of the field that has it under any of these names."""
    given = [name for name in names if fields.content.get(name) is not None]
    values = {name: fields.integer(name) for name in given or [next(n for n in names if fields.raw(n) is not None)]}
    for name in names:
        fields.raw(name)
    if len(set(values.values())) > 1:
        raise fields.error(given[0], f"expected the same as {given[1]}, {values[given[1]]}")
    return next(iter(values.values()))


def _sparse(layers: Layers, experts: ExpertsSpec, has_experts: Callable[[int], bool] = lambda layer: True) -> Layers:
    """``layers`` with experts in place of the MLP in some."""

    def with_experts(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, MLPSpec)
        return replace(layer, mlp=experts)

    return tuple(with_experts(layer) if has_experts(index) else layer for index, layer in enumerate(layers))
