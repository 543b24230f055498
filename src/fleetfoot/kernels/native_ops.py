"""The operations in C. Inputs that a kernel does not support (float16, other strides) go to the torch reference."""

from __future__ import annotations

import torch

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul_torch
from fleetfoot.kernels.norm.rms_norm import add_rms_norm_torch, rms_norm_torch
from fleetfoot.kernels.sampling.sample import RandomRows, draw_filtered, mark_invalid, sample_cpu
from fleetfoot.native.library import DTYPES, NativeLibrary, check_status


def rms_norm_native(library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    dtype = x.dtype
    code = DTYPES.get(dtype)
    if code is None or not x.is_contiguous():
        return rms_norm_torch(x, weight, eps)
    size = x.shape[-1]
    if weight.dtype is not dtype or weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(_mismatch("rms_norm", x=x, weight=weight))
    output = torch.empty_like(x)
    num_rows = x.numel() // size if size else 0
    library.rms_norm(
        output.data_ptr(), x.data_ptr(), weight.data_ptr(), eps, num_rows, size, code, torch.get_num_threads()
    )
    return output


def add_rms_norm_native(
    library: NativeLibrary, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.add_rms_norm`."""
    dtype = x.dtype
    code = DTYPES.get(dtype)
    if code is None or not (x.is_contiguous() and residual.is_contiguous()):
        return add_rms_norm_torch(x, residual, weight, eps)
    size = x.shape[-1]
    if (
        weight.dtype is not dtype
        or residual.dtype is not dtype
        or residual.shape != x.shape
        or weight.shape != (size,)
        or not weight.is_contiguous()
    ):
        raise ValueError(_mismatch("add_rms_norm", x=x, residual=residual, weight=weight))
    output, total = torch.empty_like(x), torch.empty_like(x)
    library.add_rms_norm(
        output.data_ptr(),
        total.data_ptr(),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        x.numel() // size if size else 0,
        size,
        code,
        torch.get_num_threads(),
    )
    return output, total


def silu_and_mul_native(library: NativeLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_and_mul`."""
    dtype = gate_up.dtype
    code = DTYPES.get(dtype)
    if code is None or not gate_up.is_contiguous():
        return silu_and_mul_torch(gate_up)
    num_rows, width = gate_up.shape
    if width % 2:
        raise ValueError(_mismatch("silu_and_mul: gate and up must be equally wide", gate_up=gate_up))
    output = torch.empty((num_rows, width // 2), dtype=dtype)
    library.silu_and_mul(output.data_ptr(), gate_up.data_ptr(), num_rows, width // 2, code, torch.get_num_threads())
    return output


def rope_and_cache_native(
    library: NativeLibrary,
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
    """See `Kernels.rope_and_cache`."""
    dtype = qkv.dtype
    code = DTYPES.get(dtype)
    if code is None:
        return rope_and_cache_torch(qkv, kv_cache, slot_mapping, positions, cos_sin, num_heads, q_norm, k_norm, eps)
    num_tokens, width = qkv.shape
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    kv_stride, qkv_stride = kv_cache.stride(), qkv.stride()
    if (
        width != (num_heads + 2 * num_kv_heads) * head_dim
        or head_dim % 2
        or kv_cache.dtype is not dtype
        or qkv_stride[1] != 1
        or kv_stride[4] != 1
        or len(slot_mapping) != num_tokens
        or len(positions) != num_tokens
        or slot_mapping.dtype is not torch.int64
        or positions.dtype is not torch.int64
        or cos_sin.dtype is not torch.float32
        or cos_sin.shape[1] != head_dim
        or not cos_sin.is_contiguous()
        or not _is_norm(q_norm, head_dim, dtype)
        or not _is_norm(k_norm, head_dim, dtype)
    ):
        found = {"qkv": qkv, "kv_cache": kv_cache, "slot_mapping": slot_mapping, "positions": positions}
        raise ValueError(_mismatch("rope_and_cache", **found, cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm))
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype)
    status = library.rope_and_cache(
        query.data_ptr(),
        qkv.data_ptr(),
        qkv_stride[0],
        kv_cache.data_ptr(),
        num_blocks,
        *kv_stride[:4],
        slot_mapping.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[0],
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        num_tokens,
        num_heads,
        num_kv_heads,
        block_size,
        head_dim,
        code,
        torch.get_num_threads(),
    )
    if status:
        check_status(status, "rope_and_cache")
    return query


def sample_native(
    library: NativeLibrary,
    logits: torch.Tensor,
    random: RandomRows | None = None,
    *,
    invalid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Kernels.sample`."""
    code = DTYPES.get(logits.dtype)
    num_rows, vocab_size = logits.shape
    stride = logits.stride()
    if code is None or stride[1] != 1 or vocab_size == 0:
        return sample_cpu(logits, random, invalid=invalid, out=out)
    per_row: list[torch.Tensor] = []
    if random is not None:
        random = random.gathered()
        per_row = [random.temperatures, random.seeds, random.positions.to(torch.int64)]
        if [(tensor.dtype, len(tensor)) for tensor in per_row] != [
            (dtype, num_rows) for dtype in (torch.float32, torch.int64, torch.int64)
        ]:
            found = dict(zip(("temperatures", "seeds", "positions"), per_row, strict=True))
            raise ValueError(_mismatch("sample", logits=logits, **found))
        per_row = [tensor.contiguous() for tensor in per_row]
    pointers: list[int | None] = [tensor.data_ptr() for tensor in per_row] if per_row else [None] * 3
    token_ids = torch.empty(num_rows, dtype=torch.int64) if out is None else out
    status = library.choose_tokens(
        token_ids.data_ptr(),
        logits.data_ptr(),
        stride[0],
        num_rows,
        vocab_size,
        *pointers,
        code,
        torch.get_num_threads(),
    )
    if status:
        check_status(status, "sample")
    if random is not None:
        draw_filtered(token_ids, logits, random)
    if invalid is not None:
        mark_invalid(logits, token_ids, invalid)
    return token_ids


def _is_norm(weight: torch.Tensor | None, head_dim: int, dtype: torch.dtype) -> bool:
    return weight is None or (weight.dtype is dtype and weight.shape == (head_dim,) and weight.is_contiguous())


def _mismatch(operation: str, **tensors: torch.Tensor | None) -> str:
    found = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in tensors.items() if t is not None)
    return f"{operation}: tensors that do not fit together: {found}"
