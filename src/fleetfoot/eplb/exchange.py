"""How the matrices of a layer's experts come to their next slots: into buffers beside those that steps read."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fleetfoot.distributed.groups import ExpertGroup
from fleetfoot.distributed.peer_memory import PeerMemory, share_memory

logger = logging.getLogger(__name__)


class Move(NamedTuple):
    """An expert that comes to a slot. Slots are those of all ranks."""

    source: int
    target: int
    source_rank: int
    target_rank: int


def moves_between(before: Sequence[int], after: Sequence[int], slots: Sequence[range]) -> list[Move]:
    """What changes one placement into another. A rank that has the expert already copies it, else the ranks that have
    it share the work."""
    rank_of = [rank for rank, own in enumerate(slots) for _ in own]
    places = defaultdict(list)
    for slot, expert in enumerate(before):
        places[expert].append(slot)
    moves = []
    for target, expert in enumerate(after):
        if before[target] != expert:
            rank, found = rank_of[target], places[expert]
            source = next((slot for slot in found if rank_of[slot] == rank), found[target % len(found)])
            moves.append(Move(source, target, rank_of[source], rank))
    return moves


class Exchange(ABC):
    """``slots``: of each rank; ``stacks``: as of `ExpertWeight.stacks`, of a layer like all that move."""

    def __init__(self, group: ExpertGroup, slots: Sequence[range]) -> None:
        self._group, self._firsts = group, [own.start for own in slots]
        self._first = self._firsts[group.rank]

    @abstractmethod
    def stage(
        self, stacks: Sequence[torch.Tensor], moves: Sequence[Move], reading: AbstractContextManager[Any]
    ) -> None:
        """Bring this rank's experts to where they go. Its own next experts are in the buffers once all ranks have
        returned. ``reading``: entered while stacks are read, when this rank waits for no other."""

    @abstractmethod
    def write(self, stacks: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
        """Write the experts for slots from the buffers, in the order of the current stream. ``targets``: those of this
        rank in the moves that were staged."""


class HostExchange(Exchange):
    """Through the memory of the host, by gloo."""

    def __init__(self, group: ExpertGroup, slots: Sequence[range]) -> None:
        super().__init__(group, slots)
        self._staged: dict[int, list[torch.Tensor]] = {}

    def stage(
        self, stacks: Sequence[torch.Tensor], moves: Sequence[Move], reading: AbstractContextManager[Any]
    ) -> None:
        rank, on_host = self._group.rank, self._group.on_host
        with reading:
            rows = {
                move: [stack[move.source - self._first].to("cpu", copy=True) for stack in stacks]
                for move in moves
                if move.source_rank == rank
            }
        works, self._staged = [], {}
        for move in moves:
            if move.target_rank == rank == move.source_rank:
                self._staged[move.target] = rows[move]
            elif move.source_rank == rank:
                works += [
                    dist.isend(_bytes_of(row), group=on_host, group_dst=move.target_rank, tag=move.target)
                    for row in rows[move]
                ]
            elif move.target_rank == rank:
                self._staged[move.target] = received = [torch.empty_like(stack[0], device="cpu") for stack in stacks]
                works += [
                    dist.irecv(_bytes_of(row), group=on_host, group_src=move.source_rank, tag=move.target)
                    for row in received
                ]
        for work in works:
            assert work is not None
            work.wait()

    def write(self, stacks: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
        for target in targets:
            for stack, row in zip(stacks, self._staged[target], strict=True):
                stack[target - self._first].copy_(row)


def _bytes_of(row: torch.Tensor) -> torch.Tensor:
    """As bytes: not every backend supports every dtype."""
    return row.contiguous().view(-1).view(torch.uint8)


class PeerExchange(Exchange):
    """Each GPU writes to the memory of others by kernels, on a stream beside the steps: two for each stack and rank.
    ``memory``: ``words_per_slot`` words for each slot of the rank with the most.
    """

    def __init__(self, group: ExpertGroup, slots: Sequence[range], memory: PeerMemory, words_per_slot: int) -> None:
        super().__init__(group, slots)
        self._memory = memory  # the buffers do not own the mapping, which ends with it
        self._buffers = [memory.of_rank(rank).view(-1, words_per_slot) for rank in range(group.size)]
        self._stream = torch.cuda.Stream(memory.local.device)
        self._targets = self._index(())

    def check(self) -> None:
        """Write to the memory of each rank, and read this one's, before the first step. Raises RuntimeError."""
        for buffer in self._buffers:
            buffer[:1].index_copy_(0, self._index((0,)), torch.zeros_like(buffer[:1]))
        self._buffers[self._group.rank].index_select(0, self._index((0,)))
        torch.cuda.synchronize(self._stream.device)

    def stage(
        self, stacks: Sequence[torch.Tensor], moves: Sequence[Move], reading: AbstractContextManager[Any]
    ) -> None:
        rank = self._group.rank
        with reading, torch.cuda.stream(self._stream):
            for target_rank, first in enumerate(self._firsts):
                own = [move for move in moves if (move.source_rank, move.target_rank) == (rank, target_rank)]
                if own:
                    sources = self._index([move.source - self._first for move in own])
                    targets = self._index([move.target - first for move in own])
                    for part, rows in self._parts(target_rank, stacks):
                        part.index_copy_(0, targets, rows.index_select(0, sources))
            self._targets = self._index([move.target - self._first for move in moves if move.target_rank == rank])
            self._stream.synchronize()

    def write(self, stacks: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
        assert len(targets) == len(self._targets)
        if targets:
            for part, rows in self._parts(self._group.rank, stacks):
                rows.index_copy_(0, self._targets, part.index_select(0, self._targets))

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._memory.local.device)

    def _parts(self, rank: int, stacks: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each stack's part of a rank's buffer, ``[slots, n]``, and the stack, ``[slots, n]`` of the same type: words,
        or bytes where rows are no whole words."""
        begin, buffer = 0, self._buffers[rank]
        for stack in stacks:
            rows = stack.view(len(stack), -1).view(torch.uint8)
            kind = torch.int64 if rows.shape[1] % 8 == 0 else torch.uint8
            rows, words = rows.view(kind), buffer[:, begin : begin + _words_of(stack[0])].view(kind)
            yield words[:, : rows.shape[1]], rows
            begin += _words_of(stack[0])


def _words_of(row: torch.Tensor) -> int:
    """The words of 8 bytes, in an even number, so that the next row is aligned."""
    return -(-row.nbytes // 16) * 2


def make_exchange(group: ExpertGroup, slots: Sequence[range], layers: Sequence[Sequence[torch.Tensor]]) -> Exchange:
    """The fastest way between the ranks of a group. A collective call. ``layers``: the stacks of each layer."""
    device = layers[0][0].device
    if device.type == "cuda" and group.on_device is not None and group.on_host is not None:
        words_per_slot = max(sum(_words_of(stack[0]) for stack in stacks) for stacks in layers)
        num_words = words_per_slot * max(map(len, slots))
        memory = share_memory(group.on_device, group.on_host, num_words, device, "moves of experts take the host, not")
        if memory is not None:
            exchange, works = PeerExchange(group, slots, memory, words_per_slot), torch.ones(1, dtype=torch.int32)
            try:
                exchange.check()
            except RuntimeError as error:
                logger.warning("moves of experts take the host, for a GPU's memory cannot be written: %s", error)
                works.zero_()
            dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group.on_host)
            if works.item():
                return exchange
    return HostExchange(group, slots)
