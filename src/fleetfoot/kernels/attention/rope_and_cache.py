"""Rotary position embedding (Su et al., 2021), per-head q/k norm and the KV cache write, in one operation.

The reference in torch, the Triton kernel, and device functions that attention kernels use to rotate heads themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.elementwise import rms_norm_torch
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.row_buckets import chosen_by_rows
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

if TYPE_CHECKING:
    import triton.language as tl

_HEADS_TILE = 8
_FEW_TOKENS = 512
"""Up to this many tokens the grid is small, and a program takes up to `_FEW_TOKENS_HEADS_TILE` heads."""
_FEW_TOKENS_HEADS_TILE = 32
_MANY_TOKENS = 2048
"""From this many tokens on, a program takes all heads of a token, for `_WHOLE_HEADS` query heads in groups of two or
more: 8,192 tokens of 16 heads with norms take 36 instead of 48 us on an H200, those of 32 heads without 52 instead of
61, with 8 KV heads of 128 elements."""
_WHOLE_HEADS = range(16, 33)
_WHOLE_PROGRAMS_PER_SM = 32
"""Maximum programs per multiprocessor of that grid: with more tokens, a program takes several, one after the other."""


def rotate_torch(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair ``(x[i], x[i + head_dim / 2])`` by its angle.

    Args:
        x: ``[num_tokens, num_heads, head_dim]`` float32.
        cos_sin: ``[num_tokens, head_dim]`` float32, cosines in the first half, sines in the second.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def largest_value(dtype: torch.dtype) -> float:
    """The largest number of a cache in FP8, to which larger ones are cut; 0: the dtype is another one."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_dim]`` to their slots; skip negative slots."""
    if kv_scales is not None:
        most = largest_value(kv_cache.dtype)
        key, value = (
            (x.float() / scale).clamp(-most, most).to(kv_cache.dtype)
            for x, scale in zip((key, value), kv_scales, strict=True)
        )
    block_size = kv_cache.shape[3]
    written = slot_mapping >= 0
    if slot_mapping.is_cuda:  # selecting would make the host wait
        key, value, slot_mapping = redirect_unwritten(key, value, kv_cache, slot_mapping)
    elif not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    kv_cache[block, 0, :, offset] = key
    kv_cache[block, 1, :, offset] = value


