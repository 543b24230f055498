"""The causal convolution in Triton: see `fleetfoot.kernels.recurrent.conv`.

Requests of a few tokens have a program for each head of channels, which takes their tokens one after the other and
keeps the window in registers: what it reads and writes of the state is its own, so a state may be written in place.
Longer ones have programs for each chunk, and their states are written when all of these have read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.recurrent.batch import max_chunks
from fleetfoot.kernels.recurrent.conv import L2_EPS, CausalConv
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, search_steps, triton_kernel, upper_bound
from fleetfoot.records.forward_context import CHUNK, MAX_STEPS, StateBatch

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 128
"""Channels of a program that norms no heads."""


def causal_conv_triton(x: torch.Tensor, state: torch.Tensor, conv: CausalConv, batch: StateBatch) -> torch.Tensor:
    """See `causal_conv_torch`. The last dimension of ``state`` has a stride of 1, as that of ``x``."""
    num_taps, channels = conv.weight.shape
    out = x.new_empty(len(x), channels)
    width = conv.norm_size or _TILE
    num_tiles, overlap = cdiv(channels, width), can_overlap(x.device)
    shape = {
        "channels": channels, "num_taps": num_taps, "width": width, "tile": next_power_of_2(width),
        "num_normed": conv.num_normed, "l2_eps": L2_EPS, "has_bias": conv.bias is not None,
        "has_silu": conv.has_silu, "is_gated": conv.is_gated,
    }  # fmt: skip
    bias, num_kept = conv.weight if conv.bias is None else conv.bias, batch.write_slots.shape[1]
    slots = batch.read_slots, batch.write_slots
    strides = x.stride(0), state.stride(0), state.stride(1)
    if batch.num_reqs and len(x):
        _conv_steps_kernel[(num_tiles, batch.num_reqs)](
            out, x, state, conv.weight, bias, batch.query_start_loc, *slots, *strides, num_kept,
            max_steps=MAX_STEPS, overlap=overlap, num_warps=1, **shape, **launch_options(overlap),
        )  # fmt: skip
    if num_chunks := max_chunks(batch, len(x)):
        _conv_chunks_kernel[(num_tiles, num_chunks)](
            out, x, state, conv.weight, bias, batch.query_start_loc, batch.chunk_starts, batch.read_slots, *strides,
            batch.num_reqs, search_steps(batch.num_reqs), chunk=CHUNK, num_warps=8, **shape,
        )  # fmt: skip
        options = {"channels": channels, "num_taps": num_taps, "tile": _TILE, "is_gated": conv.is_gated, "num_warps": 1}
        _keep_inputs_kernel[(cdiv(channels, _TILE), batch.num_reqs)](
            state, x, batch.query_start_loc, *slots, *strides, num_kept, max_steps=MAX_STEPS, **options
        )
        if batch.chunk_slots is not None:
            _keep_snapshots_kernel[(cdiv(channels, _TILE), num_chunks)](
                state, x, batch.query_start_loc, batch.chunk_starts, batch.chunk_slots, *strides,
                batch.num_reqs, search_steps(batch.num_reqs), chunk=CHUNK, **options,
            )  # fmt: skip
    return out


@triton_kernel()
def _input(x_ptr, place, channels: tl.constexpr, is_gated: tl.constexpr, mask):
    """The input of the convolution at ``place`` of ``x``."""
    value = tl.load(x_ptr + place, mask=mask, other=0.0)
    if is_gated:
        second = tl.load(x_ptr + place + 2 * channels, mask=mask, other=0.0)
        value = (value.to(tl.float32) * second.to(tl.float32)).to(value.dtype)
    return value


@triton_kernel()
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton_kernel(unspecialized=("num_kept",))
def _conv_steps_kernel(
    out_ptr, x_ptr, state_ptr, weight_ptr, bias_ptr, query_start_ptr, read_ptr, write_ptr,
    x_stride, slot_stride, tap_stride, num_kept,
    channels: tl.constexpr, num_taps: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, num_normed: tl.constexpr,
    l2_eps: tl.constexpr, has_bias: tl.constexpr, has_silu: tl.constexpr, is_gated: tl.constexpr,
    max_steps: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    request = tl.program_id(1).to(tl.int64)
    first_channel = tl.program_id(0) * width
    element = tl.arange(0, tile)
    channel = first_channel + element  # [tile], like all below
    in_tile = (element < width) & (channel < channels)
    bias = tl.zeros((tile,), dtype=tl.float32)
    if has_bias:
        bias = tl.load(bias_ptr + channel, mask=in_tile, other=0.0).to(tl.float32)
    start = tl.load(query_start_ptr + request)
    length = tl.load(query_start_ptr + request + 1) - start
    length = tl.where(length <= max_steps, length, 0)
    old_ptr = state_ptr + tl.load(read_ptr + request).to(tl.int64) * slot_stride + channel
    # the window, the newest input last; unused variables of shorter convolutions are not in the compiled kernel
    dtype = state_ptr.dtype.element_ty
    has_tokens = in_tile & (length > 0)
    oldest = tl.zeros((tile,), dtype=dtype)
    middle = oldest
    newest = oldest
    if num_taps > 3:
        oldest = tl.load(old_ptr + (num_taps - 4) * tap_stride, mask=has_tokens, other=0.0)
    if num_taps > 2:
        middle = tl.load(old_ptr + (num_taps - 3) * tap_stride, mask=has_tokens, other=0.0)
    newest = tl.load(old_ptr + (num_taps - 2) * tap_stride, mask=has_tokens, other=0.0)
    wait_for_inputs(overlap)  # no other kernel of the step writes the state
    for index in range(length):
        token = (start + index).to(tl.int64)
        current = _input(x_ptr, token * x_stride + channel, channels, is_gated, in_tile)
        total = bias
        if num_taps > 3:
            weight = tl.load(weight_ptr + (num_taps - 4) * channels + channel, mask=in_tile, other=0.0)
            total += weight.to(tl.float32) * oldest.to(tl.float32)
        if num_taps > 2:
            weight = tl.load(weight_ptr + (num_taps - 3) * channels + channel, mask=in_tile, other=0.0)
            total += weight.to(tl.float32) * middle.to(tl.float32)
        weight = tl.load(weight_ptr + (num_taps - 2) * channels + channel, mask=in_tile, other=0.0)
        total += weight.to(tl.float32) * newest.to(tl.float32)
        weight = tl.load(weight_ptr + (num_taps - 1) * channels + channel, mask=in_tile, other=0.0)
        total += weight.to(tl.float32) * current.to(tl.float32)
        if has_silu:
            total = _silu(total)
        if is_gated:
            gate = tl.load(x_ptr + token * x_stride + channels + channel, mask=in_tile, other=0.0)
            total *= gate.to(tl.float32)
        if num_normed > 0:
            squares = tl.sum(tl.where(in_tile, total * total, 0.0), axis=0)
            total *= tl.where(first_channel < num_normed, tl.rsqrt(squares + l2_eps), 1.0)
        tl.store(out_ptr + token * channels + channel, total.to(out_ptr.dtype.element_ty), mask=in_tile)
        oldest = middle
        middle = newest
        newest = current.to(dtype)
        column = num_kept - length + index
        slot = tl.load(write_ptr + request * num_kept + column, mask=column >= 0, other=-1).to(tl.int64)
        new_ptr = state_ptr + slot * slot_stride + channel
        is_kept = in_tile & (slot >= 0)
        if num_taps > 3:
            tl.store(new_ptr + (num_taps - 4) * tap_stride, oldest, mask=is_kept)
        if num_taps > 2:
            tl.store(new_ptr + (num_taps - 3) * tap_stride, middle, mask=is_kept)
        tl.store(new_ptr + (num_taps - 2) * tap_stride, newest, mask=is_kept)


@triton_kernel(unspecialized=("num_reqs", "search"))
def _conv_chunks_kernel(
    out_ptr, x_ptr, state_ptr, weight_ptr, bias_ptr, query_start_ptr, chunk_starts_ptr, read_ptr,
    x_stride, slot_stride, tap_stride, num_reqs, search,
    channels: tl.constexpr, num_taps: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, num_normed: tl.constexpr,
    l2_eps: tl.constexpr, has_bias: tl.constexpr, has_silu: tl.constexpr, is_gated: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    request, first, num_rows, start = find_chunk(query_start_ptr, chunk_starts_ptr, num_reqs, search, chunk)
    if num_rows <= 0:
        return
    first_channel = tl.program_id(0) * width
    element = tl.arange(0, tile)
    channel = (first_channel + element)[None, :]  # [1, tile]
    in_tile = (element < width)[None, :] & (channel < channels)
    row = tl.arange(0, chunk)[:, None]  # [chunk, 1]
    token = (first + row).to(tl.int64)
    is_row = (row < num_rows) & in_tile  # [chunk, tile]
    old_ptr = state_ptr + tl.load(read_ptr + request).to(tl.int64) * slot_stride + channel
    total = tl.zeros((chunk, tile), dtype=tl.float32)
    if has_bias:
        total += tl.load(bias_ptr + channel, mask=in_tile, other=0.0).to(tl.float32)
    for tap in tl.static_range(num_taps):
        source = token - (num_taps - 1 - tap)
        before = source - start  # negative: in the state
        value = _input(x_ptr, source * x_stride + channel, channels, is_gated, is_row & (before >= 0)).to(tl.float32)
        old = tl.load(old_ptr + (num_taps - 1 + before) * tap_stride, mask=is_row & (before < 0), other=0.0)
        weight = tl.load(weight_ptr + tap * channels + channel, mask=in_tile, other=0.0).to(tl.float32)
        total += weight * (value + old.to(tl.float32))
    if has_silu:
        total = _silu(total)
    if is_gated:
        total *= tl.load(x_ptr + token * x_stride + channels + channel, mask=is_row, other=0.0).to(tl.float32)
    if num_normed > 0:
        squares = tl.sum(tl.where(is_row, total * total, 0.0), axis=1)
        total *= tl.where(first_channel < num_normed, tl.rsqrt(squares + l2_eps), 1.0)[:, None]
    tl.store(out_ptr + token * channels + channel, total.to(out_ptr.dtype.element_ty), mask=is_row)


@triton_kernel(specialize=False)
def find_chunk(query_start_ptr, chunk_starts_ptr, num_reqs, search, chunk: tl.constexpr):
    """The chunk of program 1: its request, its first token, its tokens and the request's first token; 0 tokens beyond
    the last chunk."""
    index = tl.program_id(1)
    request = tl.minimum(upper_bound(chunk_starts_ptr + 1, num_reqs, search, index), num_reqs - 1)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    first = start + (index - tl.load(chunk_starts_ptr + request)) * chunk
    is_chunk = index < tl.load(chunk_starts_ptr + num_reqs)
    return request, first, tl.where(is_chunk, tl.minimum(end - first, chunk), 0), start


@triton_kernel(unspecialized=("num_kept",))
def _keep_inputs_kernel(
    state_ptr, x_ptr, query_start_ptr, read_ptr, write_ptr,
    x_stride, slot_stride, tap_stride, num_kept,
    channels: tl.constexpr, num_taps: tl.constexpr, tile: tl.constexpr, max_steps: tl.constexpr, is_gated: tl.constexpr,
):  # fmt: skip
    """The last inputs of the requests with chunks, which have more tokens than taps."""
    request = tl.program_id(1).to(tl.int64)
    end = tl.load(query_start_ptr + request + 1).to(tl.int64)
    slot = tl.load(write_ptr + request * num_kept + num_kept - 1).to(tl.int64)
    if (end - tl.load(query_start_ptr + request) > max_steps) & (slot >= 0):
        _copy_inputs(
            state_ptr + slot * slot_stride, x_ptr, end, x_stride, tap_stride, channels, num_taps, tile, is_gated
        )


@triton_kernel(unspecialized=("num_reqs", "search"))
def _keep_snapshots_kernel(
    state_ptr, x_ptr, query_start_ptr, chunk_starts_ptr, chunk_slots_ptr,
    x_stride, slot_stride, tap_stride, num_reqs, search,
    channels: tl.constexpr, num_taps: tl.constexpr, tile: tl.constexpr, is_gated: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The last inputs of the chunks after which a snapshot is kept."""
    _, first, num_rows, _ = find_chunk(query_start_ptr, chunk_starts_ptr, num_reqs, search, chunk)
    slot = tl.load(chunk_slots_ptr + tl.program_id(1), mask=num_rows == chunk, other=0).to(tl.int64)
    if slot > 0:
        end = (first + chunk).to(tl.int64)
        _copy_inputs(
            state_ptr + slot * slot_stride, x_ptr, end, x_stride, tap_stride, channels, num_taps, tile, is_gated
        )


@triton_kernel()
def _copy_inputs(
    new_ptr, x_ptr, end, x_stride, tap_stride,
    channels: tl.constexpr, num_taps: tl.constexpr, tile: tl.constexpr, is_gated: tl.constexpr,
):  # fmt: skip
    """The inputs before token ``end``, of a tile of channels."""
    channel = tl.program_id(0) * tile + tl.arange(0, tile)  # [tile]
    in_tile = channel < channels
    for tap in tl.static_range(num_taps - 1):
        place = (end - (num_taps - 1) + tap) * x_stride + channel
        value = _input(x_ptr, place, channels, is_gated, in_tile).to(new_ptr.dtype.element_ty)
        tl.store(new_ptr + tap * tap_stride + channel, value, mask=in_tile)
