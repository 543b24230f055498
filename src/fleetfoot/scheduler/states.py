"""The recurrent states of requests: slots that steps change in place, and snapshots, which later requests begin with.

A slot is a block of the last group, and holds the state after one token. A running request has one for each token of
a decode; the states after consecutive tokens go to them in turn. Its tables have them by blocks of tokens: the state
after the token at ``position`` is in slot ``table[position % num_slots][position // block_size]``, whether the host
knows by then which drafts were accepted or not.

No state is copied. To keep the state at the end of a block of tokens, the request gets another slot for what follows:
the next step reads the one that is kept and writes the other. Without a free slot it is changed in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from fleetfoot.records.request import Request, StateSlots
from fleetfoot.scheduler.block_pool import BlockPools

TableEntry = tuple[int, int, int, list[int]]
"""See `SchedulerOutput.new_group_block_ids`."""


class RequestStates:
    """Gives slots to requests, and snapshots to the prefix cache.

    A request keeps the newest state at the end of a block while it decodes, for the case that it ends: the next turn of
    a conversation begins with the same tokens. Where slots are scarce, these are dropped. ``keeps``: there is a prefix
    cache.
    """

    def __init__(self, pools: BlockPools, block_size: int, *, keeps: bool) -> None:
        self._pools, self._size, self._keeps = pools, block_size, keeps
        self._table = len(pools.groups) - 1
        self.pool = pools.all[-1]
        self._pending: dict[bytes, int] = {}
        """Snapshots that the step that is being scheduled writes, by their hashes."""

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def is_pending(self, hashes: Iterable[bytes]) -> bool:
        """Whether the step that is being scheduled writes a state after one of these blocks. It can be read by the next
        one: the layers of a step read and write states at once."""
        return bool(self._pending) and not self._pending.keys().isdisjoint(hashes)

    def publish_pending(self) -> None:
        """The step is scheduled: later ones may begin with its snapshots."""
        for digest, slot in self._pending.items():
            self.pool.publish(slot, digest)
        self._pending.clear()

    def publish(self, request: Request, num_tokens: int) -> None:
        """A request leaves, of which ``num_tokens`` are computed: its newest state at the end of a block is cached."""
        states = request.states
        if states is None or not self._keeps or request.num_published == sys.maxsize:
            return
        kept = [(position, slot) for position, slot in states.kept if position <= num_tokens]
        if kept:
            position, slot = kept[-1]
            self.pool.publish(slot, request.block_hashes[position // self._size - 1])

    # --- chunks of prompts ------------------------------------------------------------------------------------------

    def chunk(self, request: Request, count: int) -> int:
        """How many of the next ``count`` tokens of a prompt a step computes: to the next snapshot, or whole blocks."""
        begin, end = request.num_computed, request.num_computed + count
        if not self._keeps or request.num_published == sys.maxsize:
            return count
        cuts = request.snapshots_at
        while cuts and (cuts[-1] <= begin or self.pool.find(self._hash(request, cuts[-1])) is not None):
            cuts.pop()
        if cuts and cuts[-1] < end:
            return cuts[-1] - begin
        whole = end // self._size * self._size - begin
        return whole if end < request.num_prefill and whole > 0 else count

    def end_chunk(self, request: Request, begin: int) -> Iterator[TableEntry]:
        """The entries in the tables of a request, the tokens of which from ``begin`` to ``num_computed`` join the step
        that is being scheduled. Keeps the state after them as a snapshot, if there is to be one."""
        states, end = request.states, request.num_computed
        assert states is not None
        if begin and not states.num_blocks:  # it begins with a snapshot
            yield self._entry(request, begin - 1, states.kept[-1][1])
        block = (end - 1) // self._size
        if end == request.num_prefill:
            yield from self._entries(request, block)
        else:
            yield self._entry(request, end - 1, states.slots[(end - 1) % len(states.slots)])
        states.num_blocks = block + 1
        if not self._keeps or end % self._size or end == request.num_prefill or request.num_published == sys.maxsize:
            return
        digest = self._hash(request, end)
        is_wanted = end in request.snapshots_at or self._pools.has_spare(self._table)
        if is_wanted and self.pool.find(digest) is None and digest not in self._pending and self._keep(states, end):
            self._pending[digest] = states.kept[-1][1]

    # --- decodes ----------------------------------------------------------------------------------------------------

    def extend(self, request: Request, num_positions: int) -> Iterator[TableEntry]:
        """The entries that a decode lacks for so many positions."""
        states = request.states
        assert states is not None
        for block in range(states.num_blocks, -(-num_positions // self._size)):
            if self._keeps:
                self._keep(states, block * self._size)
            yield from self._entries(request, block)
            states.num_blocks = block + 1

    def release(self, request: Request, position: int, *, all_kept: bool = False) -> bool:
        """Free the kept states that no step from ``position`` on reads, but for the newest of a decode, or
        ``all_kept``. Returns whether there were any."""
        states = request.states
        if states is None or not states.kept:
            return False
        newest = max((each for each, _ in states.kept if request.num_prefill <= each <= position), default=-1)
        freed = [slot for each, slot in states.kept if each < position and (all_kept or each != newest)]
        if freed:
            states.kept = [(each, slot) for each, slot in states.kept if slot not in freed]
            self.pool.free(freed)
        return bool(freed)

    # --- slots ------------------------------------------------------------------------------------------------------

    def _keep(self, states: StateSlots, position: int) -> bool:
        """Leave the state after ``position`` tokens as it is, if another slot is free."""
        needs = [0] * (self._table + 1)
        needs[-1] = 1
        if self._pools.num_missing(needs) > 0:
            return False
        index = (position - 1) % len(states.slots)
        states.kept.append((position, states.slots[index]))
        states.slots[index] = self._pools.take(needs)[-1][0]
        return True

    def _entry(self, request: Request, position: int, slot: int) -> TableEntry:
        states = request.states
        assert states is not None
        return self._table + position % len(states.slots), request.row, position // self._size, [slot]

    def _entries(self, request: Request, block: int) -> Iterator[TableEntry]:
        states = request.states
        assert states is not None
        for index, slot in enumerate(states.slots):
            yield self._table + index, request.row, block, [slot]

    def _hash(self, request: Request, position: int) -> bytes:
        """Of the last block before ``position``."""
        return request.block_hashes[position // self._size - 1]