def redirect_unwritten(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of `write_kv_torch` without negative slots, of the same shapes, so that the host reads no value:
    tokens without a slot write what the first token with one writes; if there is none, what slot 0 holds."""
    written = slot_mapping >= 0
    first = written.to(torch.int32).argmax(keepdim=True)  # [1]
    is_any = written[first]
    slots = torch.where(written, slot_mapping, slot_mapping[first].clamp(min=0))
    key = torch.where(written[:, None, None], key, torch.where(is_any[:, None, None], key[first], kv_cache[0, 0, :, 0]))
    value = torch.where(
        written[:, None, None], value, torch.where(is_any[:, None, None], value[first], kv_cache[0, 1, :, 0])
    )
    return key, value, slots


def rope_and_cache_torch(
    qkv: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, num_heads: int, rotary: RotaryInputs
) -> torch.Tensor:
    """Reference of `Kernels.rope_and_cache`. Norm and rotation run in float32; q and k are rounded once, after that.

    Args:
        qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, written in place.
        metadata: ``slot_mapping`` and ``positions``; a negative slot is not written.

    Returns:
        query ``[num_tokens, num_heads, head_dim]``.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = query.float(), key.float()
    if rotary.q_norm is not None:
        query = rms_norm_torch(query, rotary.q_norm, rotary.eps, rotary.norm_offset)
    if rotary.k_norm is not None:
        key = rms_norm_torch(key, rotary.k_norm, rotary.eps, rotary.norm_offset)
    angles = rotary.cos_sin[metadata.positions]  # [num_tokens, head_dim]
    key = rotate_torch(key, angles).to(qkv.dtype)
    write_kv_torch(key, value, kv_cache, metadata.slot_mapping, rotary.kv_scales)
    return rotate_torch(query, angles).to(qkv.dtype)


@chosen_by_rows
def choose_heads_tile(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int) -> int | None:
    """Heads of a program; None: all of a token's, and several tokens."""
    is_grouped = 2 * num_kv_heads <= num_heads
    if num_tokens >= _MANY_TOKENS and num_heads in _WHOLE_HEADS and is_grouped and head_dim <= 128:
        return None
    # About one program per multiprocessor: the next kernel can start once all programs have started, and a small grid
    # leaves room for it (H100, 64 requests: a step takes 3% less than with two heads per program).
    heads_per_program = next_power_of_2(cdiv(num_tokens * (num_heads + 2 * num_kv_heads), num_sms))
    return max(2, min(heads_per_program, _FEW_TOKENS_HEADS_TILE if num_tokens <= _FEW_TOKENS else _HEADS_TILE))


def rope_and_cache_triton(
    qkv: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, num_heads: int, rotary: RotaryInputs
) -> torch.Tensor:
    """`rope_and_cache_torch` in one launch: a program handles some heads of one token, or all heads if there are many.
    It rounds at the same places.

    Raises:
        ValueError: the shapes do not match, or a stride within a row or a head is not 1.
    """
    num_tokens, width = qkv.shape
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    slot_mapping, positions = metadata.slot_mapping, metadata.positions
    cos_sin, q_norm, k_norm = rotary.cos_sin, rotary.q_norm, rotary.k_norm
    (token_stride, within), (*cache_strides, innermost) = qkv.stride(), kv_cache.stride()
    if (
        width != (num_heads + 2 * num_kv_heads) * head_dim
        or head_dim % 2
        or slot_mapping.shape[0] != num_tokens
        or positions.shape[0] != num_tokens
        or cos_sin.shape[1] != head_dim
        or within != 1
        or innermost != 1
        or not cos_sin.is_contiguous()
    ):
        raise ValueError(
            f"rope_and_cache: mismatched shapes: qkv {list(qkv.shape)} with strides {qkv.stride()}, "
            f"kv_cache {list(kv_cache.shape)} with strides {kv_cache.stride()}, cos_sin {list(cos_sin.shape)}, "
            f"{len(slot_mapping)} slots, {len(positions)} positions, {num_heads} heads"
        )
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    if num_tokens == 0:
        return query
    overlap, scales = can_overlap(qkv.device), rotary.kv_scales
    most = 0.0 if scales is None else largest_value(kv_cache.dtype)
    heads_tile = choose_heads_tile(num_tokens, num_heads, num_kv_heads, head_dim, gpu_limits(qkv.device).num_sms)
    if heads_tile is None:
        tokens_per_program = cdiv(num_tokens, gpu_limits(qkv.device).num_sms * _WHOLE_PROGRAMS_PER_SM)
        _rope_and_cache_whole_tokens_kernel[(cdiv(num_tokens, tokens_per_program),)](
            query, kv_cache, qkv, slot_mapping, positions, cos_sin, qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm, rotary.eps, cos_sin if scales is None else scales,
            num_tokens, tokens_per_program, token_stride, *cache_strides,
            num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim,
            has_q_norm=q_norm is not None, has_k_norm=k_norm is not None, norm_offset=rotary.norm_offset,
            q_tile=next_power_of_2(num_heads), kv_tile=next_power_of_2(num_kv_heads),
            half_tile=next_power_of_2(head_dim // 2), most=most, overlap=overlap, num_warps=4,
            **launch_options(overlap),
        )  # fmt: skip
        return query
    _rope_and_cache_kernel[(num_tokens, cdiv(num_heads + 2 * num_kv_heads, heads_tile))](
        query, kv_cache, qkv, slot_mapping, positions, cos_sin, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, rotary.eps, cos_sin if scales is None else scales, token_stride,
        *cache_strides,
        num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim,
        has_q_norm=q_norm is not None, has_k_norm=k_norm is not None, norm_offset=rotary.norm_offset,
        heads_tile=heads_tile, half_tile=next_power_of_2(head_dim // 2), most=most, overlap=overlap,
        num_warps=max(1, min(8, heads_tile // 2)), **launch_options(overlap),
    )  # fmt: skip
    return query


@triton_kernel()
def _rope_and_cache_kernel(
    query_ptr, kv_cache_ptr, qkv_ptr, slot_mapping_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    scales_ptr, qkv_stride, block_stride, kind_stride, head_stride, offset_stride,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr,
    has_q_norm: tl.constexpr, has_k_norm: tl.constexpr, norm_offset: tl.constexpr, heads_tile: tl.constexpr,
    half_tile: tl.constexpr, most: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    # All tiles are [heads_tile, half_tile]: elements of the two halves of a head rotate in pairs.
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
    if norm_offset != 0:  # heads without a norm do not read their weights
        low_weight += norm_offset
        high_weight += norm_offset
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

    # V is copied unchanged.
    kind = tl.where(is_value, 1, 0)
    scales = tl.load(scales_ptr + kind) if most > 0 else 1.0
    low_out = to_cache(tl.where(is_value, low_raw, low_out), scales, kv_cache_ptr, most)
    high_out = to_cache(tl.where(is_value, high_raw, high_out), scales, kv_cache_ptr, most)
    kv_head = tl.where(is_value, head - num_heads - num_kv_heads, head - num_heads)
    cache_ptr = kv_cache_ptr + (slot // block_size) * block_stride + (slot % block_size) * offset_stride
    cache_ptr += kind.to(tl.int64) * kind_stride + kv_head.to(tl.int64) * head_stride + column
    is_written = (is_key | is_value) & (slot >= 0)
    tl.store(cache_ptr, low_out, mask=is_written)
    tl.store(cache_ptr + half, high_out, mask=is_written)


@triton_kernel(unspecialized=("num_tokens", "tokens_per_program"))
def _rope_and_cache_whole_tokens_kernel(
    query_ptr, kv_cache_ptr, qkv_ptr, slot_mapping_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    scales_ptr, num_tokens, tokens_per_program, qkv_stride, block_stride, kind_stride, head_stride, offset_stride,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr,
    has_q_norm: tl.constexpr, has_k_norm: tl.constexpr, norm_offset: tl.constexpr, q_tile: tl.constexpr,
    kv_tile: tl.constexpr, half_tile: tl.constexpr, most: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    # For many tokens: all loads of a token are in flight at once, its angles are read once, and V is copied only.
    launch_dependents(overlap)
    half: tl.constexpr = head_dim // 2
    column = tl.arange(0, half_tile)[None, :]
    v_column = tl.arange(0, 2 * half_tile)[None, :]
    q_head = tl.arange(0, q_tile)[:, None]
    kv_head = tl.arange(0, kv_tile)[:, None]
    in_half = column < half
    is_query = (q_head < num_heads) & in_half
    is_key = (kv_head < num_kv_heads) & in_half
    is_value = (kv_head < num_kv_heads) & (v_column < head_dim)
    q_place = q_head * head_dim + column
    k_place = (num_heads + kv_head) * head_dim + column
    v_place = (num_heads + num_kv_heads + kv_head) * head_dim + v_column
    q_low_weight, q_high_weight = _norm_weights(q_norm_ptr, half, half_tile, has_q_norm, norm_offset)
    k_low_weight, k_high_weight = _norm_weights(k_norm_ptr, half, half_tile, has_k_norm, norm_offset)
    wait_for_inputs(overlap)

    k_scale = tl.load(scales_ptr) if most > 0 else 1.0
    v_scale = tl.load(scales_ptr + 1) if most > 0 else 1.0
    token = (tl.program_id(0) * tokens_per_program).to(tl.int64)
    end = tl.minimum(token + tokens_per_program, num_tokens)
    while token < end:
        row_ptr = qkv_ptr + token * qkv_stride
        q_low = tl.load(row_ptr + q_place, mask=is_query, other=0.0)
        q_high = tl.load(row_ptr + q_place + half, mask=is_query, other=0.0)
        k_low = tl.load(row_ptr + k_place, mask=is_key, other=0.0)
        k_high = tl.load(row_ptr + k_place + half, mask=is_key, other=0.0)
        value = tl.load(row_ptr + v_place, mask=is_value, other=0.0)
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * head_dim + column
        cos = tl.load(angles_ptr, mask=in_half, other=1.0)
        sin = tl.load(angles_ptr + half, mask=in_half, other=0.0)

        dtype = query_ptr.dtype.element_ty
        low, high = _norm_and_rotate_halves(
            q_low, q_high, cos, sin, q_low_weight, q_high_weight, eps, head_dim, has_q_norm
        )
        query_out_ptr = query_ptr + token * (num_heads * head_dim) + q_place
        tl.store(query_out_ptr, low.to(dtype), mask=is_query)
        tl.store(query_out_ptr + half, high.to(dtype), mask=is_query)

        cache_ptr = kv_cache_ptr + (slot // block_size) * block_stride + (slot % block_size) * offset_stride
        cache_ptr += kv_head.to(tl.int64) * head_stride
        low, high = _norm_and_rotate_halves(
            k_low, k_high, cos, sin, k_low_weight, k_high_weight, eps, head_dim, has_k_norm
        )
        is_written = is_key & (slot >= 0)
        # The query's dtype first: K is rounded as q is.
        tl.store(cache_ptr + column, to_cache(low.to(dtype), k_scale, kv_cache_ptr, most), mask=is_written)
        tl.store(cache_ptr + column + half, to_cache(high.to(dtype), k_scale, kv_cache_ptr, most), mask=is_written)
        value_ptr = cache_ptr + kind_stride + v_column
        tl.store(value_ptr, to_cache(value, v_scale, kv_cache_ptr, most), mask=is_value & (slot >= 0))
        token += 1


@triton_kernel(specialize=False)
def to_cache(x, scale, cache_ptr, most: tl.constexpr):
    """``x`` in the dtype of the cache: in FP8, with numbers up to ``most``, divided by ``scale``; 0: in another one."""
    if most > 0:
        x = tl.minimum(tl.maximum(tl.div_rn(x.to(tl.float32), scale), -most), most)
    return x.to(cache_ptr.dtype.element_ty)


@triton_kernel(specialize=False)
def _norm_weights(
    norm_ptr, half: tl.constexpr, half_tile: tl.constexpr, has_norm: tl.constexpr, norm_offset: tl.constexpr
):
    """The weights of the two halves of a head, ``[1, half_tile]`` float32 each; 1 without a norm."""
    low = tl.full((1, half_tile), 1.0, tl.float32)
    high = tl.full((1, half_tile), 1.0, tl.float32)
    if has_norm:
        column = tl.arange(0, half_tile)[None, :]
        low = tl.load(norm_ptr + column, mask=column < half, other=1.0).to(tl.float32) + norm_offset
        high = tl.load(norm_ptr + half + column, mask=column < half, other=1.0).to(tl.float32) + norm_offset
    return low, high


@triton_kernel(specialize=False)
def _norm_and_rotate_halves(
    low, high, cos, sin, low_weight, high_weight, eps, head_dim: tl.constexpr, has_norm: tl.constexpr
):
    """The norm if ``has_norm``, and the rotation, of the halves ``[heads, half_tile]`` of heads, in float32."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    if has_norm:
        squares = tl.sum(low * low + high * high, axis=1, keep_dims=True)  # [heads, 1]
        inverse_rms = 1.0 / tl.sqrt_rn(squares / head_dim + eps)
        low = low * inverse_rms * low_weight
        high = high * inverse_rms * high_weight
    return low * cos - high * sin, high * cos + low * sin


@triton_kernel(specialize=False)
def load_cos_sin(cos_sin_ptr, position, is_row, head_dim: tl.constexpr, padded_dim: tl.constexpr):
    """Cosines and signed sines ``[n, padded_dim]`` for ``position [n]``. The rotation of an element is
    ``element * cos + partner * sin``, with the partner half a head away."""
    column = tl.arange(0, padded_dim)
    half: tl.constexpr = head_dim // 2
    is_low = column < half
    angle_ptrs = cos_sin_ptr + tl.maximum(position, 0)[:, None] * head_dim + (column % half)[None, :]
    mask = is_row[:, None] & (column < head_dim)[None, :]
    cos = tl.load(angle_ptrs, mask=mask, other=1.0)
    sin = tl.load(angle_ptrs + half, mask=mask, other=0.0)
    return cos, tl.where(is_low[None, :], -sin, sin)


@triton_kernel(specialize=False)
def norm_and_rotate(
    head_ptrs, is_row, norm_ptr, eps, cos, sin,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, has_norm: tl.constexpr, norm_offset: tl.constexpr,
):  # fmt: skip
    """Load heads at ``head_ptrs [n]``, apply the norm if ``has_norm``, and rotate: ``[n, padded_dim]`` float32."""
    column = tl.arange(0, padded_dim)
    half: tl.constexpr = head_dim // 2
    partner = tl.where(column < half, column + half, column - half)
    mask = is_row[:, None] & (column < head_dim)[None, :]
    x = tl.load(head_ptrs[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        is_column = column < head_dim
        weight = tl.load(norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + partner, mask=is_column, other=0.0).to(tl.float32)
        if norm_offset != 0:
            weight += norm_offset
            partner_weight += norm_offset
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / head_dim + eps)
        x = x * inverse_rms[:, None] * weight[None, :]
        y = y * inverse_rms[:, None] * partner_weight[None, :]
    return x * cos + y * sin
