"""The custom all-gather: few rows of logits from all ranks of a tensor group, through the memory of peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed import GATHER_WORDS
from fleetfoot.distributed.peer_memory import PeerMemory, pack_words, unpack_words
from fleetfoot.kernels.linear.rank_sums import peers_of
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_PROGRAM_WORDS = 1024
"""Words that a program sends to each rank."""


class CustomAllGather:
    """Concatenates ``[n, m]`` of all ranks by rank in one kernel, for the few rows of a decode step.

    A program writes a tile of one row to the memory of every rank, waits for the other ranks' tiles of the same place,
    and copies them to the output. The words are those of `CustomAllReduce`. Each program has its own words and its own
    number of calls, so two alternating sets are enough for the reason given there, whatever the shapes of the calls.
    There are so few programs that all run at the same time.

    ``memory``: `fleetfoot.distributed.GATHER_WORDS` words for each of the sets on every rank; ``rank``, ``num_ranks``:
    of the tensor group.
    """

    def __init__(self, memory: PeerMemory, rank: int, num_ranks: int, device: torch.device) -> None:
        self._memory = memory
        self._rank = rank
        self._num_ranks = num_ranks
        self._max_programs = GATHER_WORDS // (num_ranks * _PROGRAM_WORDS)
        self._num_calls = torch.zeros(self._max_programs, dtype=torch.int32, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether ``x`` has a supported shape and dtype."""
        if x.ndim != 2 or not x.is_floating_point() or x.dtype.itemsize not in (2, 4):
            return False
        return 0 < x.shape[0] * cdiv(x.shape[1], _tile(x)) <= self._max_programs

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        """The first ``num_columns`` columns (None: all) of ``[n, num_ranks * m]``. ``x [n, m]``: see `fits`."""
        x = x.contiguous()
        num_rows, width = x.shape
        most = self._num_ranks * width
        most = most if num_columns is None else min(most, num_columns)
        output = x.new_empty((num_rows, most))
        overlap = can_overlap(x.device)
        _all_gather_kernel[(cdiv(width, _tile(x)), num_rows)](
            output, x, width, most, self._memory.local, self._memory.addresses, self._num_calls, self._rank,
            num_ranks=self._num_ranks, max_programs=self._max_programs, tile=_tile(x),
            is_wide=x.dtype.itemsize == 4, overlap=overlap, **launch_options(overlap),
        )  # fmt: skip
        return output


def _tile(x: torch.Tensor) -> int:
    """Columns of a program."""
    return _PROGRAM_WORDS * 4 // x.dtype.itemsize


@triton_kernel(unspecialized=("rank",))
def _all_gather_kernel(
    output_ptr, x_ptr, width, num_columns, local_ptr, addresses_ptr, num_calls_ptr, rank,
    num_ranks: tl.constexpr, max_programs: tl.constexpr, tile: tl.constexpr, is_wide: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    num_words: tl.constexpr = tile if is_wide else tile // 2
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    row = tl.program_id(1)
    program = row * tl.num_programs(0) + tl.program_id(0)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    peers = peers_of(addresses_ptr, rank, num_ranks)
    wait_for_inputs(overlap)

    value = tl.load(x_ptr + row.to(tl.int64) * width + column, mask=column < width, other=0.0)
    call = tl.load(num_calls_ptr + program) + 1
    stamp = call.to(tl.uint32, bitcast=True).to(tl.uint64)
    words = pack_words(value, is_wide, tile) | (stamp << 32)
    # layout of the words: [set, program, rank, word]
    offset = ((call & 1) * max_programs + program) * (num_ranks * num_words) + tl.arange(0, num_words)
    for step in tl.static_range(num_ranks - 1):
        tl.store(peers[step] + offset + rank * num_words, words)
    place = output_ptr + row.to(tl.int64) * num_columns + column
    own = rank * width
    tl.store(place + own, value, mask=(column < width) & (own + column < num_columns))

    from_ptr = local_ptr.to(tl.pointer_type(tl.uint64)) + offset
    for step in tl.static_range(1, num_ranks):
        source = (rank + step) % num_ranks
        words = tl.load(from_ptr + source * num_words, volatile=True)
        while tl.max((words >> 32 != stamp).to(tl.int32), axis=0) > 0:
            words = tl.load(from_ptr + source * num_words, volatile=True)
        first = source * width
        is_column = (column < width) & (first + column < num_columns)
        tl.store(place + first, unpack_words(words, dtype, is_wide, tile), mask=is_column)
    tl.store(num_calls_ptr + program, call)
