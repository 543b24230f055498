"""Sums over the GPUs of a tensor group in one kernel, for the few rows of a decode step: alone, or with add and norm.

Every rank writes its rows straight to the memory of every rank, waits for the others' rows to arrive in its own, and
adds them up in rank order, so that all ranks get the same bits. A 64-bit word carries 32 bits of values and, as its
upper half, the number of the call: as such a word is written and read whole, its own upper half says that it has
arrived, and there is no flag to write, fence and read besides. (NCCL's "LL" protocol works in this way.)

The number of a call is kept on the device, for each row, so that the kernel can be replayed in a graph. Ranks make the
same calls in the same order. A rank is at most one call ahead of another, since it has waited for that one's words of
the call before; therefore two sets of words, used in turns, are enough, and nothing is ever cleared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_ROWS = 128
"""A program for each row, all of which run at the same time on GPUs with more multiprocessors than this: none waits for
one that has yet to begin."""
_MAX_TILE = 16384
_NUM_SETS = 2


def custom_all_reduce_words(hidden_size: int, dtype: torch.dtype, num_ranks: int) -> int:
    """64-bit words of each rank's memory that `CustomAllReduce` needs."""
    return _NUM_SETS * num_ranks * MAX_ROWS * _words_per_row(hidden_size, dtype)


