"""Which models and steps the cluster kernels of a layer compute, from the model's config. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import ModelConfig
from fleetfoot.kernels.cluster.layer_blocks import MAX_ROWS, LayerShape, LayerTiling, misfit

MOST_ELEMENTS = 4096
"""Rows times hidden size up to which two kernels compute a layer; 0: they are switched off. Qwen3-0.6B on an H200, ms a
token against five kernels: 1 row 0.52 and 0.68, 2 rows 0.54 and 0.71, 4 rows 0.64 and 0.73, 8 rows 0.83 and 0.81."""
MOST_HIDDEN = 1024
"""Maximum hidden size. Larger layers are bound by memory, which the ring of one multiprocessor does not keep as busy as
the other kernels: Llama-3.1-8B takes 5.0 ms a token against 4.0."""


@dataclass(frozen=True, slots=True)
class LayerChainPlan:
    """Steps of decoder layers in two kernels each."""

    max_rows: int = 0
    """Most requests of a decode; 0: none."""
    reason: str = ""
    """Why there are none; empty: they are switched off, or not for this device."""


NO_LAYER_CHAIN = LayerChainPlan()


def max_rows(hidden_size: int) -> int:
    """Most rows of a step: 0, 1, 2, 4 or 8."""
    if hidden_size > MOST_HIDDEN:
        return 0
    return max((rows for rows in (1, 2, 4, MAX_ROWS) if rows * hidden_size <= MOST_ELEMENTS), default=0)


def plan_layer_chain(
    model: ModelConfig, *, dtype: str, block_size: int, num_ranks: int, is_hopper: bool, has_nvrtc: bool
) -> LayerChainPlan:
    """``is_hopper``: the GPU; ``has_nvrtc``: the compiler is installed."""
    rows = max_rows(model.hidden_size)
    if not MOST_ELEMENTS:
        return NO_LAYER_CHAIN
    heads = model.num_heads, model.num_kv_heads, model.head_dim
    shape = LayerShape(model.hidden_size, *heads, model.intermediate_size, block_size)
    reasons = {
        "the GPU is not a Hopper": is_hopper,
        "NVRTC, which compiles them, is not among the packages that torch installs": has_nvrtc,
        f"the dtype is {dtype}": dtype == "bfloat16",
        f"there are {num_ranks} ranks": num_ranks == 1,
        f"the hidden size {model.hidden_size} is above {min(MOST_HIDDEN, MOST_ELEMENTS)}": rows > 0,
        "biases": not (model.qkv_bias or model.o_bias or model.mlp_bias),
        "windows": not any(model.layer_windows),
        "layers without positions": all(model.layer_ropes),
        "a factor of the residual stream": model.residual_multiplier == 1.0,
        "norms of q and k over all heads": not model.qk_norm_over_heads,
    }
    failed = [reason for reason, holds in reasons.items() if not holds]
    if not failed and (problem := misfit(shape, LayerTiling(rows))):
        failed = [problem]
    return LayerChainPlan(reason=", ".join(failed)) if failed else LayerChainPlan(rows)
