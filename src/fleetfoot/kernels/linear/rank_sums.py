"""Sums over the ranks of a tensor group within the kernel of a linear layer that is split by inputs.

A program of that kernel has partial sums of a few outputs. It writes them to the memory of the other ranks, waits for
theirs of the same outputs in its own memory, and adds all in rank order. A decode step has no kernel for the sum then,
and the outputs that are finished first are under way while others are still multiplied. No torch here: the memory plan
uses the buffers' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import torch
    import triton.language as tl

RANK_SUM_ROWS, RANK_SUM_SETS = 8, 2
"""The most rows of such a sum, and its sets of words."""


def rank_sum_words(num_ranks: int, width: int) -> int:
    """64-bit words of each rank's memory for sums of ``[n, width]``; a word has one value."""
    return RANK_SUM_SETS * num_ranks * RANK_SUM_ROWS * width


@dataclass(frozen=True, slots=True)
class RankSums:
    """The memory for sums over ranks, as the protocol "LL" of NCCL uses it.

    A 64-bit word carries a float32 and, in its upper half, the number of the call. Words are written and read
    atomically, so the upper half shows that the value has arrived, and no flags or fences are needed.

    The number of calls is kept on the device for each output, so that graphs can replay the kernel. One program
    computes an output in each call, whatever the tiling. Ranks make the same calls in the same order. A rank writes the
    words of an output's call c + 2 only after its own call c + 1, in which it has waited for the other rank's words of
    call c + 1. The other rank wrote these in a kernel that started its work when the kernel of call c had finished, and
    with it had read all words of call c. Two alternating sets of words are therefore enough, and nothing is ever
    cleared. This holds for each output by itself, so calls may differ in outputs, rows and tiling, and other transports
    with words of their own may be used in between.

    A program that waits must not keep another rank's program from running. All programs of a launch must fit on the GPU
    at the same time: see `fleetfoot.kernels.linear.tilings.Tiling.fits_at_once`. Dependent launches do not change that:
    programs of the next kernel start when all of this one have started.
    """

    words: torch.Tensor
    """``[rank_sum_words]`` int64: this rank's memory, ``[set, rank, row, output]``."""
    addresses: torch.Tensor
    """``[num_ranks]`` int64: the address of each rank's ``words`` in this process."""
    num_calls: torch.Tensor
    """``[width]`` int32, zeroed at first: the calls of each output."""
    rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.addresses)

    @property
    def width(self) -> int:
        """The most outputs."""
        return len(self.num_calls)

    def fits(self, num_rows: int, num_outputs: int) -> bool:
        """Whether there is room for sums of ``[num_rows, num_outputs]``."""
        return num_rows <= RANK_SUM_ROWS and num_outputs <= self.width


@triton_kernel()
def peers_of(addresses_ptr, rank, num_ranks: tl.constexpr):
    """Pointers to the words of the other ranks. Each rank starts with another one, so that they do not all write to the
    same GPU at the same time."""
    peers = ()
    for step in tl.static_range(1, num_ranks):
        address = tl.load(addresses_ptr + (rank + step) % num_ranks)
        peers += (address.to(tl.pointer_type(tl.uint64)),)  # type: ignore[assignment]
    return peers


@triton_kernel()
def sum_over_ranks(
    partial, words_ptr, peers, call, column, is_valid, rank,
    num_ranks: tl.constexpr, width: tl.constexpr, max_rows: tl.constexpr, row_tile: tl.constexpr,
):  # fmt: skip
    """The sum of ``partial [outputs, row_tile]`` float32 over the ranks, with the same bits on each.

    ``call [outputs]``: the number of this call; ``column [outputs]``: where the outputs are in a row; ``is_valid
    [outputs, row_tile]``: the values that are summed.
    """
    stamp = call.to(tl.uint32, bitcast=True).to(tl.uint64)[:, None]
    row = tl.arange(0, row_tile)[None, :]
    offset = ((call & 1) * (num_ranks * max_rows * width) + column)[:, None] + row * width
    words = partial.to(tl.uint32, bitcast=True).to(tl.uint64) | (stamp << 32)
    own_offset = offset + rank * (max_rows * width)
    for step in tl.static_range(num_ranks - 1):
        tl.store(peers[step] + own_offset, words, mask=is_valid)

    from_ptrs = words_ptr.to(tl.pointer_type(tl.uint64)) + offset
    arrived = ()
    for source in tl.static_range(num_ranks):  # load all at once: most have arrived when the slowest has
        is_sent = is_valid & (rank != source)
        words = tl.load(from_ptrs + source * max_rows * width, mask=is_sent, volatile=True)
        arrived += (words,)  # type: ignore[assignment]
    total = tl.zeros_like(partial)
    for source in tl.static_range(num_ranks):
        words = arrived[source]
        is_sent = is_valid & (rank != source)
        while tl.max(((words >> 32 != stamp) & is_sent).to(tl.int32)) > 0:
            words = tl.load(from_ptrs + source * max_rows * width, mask=is_sent, volatile=True)
        total += tl.where(rank == source, partial, words.to(tl.uint32).to(tl.float32, bitcast=True))
    return total
