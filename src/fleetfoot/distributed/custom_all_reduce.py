"""Sums over the GPUs of a tensor group in one kernel, for the few rows of a decode step; optionally with add and norm.

Every rank writes its rows to the memory of every rank, waits for the other ranks' rows in its own memory, and adds them
in rank order, so that all ranks get the same bits. A 64-bit word carries 32 bits of values and, in its upper half, the
number of the call. Words are written and read atomically, so the upper half shows that the values have arrived, and no
flags or fences are needed (as in NCCL's "LL" protocol).

The number of a call is kept on the device for each row, so that graphs can replay the kernel. Ranks make the same calls
in the same order. A rank is at most one call ahead of another, because it has waited for that rank's words of the
previous call. Two alternating sets of words are therefore enough, and nothing is ever cleared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed import ALL_REDUCE_ROWS, all_reduce_words
from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_MAX_TILE = 16384


def custom_all_reduce_words(hidden_size: int, dtype: torch.dtype, num_ranks: int) -> int:
    """64-bit words that `CustomAllReduce` needs on each rank."""
    return all_reduce_words(num_ranks, hidden_size * dtype.itemsize)


def can_all_reduce(hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether such rows consist of whole words and fit in one program."""
    return hidden_size * dtype.itemsize % 4 == 0 and hidden_size <= _MAX_TILE and dtype.itemsize in (2, 4)


def _words_per_row(hidden_size: int, dtype: torch.dtype) -> int:
    return hidden_size * dtype.itemsize // 4


class CustomAllReduce:
    """Sums of ``[n, size]`` over the ranks, ``n`` at most `ALL_REDUCE_ROWS` and ``size`` at most ``hidden_size``.

    Args:
        memory: `custom_all_reduce_words` words on every rank.
        rank, num_ranks: of the tensor group.
        hidden_size: of the widest model of the group.
        dtype, device: of the rows.
    """

    def __init__(
        self, memory: PeerMemory, rank: int, num_ranks: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._memory = memory
        self._rank = rank
        self._num_ranks = num_ranks
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._num_calls = torch.zeros(ALL_REDUCE_ROWS, dtype=torch.int32, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether ``x`` has a supported shape and dtype."""
        if x.ndim != 2 or x.dtype is not self._dtype or not 0 < x.shape[0] <= ALL_REDUCE_ROWS:
            return False
        return 0 < x.shape[1] <= self._hidden_size and can_all_reduce(x.shape[1], self._dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x [n, size]`` over the ranks, computed in float32 and rounded once."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._launch(output, output, x, output, output, 0.0, num_parts=0, has_norm=False)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Kernels.add_rms_norm` of the sum of ``x``, with the roundings of the separate operations: of each rank's
        ``x`` (possibly several partial sums), of their sum, and of its sum with the residual."""
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
            max_rows=ALL_REDUCE_ROWS,
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
        # each rank starts with another peer, so that they do not all write to the same GPU at the same time
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
    # layout of the words: [set, rank, row, word]
    first = (call & 1).to(tl.int64) * num_ranks * max_rows + row
    own_offset = (first + rank.to(tl.int64) * max_rows) * row_words + word_index
    for step in tl.static_range(num_ranks):
        tl.store(peers[step] + own_offset, words, mask=word_index < num_words)

    from_ptr = local_ptr.to(tl.pointer_type(tl.uint64)) + first * row_words + word_index
    arrived = ()
    for peer in tl.static_range(num_ranks):  # load all at once: most have arrived when the slowest has
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
    """Pack ``values [tile]`` into the lower halves of words: one 32-bit value, or two adjacent 16-bit values each."""
    if is_wide:
        packed = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        first, second = tl.split(tl.reshape(values.to(tl.uint16, bitcast=True), (tile // 2, 2)))
        packed = first.to(tl.uint64) | (second.to(tl.uint64) << 16)
    return packed


@triton_kernel()
def unpack_words(words, dtype: tl.constexpr, is_wide: tl.constexpr, tile: tl.constexpr):
    """The inverse of `pack_words`."""
    if is_wide:
        bits = words.to(tl.uint32)
    else:
        bits = tl.reshape(tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16)), (tile,))
    return bits.to(dtype, bitcast=True)
