"""Rotary position embedding (Su et al. 2021), per-head q/k norm and the KV cache write, in one operation."""

from __future__ import annotations

import torch

from fleetfoot.kernels.norm.rms_norm import rms_norm_torch


def rotate_torch(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair ``(x[i], x[i + head_dim / 2])`` by its angle.

    Args:
        x: ``[num_tokens, num_heads, head_dim]`` float32.
        cos_sin: ``[num_tokens, head_dim]`` float32, cosines in the first half, sines in the second.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def write_kv_torch(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write ``key`` and ``value`` (``[num_tokens, num_kv_heads, head_dim]``) to their slots, but for negative ones."""
    block_size = kv_cache.shape[3]
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    kv_cache[block, 0, :, offset] = key
    kv_cache[block, 1, :, offset] = value


def rope_and_cache_torch(
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
    """See `Kernels.rope_and_cache`. Norm and rotation run in float32; q and k are rounded once, after the rotation.

    Args:
        qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, written in place.
        slot_mapping: ``[num_tokens]`` int64, block id * block_size + offset; negative: not written.
        positions: ``[num_tokens]`` int64.
        cos_sin: ``[max_positions, head_dim]`` float32.
        q_norm: ``[head_dim]``, likewise ``k_norm``; None: no norm.

    Returns:
        query ``[num_tokens, num_heads, head_dim]``.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = query.float(), key.float()
    if q_norm is not None:
        query = rms_norm_torch(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm_torch(key, k_norm, eps)
    angles = cos_sin[positions]  # [num_tokens, head_dim]
    write_kv_torch(rotate_torch(key, angles).to(qkv.dtype), value, kv_cache, slot_mapping)
    return rotate_torch(query, angles).to(qkv.dtype)