def can_all_reduce(hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether rows of this kind can be cut into words, and are held by one program."""
    return hidden_size * dtype.itemsize % 4 == 0 and hidden_size <= _MAX_TILE and dtype.itemsize in (2, 4)


def _words_per_row(hidden_size: int, dtype: torch.dtype) -> int:
    return hidden_size * dtype.itemsize // 4


class CustomAllReduce:
    """Sums of ``[n, size]`` over the ranks, ``n`` at most `MAX_ROWS` and ``size`` at most ``hidden_size``.

    Args:
        memory: of `custom_all_reduce_words`, on every rank.
        rank, num_ranks: of the tensor group.
        hidden_size: of the widest model that is shared by the group; a drafter's may be less.
    """

    def __init__(
        self, memory: PeerMemory, rank: int, num_ranks: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._memory = memory
        self._rank = rank
        self._num_ranks = num_ranks
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._num_calls = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is of the shape and dtype that can be summed."""
        if x.ndim != 2 or x.dtype is not self._dtype or not 0 < x.shape[0] <= MAX_ROWS:
            return False
        return 0 < x.shape[1] <= self._hidden_size and can_all_reduce(x.shape[1], self._dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, size]`` -> its sum, computed in float32 and rounded once."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._launch(output, output, x, output, output, 0.0, num_parts=0, has_norm=False)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Kernels.add_rms_norm` of the sum of ``x``, with roundings to the dtype where the steps apart have theirs:
        each rank's ``x`` (which may be partial sums), their sum, and that with the residual."""
        x, residual = x.contiguous(), residual.contiguous()
        output, total = torch.empty_like(residual), torch.empty_like(residual)
        num_parts = x.shape[0] if x.ndim > residual.ndim else 0
        self._launch(output, total, x, residual, weight, eps, num_parts=num_parts, has_norm=True)
        return output, total

    def _launch(
        self,
        output: torch.Tensor,
        total: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        num_parts: int,
        has_norm: bool,
    ) -> None:
        num_rows, size = output.shape
        tile = next_power_of_2(size)
        overlap = can_overlap(x.device)
        _all_reduce_kernel[(num_rows,)](
            output,
            total,
            x,
            residual,
            weight,
            eps,
            num_rows,
            size,
            self._memory.local,
            self._memory.addresses,
            self._num_calls,
            self._rank,
            row_words=_words_per_row(self._hidden_size, self._dtype),
            num_ranks=self._num_ranks,
            num_parts=num_parts,
            has_norm=has_norm,
            is_wide=self._dtype.itemsize == 4,
            max_rows=MAX_ROWS,
            tile=tile,
            overlap=overlap,
            num_warps=min(16, max(4, tile // 512)),
            **launch_options(overlap),
        )


@triton_kernel(unspecialized=("num_rows", "rank"))
def _all_reduce_kernel(
    output_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    num_rows,
    size,
    local_ptr,
    addresses_ptr,
    num_calls_ptr,
    rank,
    row_words: tl.constexpr,
    num_ranks: tl.constexpr,
    num_parts: tl.constexpr,
    has_norm: tl.constexpr,
    is_wide: tl.constexpr,
    max_rows: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    per_word: tl.constexpr = 1 if is_wide else 2
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, tile)
    in_row = column < size
    word_index = tl.arange(0, tile // per_word)
    num_words = size // per_word
    if has_norm:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)  # [tile], like all below
    peers = ()
    for step in tl.static_range(num_ranks):
        # Another first one on each rank, so that they do not all write to the same GPU at the same time.
        address = tl.load(addresses_ptr + (rank + 1 + step) % num_ranks)
        peers += (tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16),)  # type: ignore[assignment]
    wait_for_inputs(overlap)

    offset = row * size + column
    value = tl.load(x_ptr + offset, mask=in_row, other=0.0)
    for part in tl.static_range(1, num_parts):
        value += tl.load(x_ptr + part * num_rows.to(tl.int64) * size + offset, mask=in_row, other=0.0)
    if has_norm:
        residual = tl.load(residual_ptr + offset, mask=in_row, other=0.0)
    call = tl.load(num_calls_ptr + row) + 1
    stamp = call.to(tl.uint32, bitcast=True).to(tl.uint64)
    words = pack_words(value.to(dtype), is_wide, tile) | (stamp << 32)  # [tile // per_word]
    # The words of a row, from rank 0, 1, ...: [set, rank, row, word].
    first = (call & 1).to(tl.int64) * num_ranks * max_rows + row
    own_offset = (first + rank.to(tl.int64) * max_rows) * row_words + word_index
    for step in tl.static_range(num_ranks):
        tl.store(peers[step] + own_offset, words, mask=word_index < num_words)

    from_ptr = local_ptr.to(tl.pointer_type(tl.uint64)) + first * row_words + word_index
    arrived = ()
    for peer in tl.static_range(num_ranks):  # asked for all at once; most are there when the slowest is
        words = tl.load(from_ptr + peer * max_rows * row_words, mask=word_index < num_words, volatile=True)
        arrived += (words,)  # type: ignore[assignment]
    total = tl.zeros((tile,), tl.float32)
    for peer in tl.static_range(num_ranks):
        words = arrived[peer]
        while tl.max(((words >> 32 != stamp) & (word_index < num_words)).to(tl.int32), axis=0) > 0:
            words = tl.load(from_ptr + peer * max_rows * row_words, mask=word_index < num_words, volatile=True)
        total += unpack_words(words, dtype, is_wide, tile).to(tl.float32)
    tl.store(num_calls_ptr + row, call)

    value = total.to(dtype)
    if has_norm:
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + offset, value, mask=in_row)
        wide = tl.where(in_row, value.to(tl.float32), 0.0)
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / size + eps)
        value = (wide * inverse_rms * weight).to(dtype)
    tl.store(output_ptr + offset, value, mask=in_row)


@triton_kernel()
def pack_words(values, is_wide: tl.constexpr, tile: tl.constexpr):
    """``values [tile]`` -> the lower halves of words: one value of 32 bits in each, or two neighbours of 16."""
    if is_wide:
        packed = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        first, second = tl.split(tl.reshape(values.to(tl.uint16, bitcast=True), (tile // 2, 2)))
        packed = first.to(tl.uint64) | (second.to(tl.uint64) << 16)
    return packed


@triton_kernel()
def unpack_words(words, dtype: tl.constexpr, is_wide: tl.constexpr, tile: tl.constexpr):
    """What `pack_words` was given."""
    if is_wide:
        bits = words.to(tl.uint32)
    else:
        bits = tl.reshape(tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16)), (tile,))
    return bits.to(dtype, bitcast=True)
