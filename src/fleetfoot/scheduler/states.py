"""The recurrent states of requests: slots that steps change in place, and snapshots, which later requests begin with.

A slot is a block of the last group, and holds the state after one token. A running request has one for each token of
a decode; the states after consecutive tokens go to them in turn. Its tables have them by blocks of tokens: the state
after the token at ``position`` is in slot ``table[position % num_slots][position // block_size]``, whether the host
knows by then which drafts were accepted or not.

No state is copied. To keep the state at the end of a block of tokens, the request gets another slot for what follows:
the next step reads the one that is kept and writes the other. Without a free slot it is changed in place. Within a long
part of a prompt, which is computed in chunks, states after chunks are written besides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from math import lcm

from fleetfoot.records.forward_context import CHUNK, MAX_STEPS
from fleetfoot.records.request import Request, StateSlots
from fleetfoot.scheduler.block_pool import BlockPools, SlabPool

_LONG = 8 * CHUNK
"""Tokens of a step from which on a snapshot may come up to a chunk before where it was wanted, and the step is not
divided."""
_REGULAR = 12
"""A long prompt has snapshots at the last three of so many parts, while memory is free: another prompt that shares most
of it computes a tenth of that again at most."""
TableEntry = tuple[int, int, int, list[int]]
"""See `SchedulerOutput.new_group_block_ids`."""


class RequestStates:
    """Gives slots to requests, and snapshots to the prefix cache.

    A request keeps the newest state at the end of a block while it decodes, for the case that it ends: the next turn of
    a conversation begins with the same tokens. Where slots are scarce, these are dropped.

    Args:
        keeps: there is a prefix cache.
        max_snapshots: most states in it; None: what fits.
    """

    def __init__(self, pools: BlockPools, block_size: int, *, keeps: bool, max_snapshots: int | None = None) -> None:
        self._pools, self._size, self._keeps, self._max_snapshots = pools, block_size, keeps, max_snapshots
        self._table = len(pools.groups) - 1
        pool = pools.all[-1]
        assert isinstance(pool, SlabPool)  # there is another group for token ids
        self.pool = pool
        self._unit = lcm(CHUNK, block_size)
        self._pending: dict[bytes, tuple[int, int]] = {}
        """Snapshots that the step that is being scheduled writes, and their worth, by their hashes."""
        self.within: list[tuple[int, int, int]] = []
        """Snapshots after a part of a row's tokens: `SchedulerOutput.snapshots`."""

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def is_pending(self, hashes: Iterable[bytes]) -> bool:
        """Whether the step that is being scheduled writes a state after one of these blocks. It can be read by the next
        one: the layers of a step read and write states at once."""
        return bool(self._pending) and not self._pending.keys().isdisjoint(hashes)

    def publish_pending(self) -> list[tuple[int, int, int]]:
        """The step is scheduled: later ones may begin with its snapshots. Returns `SchedulerOutput.snapshots`."""
        for digest, (slot, worth) in self._pending.items():
            self._publish(slot, digest, worth)
        self._pending.clear()
        within, self.within = self.within, []
        return within

    def _publish(self, slot: int, digest: bytes, worth: int) -> None:
        is_full = self._max_snapshots is not None and self.pool.num_published >= self._max_snapshots
        if is_full and self.pool.find(digest) is None and not self.pool.drop_least(worth):
            return
        if self.pool.publish(slot, digest):
            self.pool.events.state_stored(digest, self.pool.group)
        self.pool.set_worth(slot, worth)

    def publish(self, request: Request, num_tokens: int) -> None:
        """A request leaves, of which ``num_tokens`` are computed: its newest state at the end of a block is cached."""
        states = request.states
        if states is None or not self._keeps or request.num_published == sys.maxsize:
            return
        kept = [(position, slot) for position, slot in states.kept if position <= num_tokens]
        if kept:
            position, slot = kept[-1]
            self._publish(slot, self._hash(request, position), max(0, position - states.newest))

    def publish_loaded(self, request: Request) -> None:
        """A KV connector has loaded a prefix: the state after it is a snapshot, as if the request had begun with it."""
        states = request.states
        assert states is not None
        self.publish(request, request.num_computed)
        states.newest = request.num_computed

    def renew(self, hashes: Iterable[bytes]) -> None:
        """Another request has begun with these blocks. All snapshots after one of them count as hit, though it begins
        with the last one: the next request may diverge before that, and what no other request has stays as it is."""
        for digest in hashes:
            if (slot := self.pool.find(digest)) is not None:
                self.pool.renew(slot)

    # --- chunks of prompts ------------------------------------------------------------------------------------------

    def chunk(self, request: Request, count: int) -> int:
        """How many of the next ``count`` tokens of a prompt a step computes: to the next snapshot, or whole blocks. 0:
        there are fewer, and a step that ends within a block leaves none of the next one's snapshots a place."""
        begin, end = request.num_computed, request.num_computed + count
        if not self._keeps or request.num_published == sys.maxsize:
            return count
        cuts = request.snapshots_at
        while cuts and cuts[-1] <= begin:
            cuts.pop()
        if cuts and cuts[-1] < end and end - begin < _LONG and not self._has(request, cuts[-1]):
            return cuts[-1] - begin
        whole = end // self._size * self._size - begin
        return max(0, whole) if end < request.num_prefill else count

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
        if not self._keeps or request.num_published == sys.maxsize:
            return
        self._keep_within(request, states, begin)
        if end % self._size or end == request.num_prefill:
            return
        is_wanted = end in request.snapshots_at or self.has_spare
        if is_wanted and not self._has(request, end) and self._keep(states, end, self._worth(request, end), ages=True):
            self._add_pending(request, states)

    def _keep_within(self, request: Request, states: StateSlots, begin: int) -> None:
        """Snapshots within the tokens of a step, after whole chunks that end where blocks do."""
        end, cuts = request.num_computed, request.snapshots_at
        if end - begin <= MAX_STEPS or begin % self._size:  # the step before had few tokens left for it
            return
        whole = cuts[0] if cuts else 0
        regular = [] if whole < 2 * _LONG else [whole - whole * part // _REGULAR for part in (3, 2, 1)]
        places = sorted([(place, True) for place in cuts] + [(place, False) for place in regular])
        for place, is_wanted in places:
            position = begin + (place - begin) // self._unit * self._unit
            if not begin < position < end or not (is_wanted or self.has_spare or self._is_full):
                continue
            if self._has(request, position):
                continue
            if (slot := self._take(self._worth(request, position), is_needed=states.for_connector)) is not None:
                states.kept.append((position, slot))
                self.within.append((request.row, position - begin, slot))
                self._add_pending(request, states)

    def _has(self, request: Request, position: int) -> bool:
        """Whether there is a state after so many tokens of the request, which need not be kept again."""
        assert request.states is not None
        digest = self._hash(request, position)
        return not request.states.for_connector and (digest in self._pending or self.pool.find(digest) is not None)

    def _add_pending(self, request: Request, states: StateSlots) -> None:
        """Make the newest of the states that are kept a snapshot of this step."""
        position, slot = states.kept[-1]
        self._pending[self._hash(request, position)] = slot, self._worth(request, position)
        states.newest = position

    def _worth(self, request: Request, position: int) -> int:
        """How many tokens a snapshot after so many saves. It counts an eighth beyond what the request shares with
        others, if there is such a part, and at the end of a prompt: most prompts are not sent with another end, but
        many share most of their tokens."""
        assert request.states is not None
        worth, shared = max(0, position - request.states.newest), request.num_hits * self._size + request.num_lost
        is_end = position + self._unit >= request.num_prefill and request.states.newest > 0
        return worth // 8 if is_end or position > shared > 0 else worth

    # --- decodes ----------------------------------------------------------------------------------------------------

    def extend(self, request: Request, num_positions: int) -> Iterator[TableEntry]:
        """The entries that a decode lacks for so many positions."""
        states = request.states
        assert states is not None
        for block in range(states.num_blocks, -(-num_positions // self._size)):
            if self._keeps:
                self._keep(states, block * self._size, max(0, block * self._size - states.newest))
            yield from self._entries(request, block)
            states.num_blocks = block + 1

    def release(self, request: Request, position: int, *, all_kept: bool = False) -> bool:
        """Free the kept states that no step from ``position`` on reads, but for the newest of a decode, or
        ``all_kept``. Returns whether there were any."""
        states = request.states
        if states is None or not states.kept:
            return False
        newest = max((each for each, _ in states.kept if request.num_prefill <= each <= position), default=-1)
        of_prompt = [each for each, _ in states.kept if each < request.num_prompt_tokens and states.for_connector]
        rest = {newest, of_prompt[-1] if of_prompt else -1}
        freed = [slot for each, slot in states.kept if each < position and (all_kept or each not in rest)]
        if freed:
            states.kept = [(each, slot) for each, slot in states.kept if slot not in freed]
            self.pool.free(freed)
        return bool(freed)

    # --- slots ------------------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        """Whether there are as many snapshots as there may be."""
        most = self._max_snapshots
        return most is not None and self.pool.num_published + len(self._pending) >= most

    @property
    def has_spare(self) -> bool:
        """Whether another snapshot takes the place of none."""
        return not self._is_full and self._pools.has_spare(self._table)

    def _keep(self, states: StateSlots, position: int, worth: int, *, ages: bool = False) -> bool:
        """Leave the state after ``position`` tokens as it is, if another slot is free. ``ages``: as of `_take`."""
        is_needed = states.for_connector and ages
        if (slot := self._take(worth, ages=ages, is_needed=is_needed)) is None:
            return False
        index = (position - 1) % len(states.slots)
        states.kept.append((position, states.slots[index]))
        states.slots[index] = slot
        return True

    def _take(self, worth: int, *, ages: bool = True, is_needed: bool = False) -> int | None:
        """Another slot, for a snapshot; None: all are in use, or have snapshots that are worth more, unless it
        ``is_needed``. ``ages``: then these lose of their worth."""
        needs = [0] * self._table + [1]
        if self._pools.num_missing(needs) > 0:
            return None
        has_room = is_needed or self.has_spare or self.pool.makes_way(worth, ages=ages)
        return self._pools.take(needs)[-1][0] if has_room else None

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
        """The hash of the last block before ``position``."""
        return request.block_hashes[position // self._size - 1]
