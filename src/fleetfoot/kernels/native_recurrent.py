"""Convolutions and recurrences of steps with a few tokens for each request, in C; other steps take the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fleetfoot.kernels.native_ops import DTYPES
from fleetfoot.kernels.recurrent.conv import L2_EPS, CausalConv, causal_conv_torch
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm, gated_rms_norm_torch
from fleetfoot.kernels.recurrent.recurrence import Recurrence, RecurrenceInputs, recurrence_torch
from fleetfoot.native.loading import NativeLibrary
from fleetfoot.records.forward_context import MAX_STEPS, StateBatch

_MAX_SIZE, _MAX_TAPS, _LANES = 256, 8, 16
"""Limits of the C kernels: elements of a head, taps; heads of keys are multiples of the widest vectors."""


def causal_conv_native(
    library: NativeLibrary, x: torch.Tensor, state: torch.Tensor, conv: CausalConv, batch: StateBatch
) -> torch.Tensor:
    """See `causal_conv_torch`."""
    (num_taps, channels), block = conv.weight.shape, conv.norm_size or 128
    others = (conv.weight, state) if conv.bias is None else (conv.weight, state, conv.bias)
    is_odd = any(each.dtype is not x.dtype for each in others) or x.stride(1) != 1
    is_large = batch.max_query_len > MAX_STEPS or num_taps > _MAX_TAPS or block > _MAX_SIZE
    if x.dtype not in DTYPES or is_odd or is_large:
        return causal_conv_torch(x, state, conv, batch)
    out = x.new_empty(len(x), channels)
    library.convolution_steps(
        out.data_ptr(), x.data_ptr(), x.stride(0), conv.weight.data_ptr(), _pointer(conv.bias), state.data_ptr(),
        state.stride(0), *_places(batch), num_taps, channels, block, conv.num_normed if conv.norm_size else 0, L2_EPS,
        conv.has_silu, conv.is_gated, DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def recurrence_native(
    library: NativeLibrary, inputs: RecurrenceInputs, state: torch.Tensor, parameters: Recurrence, batch: StateBatch,
    norm: GatedNorm | None,
) -> torch.Tensor:  # fmt: skip
    """See `recurrence_torch`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    _, num_heads, v_size, k_size = state.shape
    strides = {each.stride(0) for each in (q, k, v)}
    is_odd = state.dtype is not torch.float32 or len(strides) > 1 or not state[0].is_contiguous()
    is_large = batch.max_query_len > MAX_STEPS or max(k_size, v_size) > _MAX_SIZE or k_size % _LANES > 0
    if v.dtype not in DTYPES or is_odd or is_large:
        return recurrence_torch(inputs, state, parameters, batch, norm)
    step = F.softplus(inputs.gate.float() + parameters.step_bias)  # [num_tokens, num_heads]
    rate = step if inputs.beta is None else inputs.beta.float().sigmoid()
    decay = (-parameters.log_decay.exp() * step).exp()
    is_delta, out = inputs.beta is not None, v.new_empty(len(v), num_heads * v_size)
    own = norm if norm is not None and norm.is_gate_last and norm.group_size == v_size == len(norm.weight) else None
    of_norm: tuple[int | None, int, int | None, float] = (None, 0, None, 0.0)
    if own is not None:
        of_norm = own.gate.data_ptr(), own.gate.stride(0), own.weight.data_ptr(), own.eps
    library.recurrence_steps(
        out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), v.stride(0), decay.data_ptr(), rate.data_ptr(),
        _pointer(parameters.skip), state.data_ptr(), state.stride(0), *_places(batch), num_heads, q.shape[1], k_size,
        v_size, k_size**-0.5 if is_delta else 1.0, is_delta, *of_norm, DTYPES[v.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out if norm is None or own is not None else gated_rms_norm_torch(out, norm)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _places(batch: StateBatch) -> tuple[int, ...]:
    """The addresses of the requests' borders and slots, slots that a request may write, and requests."""
    write = batch.write_slots
    assert write.is_contiguous() and batch.read_slots.is_contiguous() and batch.query_start_loc.is_contiguous()
    return batch.query_start_loc.data_ptr(), batch.read_slots.data_ptr(), write.data_ptr(), *write.shape[::-1]
