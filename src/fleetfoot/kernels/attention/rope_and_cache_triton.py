"""q/k norm, rotation and the KV cache write on a GPU, in one launch: some heads of one token for each program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_HEADS_TILE = 8
_FEW_TOKENS = 512
"""Up to so many, programs are few, and take up to `_FEW_TOKENS_HEADS_TILE` heads."""
_FEW_TOKENS_HEADS_TILE = 32


def rope_and_cache_triton(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `Kernels.rope_and_cache` and its torch twin, which round at the same places.

    Raises:
        ValueError: widths that do not fit together, or a stride other than 1 within a row or a head.
    """
    num_tokens, width = qkv.shape
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    if (
        width != (num_heads + 2 * num_kv_heads) * head_dim
        or head_dim % 2
        or len(slot_mapping) != num_tokens
        or len(positions) != num_tokens
        or cos_sin.shape[1] != head_dim
        or qkv.stride(1) != 1
        or kv_cache.stride(4) != 1
        or not cos_sin.is_contiguous()
    ):
        raise ValueError(
            f"rope_and_cache: tensors that do not fit together: qkv {list(qkv.shape)} with strides {qkv.stride()}, "
            f"kv_cache {list(kv_cache.shape)} with strides {kv_cache.stride()}, cos_sin {list(cos_sin.shape)}, "
            f"{len(slot_mapping)} slots, {len(positions)} positions, {num_heads} heads"
        )
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    total_heads = num_heads + 2 * num_kv_heads
    # About a program for each multiprocessor: the sooner all have begun, the sooner the kernel behind them may, and few
    # leave room for it (an H100, 64 requests: 3% off a step against two heads for each program).
    wanted = next_power_of_2(cdiv(num_tokens * total_heads, gpu_limits(qkv.device).num_sms))
    heads_tile = max(2, min(wanted, _FEW_TOKENS_HEADS_TILE if num_tokens <= _FEW_TOKENS else _HEADS_TILE))
    overlap = can_overlap(qkv.device)
    _rope_and_cache_kernel[(num_tokens, cdiv(total_heads, heads_tile))](
        query,
        kv_cache,
        qkv,
        slot_mapping,
        positions,
        cos_sin,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        *kv_cache.stride()[:4],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        has_q_norm=q_norm is not None,
        has_k_norm=k_norm is not None,
        heads_tile=heads_tile,
        half_tile=next_power_of_2(head_dim // 2),
        overlap=overlap,
        num_warps=max(1, min(8, heads_tile // 2)),
        **launch_options(overlap),
    )
    return query


@triton_kernel()
def _rope_and_cache_kernel(
    query_ptr,
    kv_cache_ptr,
    qkv_ptr,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    qkv_stride,
    block_stride,
    kind_stride,
    head_stride,
    offset_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
    heads_tile: tl.constexpr,
    half_tile: tl.constexpr,
    overlap: tl.constexpr,
):
    # All tiles are [heads_tile, half_tile]: a head is two halves, whose elements rotate in pairs.
    launch_dependents(overlap)
    half: tl.constexpr = head_dim // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_tile + tl.arange(0, heads_tile)[:, None]
    column = tl.arange(0, half_tile)[None, :]
    in_half = column < half
    is_query = (head < num_heads) & in_half
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads) & in_half
    is_value = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads) & in_half
    is_head = is_query | is_key | is_value

    # The norms' weights do not depend on the step. A head without a norm keeps its values.
    low_weight = tl.full((heads_tile, half_tile), 1.0, tl.float32)
    high_weight = tl.full((heads_tile, half_tile), 1.0, tl.float32)
    if has_q_norm:
        low_weight = tl.load(q_norm_ptr + column, mask=is_query, other=1.0).to(tl.float32)
        high_weight = tl.load(q_norm_ptr + half + column, mask=is_query, other=1.0).to(tl.float32)
    if has_k_norm:
        low_k = tl.load(k_norm_ptr + column, mask=is_key, other=1.0).to(tl.float32)
        high_k = tl.load(k_norm_ptr + half + column, mask=is_key, other=1.0).to(tl.float32)
        low_weight = tl.where(is_key, low_k, low_weight)
        high_weight = tl.where(is_key, high_k, high_weight)
    wait_for_inputs(overlap)

    source_ptr = qkv_ptr + token * qkv_stride + head * head_dim + column
    low_raw = tl.load(source_ptr, mask=is_head, other=0.0)
    high_raw = tl.load(source_ptr + half, mask=is_head, other=0.0)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * head_dim + column
    cos = tl.load(angles_ptr, mask=in_half, other=1.0)
    sin = tl.load(angles_ptr + half, mask=in_half, other=0.0)
    low, high = low_raw.to(tl.float32), high_raw.to(tl.float32)
    if has_q_norm or has_k_norm:
        squares = tl.sum(low * low + high * high, axis=1, keep_dims=True)  # [heads_tile, 1]
        inverse_rms = 1.0 / tl.sqrt_rn(squares / head_dim + eps)
        is_normed = (is_query & has_q_norm) | (is_key & has_k_norm)
        low = tl.where(is_normed, low * inverse_rms * low_weight, low)
        high = tl.where(is_normed, high * inverse_rms * high_weight, high)
    dtype = query_ptr.dtype.element_ty
    low_out = (low * cos - high * sin).to(dtype)
    high_out = (high * cos + low * sin).to(dtype)

    query_out_ptr = query_ptr + (token * num_heads + head) * head_dim + column
    tl.store(query_out_ptr, low_out, mask=is_query)
    tl.store(query_out_ptr + half, high_out, mask=is_query)

    # Values are copied, whatever they hold.
    low_out = tl.where(is_value, low_raw, low_out).to(kv_cache_ptr.dtype.element_ty)
    high_out = tl.where(is_value, high_raw, high_out).to(kv_cache_ptr.dtype.element_ty)
    kind = tl.where(is_value, 1, 0)
    kv_head = tl.where(is_value, head - num_heads - num_kv_heads, head - num_heads)
    cache_ptr = kv_cache_ptr + (slot // block_size) * block_stride + (slot % block_size) * offset_stride
    cache_ptr += kind.to(tl.int64) * kind_stride + kv_head.to(tl.int64) * head_stride + column
    is_written = (is_key | is_value) & (slot >= 0)
    tl.store(cache_ptr, low_out, mask=is_written)
    tl.store(cache_ptr + half, high_out, mask=is_written)
