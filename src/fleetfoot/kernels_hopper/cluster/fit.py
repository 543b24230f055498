"""Which models and steps the cluster kernels of a layer compute, from the model's config. No torch."""

from __future__ import annotations

from dataclasses import replace

from fleetfoot.config.model import NORM_BEFORE, MLPSpec, ModelConfig
from fleetfoot.kernels.interface import NO_LAYER_CHAIN, LayerChainPlan
from fleetfoot.kernels_hopper.cluster.layer_blocks import LayerShape, LayerTiling, misfit
from fleetfoot.records.kv_layout import TOKEN_MAJOR_NHD

MOST_ROWS, MOST_ELEMENTS = 4, 8192
"""Rows, and rows times hidden size, up to which two kernels compute a layer; 0 rows: they are switched off. On an H200,
ms a token with two and with five kernels: Qwen3-0.6B 4 rows 0.67 and 0.75, Qwen3-1.7B 1.28 and 1.38, Qwen3-4B 2 rows
2.66 and 2.73, 4 rows 2.93 and 2.78."""
MOST_POSITIONS = 8400
"""Maximum context of one row, of heads of 128; twice as long of heads of 64; several rows: see `max_context`. On an
H200, ms a token of Qwen3-0.6B with two and with five kernels: 4,000 tokens 0.72 and 0.92, 16,000 1.41 and 1.22; 2 rows
of 2,000 0.78 and 0.90, of 4,000 1.01 and 0.99; 4 rows of 1,000 0.82 and 0.86, of 2,000 1.06 and 0.98. On an H100 they
are equal at 15,000, 12,000 and 9,600 tokens together. Two clusters read the same K and V."""
_FEW_KV_HEADS, _FEW_KV_HEADS_ROWS = 8, 2
"""Each of fewer KV heads is computed and read by more clusters: half of the context, and so many rows at most.
TinyLlama, which has 4: 4 rows 0.957 and 0.919; 2 rows of 2,000 tokens 0.98 and 0.98, of 4,000 1.12 and 1.07."""
MOST_HIDDEN = 2560
"""Maximum hidden size. A layer of Llama-3.1-8B takes 118 us with one row, and 116 with five kernels."""


def max_rows(hidden_size: int, num_kv_heads: int) -> int:
    """Most rows of a step: 0, 1, 2, 4 or 8."""
    rows = min(MOST_ROWS, MOST_ELEMENTS // hidden_size) if hidden_size <= MOST_HIDDEN else 0
    if num_kv_heads < _FEW_KV_HEADS:
        rows = min(rows, _FEW_KV_HEADS_ROWS)
    return 1 << rows.bit_length() - 1 if rows else 0


def max_context(head_dim: int, num_kv_heads: int, rows: int) -> int:
    """The longest context of a step of ``rows``, a power of two. 2 and 4 rows have together 0.79 and 0.63 of what one
    row may have; with few KV heads one row has half of that, and 2 rows a quarter."""
    positions = MOST_POSITIONS * rows ** (-1 / 3) if num_kv_heads >= _FEW_KV_HEADS else MOST_POSITIONS / (2 * rows)
    return int(positions * 128 / head_dim) // rows


def plan_layer_chain(
    model: ModelConfig,
    *,
    dtype: str,
    block_size: int,
    kv_layout: str,
    num_ranks: int,
    is_hopper: bool,
    num_sms: int,
    has_nvrtc: bool,
    has_fp8_kv: bool = False,
) -> LayerChainPlan:
    """``is_hopper``: the GPU; ``num_sms``: its multiprocessors; ``has_nvrtc``: the compiler is installed;
    ``has_fp8_kv``: the KV cache is in FP8."""
    if not MOST_ROWS or model.has_experts or model.has_states:
        return NO_LAYER_CHAIN
    layer, *others = {replace(each, mixer=replace(each.mixer, rope=None, window=None)) for each in model.layers}
    if others:
        return LayerChainPlan(reason="layers differ")
    mixer, mlp = layer.mixer, layer.mlp
    rows = max_rows(model.hidden_size, mixer.num_kv_heads)
    tiling = LayerTiling(rows)
    num_blocks = tiling.clusters * tiling.ctas
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    shape = LayerShape(model.hidden_size, *heads, mlp.intermediate_size, block_size)
    reasons = {
        "the GPU is not a Hopper": is_hopper,
        f"the GPU has {num_sms} multiprocessors for their {num_blocks} thread blocks": (
            not is_hopper or num_sms >= num_blocks
        ),
        "NVRTC, which compiles them, is not among the packages that torch installs": has_nvrtc,
        f"the KV layout is {kv_layout}": kv_layout != TOKEN_MAJOR_NHD,
        f"the dtype is {dtype}": dtype == "bfloat16",
        "KV is in FP8": not has_fp8_kv,
        f"there are {num_ranks} ranks": num_ranks == 1,
        f"the hidden size {model.hidden_size} is above {MOST_HIDDEN}": rows > 0,
        "biases": not (mixer.qkv_bias or mixer.o_bias or mlp.has_bias),
        "windows": not any(layer.mixer.window for layer in model.layers),
        "layers without positions": all(layer.mixer.rope for layer in model.layers),
        "a factor of the residual stream": layer.residual_multiplier == 1.0,
        "norms of q and k over all heads": not mixer.qk_norm_over_heads,
        "norms elsewhere than before attention and MLP": layer.mixer_norms == layer.mlp_norms == NORM_BEFORE,
        "norm weights around 1": not model.norm_offset,
        "a soft cap of scores": mixer.soft_cap is None,
        "an MLP other than SwiGLU": isinstance(mlp, MLPSpec) and (mlp.has_gate, mlp.activation) == (True, "silu"),
    }
    failed = [reason for reason, holds in reasons.items() if not holds]
    if not failed and (problem := misfit(shape, tiling)):
        failed = [problem]
    if failed:
        return LayerChainPlan(reason=", ".join(failed))
    powers = (1 << power for power in range(rows.bit_length()))
    return LayerChainPlan(rows, tuple((n, max_context(mixer.head_dim, mixer.num_kv_heads, n)) for n in powers))
