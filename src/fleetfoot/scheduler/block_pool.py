"""KV blocks: reference counts and prefix caches of groups, and the slabs that they share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from fleetfoot.records.kv_events import NO_KV_EVENTS, KVEvents
from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup

FREE, FILLING, READY, HELD = range(4)
"""The owner states of a block.

FREE: not in use, though it may still hold a cached prefix. FILLING: its requests are writing it. READY: it is full, its
contents are final in the order of queued steps, and its hash is known. HELD: its requests have ended or were preempted,
but a step in flight or a connector may still read or write it, so it cannot be reused.
"""
STATE_NAMES = ("FREE", "FILLING", "READY", "HELD")


class BlockPool:
    """``num_blocks`` KV blocks of one group, with reference counts and a prefix cache.

    A block is free as soon as its last reference is dropped, but keeps its contents and its hash until it is reused, so
    that its prefix can be hit again. Blocks without a cached prefix are reused first (the last freed first: it is the
    warmest in the CPU's caches), then cached ones, least recently used first. Without ``enable_caching``, `lookup`
    finds nothing. Ids before ``first`` are never used.

    Attributes:
        events, group: what is told of blocks that cannot be hit any more, and the group's number for it.
    """

    events: KVEvents = NO_KV_EVENTS
    group = 0

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True, *, first: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self._first = first
        self.enable_caching = enable_caching
        self._plain = list(range(num_blocks - 1, first - 1, -1))  # free, without a cached prefix: a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a cached prefix: least recently used first
        self._references = [0] * num_blocks
        self._holds = [0] * num_blocks  # how many of the references are holds
        self._states = bytearray(num_blocks)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._cached)

    def state(self, block: int) -> str:
        """FREE, FILLING, READY or HELD."""
        return STATE_NAMES[self._states[block]]

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks, each with one reference, in state FILLING. Raises RuntimeError if fewer are
        free: the scheduler checks first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} KV blocks requested, {self.num_free} of {self.num_blocks} free")
        return self._filling([self._plain.pop() if self._plain else self._evict() for _ in range(count)])

    def _filling(self, taken: list[int]) -> list[int]:
        for block in taken:
            self._references[block] = 1
            self._states[block] = FILLING
        return taken

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of block hashes. Takes no reference, as `find`."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, digest: bytes) -> int | None:
        """The cached block with a hash."""
        return self._by_hash.get(digest)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Evict the cached blocks with these hashes, the last one least, as late as blocks that are freed now."""
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block)
                self._touched(block)

    def forget(self, block: int) -> None:
        """Let nobody find a block, which has references, by its hash any more."""
        self._unpublish(block)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free: `share` takes that many from the free blocks."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which `lookup` found."""
        for block in blocks:
            if self._references[block] == 0:
                self._reuse(block)
            self._states[block] = READY  # a block that was HELD has an owner again
            self._references[block] += 1

    def num_released(self, blocks: Iterable[int], holds: Counter[int]) -> int:
        """How many of ``blocks`` have no references besides ``holds``."""
        return sum(self._references[block] == holds[block] for block in blocks)

    def publish(self, block: int, digest: bytes) -> bool:
        """Mark ``block`` as full of the tokens that ``digest`` stands for, so that it can be hit. If another block has
        the same hash, that one stays the cached one. Returns whether this one is."""
        if self._references[block] > self._holds[block]:
            self._states[block] = READY
        if not self.enable_caching or self._hashes[block] is not None or digest in self._by_hash:
            return False
        self._hashes[block] = digest
        self._by_hash[digest] = block
        return True

    def hold(self, blocks: Iterable[int], *, add_reference: bool = False) -> None:
        """Hold each of ``blocks`` until `release`. The owner's reference becomes the hold, unless ``add_reference``."""
        for block in blocks:
            self._references[block] += add_reference
            self._holds[block] += 1
            if self._holds[block] == self._references[block]:
                self._states[block] = HELD

    def release(self, blocks: Sequence[int]) -> None:
        """End one hold of each of ``blocks``."""
        for block in blocks:
            if not self._holds[block]:
                raise RuntimeError(f"KV block {block} is not held and cannot be released")
            self._holds[block] -= 1
        self.free(blocks)

    def free(self, blocks: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop one reference of each of a request's blocks, the last one first: the tail of a prefix is reused before
        its head. ``evict_first``: before the prefixes that are cached already."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left < self._holds[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            self._references[block] = left
            if left == 0:
                self._states[block] = FREE
                if self._hashes[block] is None:
                    self._add_plain(block)
                else:
                    self._cached[block] = None
                    if evict_first:
                        self._cached.move_to_end(block, last=False)
                self._unused(block, evict_first)
            elif left == self._holds[block]:
                self._states[block] = HELD

    def clear_cache(self) -> None:
        """Drop every cached prefix, for example because the weights have changed. Blocks in use stay in use."""
        self._plain.extend(self._cached)
        self._forget()

    def _forget(self) -> None:
        self._cached.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unpublish(block)
        return block

    def _unpublish(self, block: int) -> None:
        digest = self._hashes[block]
        assert digest is not None  # only published blocks are in _cached
        del self._by_hash[digest]
        self._hashes[block] = None
        self.events.removed(self.group, digest)

    # --- what a group of several overrides --------------------------------------------------------------------------

    def _touched(self, block: int) -> None:
        """A cached block without references is evicted later."""

    def _reuse(self, block: int) -> None:
        """A cached block without references gets one."""
        del self._cached[block]

    def _add_plain(self, block: int) -> None:
        self._plain.append(block)

    def _unused(self, block: int, evict_first: bool) -> None:
        """The last reference of a block has been dropped."""

    def _plain_blocks(self) -> Iterable[int]:
        return self._plain

    def check_integrity(self, owners: Iterable[Sequence[int]], holds: Iterable[Sequence[int]] = ()) -> None:
        """Compare the pool with every list of blocks that has references (``owners``), and with the held ones of them.

        Raises RuntimeError, with up to ten problems, if a block is lost, owned twice, both free and in use, or its hash
        maps to another block.
        """
        num_owners, num_holds = (Counter(chain.from_iterable(lists)) for lists in (owners, holds))
        num_free = Counter(chain(self._plain_blocks(), self._cached))
        wrong = [f"block {block} is free twice" for block, count in num_free.items() if count > 1]
        for block in range(self._first, self.num_blocks):
            references, held, name = self._references[block], num_holds[block], self.state(block)
            if references != num_owners[block]:
                wrong.append(f"block {block} has {references} references, {num_owners[block]} owners")
            if self._holds[block] != held:
                wrong.append(f"block {block} has {self._holds[block]} holds, {held} holders")
            if (name == "HELD") != (references == held > 0):
                wrong.append(f"block {block} is {name} with {held} of {references} references held")
            if (references == 0) != (block in num_free) or (references == 0) != (name == "FREE"):
                wrong.append(f"block {block} is {name} with {references} references")
            if block in self._cached and self._hashes[block] is None:
                wrong.append(f"block {block} is kept for a cached prefix that it does not hold")
        wrong += [f"the hash of block {b} maps elsewhere" for h, b in self._by_hash.items() if self._hashes[b] != h]
        wrong += [
            f"block {block} is owned and not one of {self._first} to {self.num_blocks - 1}"
            for block in num_owners
            if not self._first <= block < self.num_blocks
        ]
        if wrong:
            raise RuntimeError("the KV blocks are not consistent: " + "; ".join(wrong[:10]))


class _Slabs:
    """The slabs that groups share; slab 0 is never used."""

    def __init__(self, num_slabs: int) -> None:
        self.free = list(range(num_slabs - 1, 0, -1))
        self.idle: OrderedDict[int, SlabPool] = OrderedDict()
        """Those of a group without blocks in use, but with cached prefixes; least recently used first."""
        self.last: list[SlabPool | None] = [None] * num_slabs
        """The group that a slab has, or had last."""
        self.changed: list[int] = []
        """Those that another group has got, since `BlockPools.take_changed`."""

    @property
    def num_unused(self) -> int:
        """Slabs without blocks in use: any group can have them."""
        return len(self.free) + len(self.idle)


class SlabPool(BlockPool):
    """The blocks of one of several groups: ``size`` to a slab. A slab without references and cached prefixes is free
    for every group."""

    def __init__(self, slabs: _Slabs, size: int, block_size: int, enable_caching: bool) -> None:
        num_slabs = len(slabs.last)
        super().__init__(num_slabs * size, block_size, enable_caching, first=size)
        self._plain.clear()
        self._slabs, self.size = slabs, size
        self._plain_of: dict[int, list[int]] = {}  # the free blocks without a prefix of each slab of the group
        self._used = [0] * num_slabs  # blocks with references
        self._open: list[dict[int, None]] = [{} for _ in range(size + 1)]
        """By number of blocks with references: slabs with blocks of ``_plain_of``."""
        self.num_busy = 0
        """Slabs with references."""
        self.num_used = 0
        """Blocks with references."""
        self._worth: dict[int, int] = {}
        self._hit = set[int]()
        self._ranks: dict[int, int] = {}
        self._rank = 0  # of the block that was reused last

    def set_worth(self, block: int, worth: int) -> None:
        """A cached block without references is reused before others that are worth more, unless these have not been
        used for long (Cao and Irani 1997, "Cost-aware WWW proxy caching algorithms"). Blocks with equal worth, or
        without one, are reused in the order of their last use."""
        self._hit.discard(block)
        self._worth[block] = worth

    def renew(self, block: int) -> None:
        """A block counts as hit."""
        self._hit.add(block)
        if block in self._cached:
            self._ranks[block] = self._rank + self._worth.get(block, 0)

    def makes_way(self, worth: int, *, ages: bool) -> bool:
        """Whether a cached block is reused before one of this worth would be; else, with ``ages``, it counts as if one
        had been."""
        is_less = not self._cached or min(map(self._ranks.__getitem__, self._cached)) <= self._rank + worth
        self._rank += 0 if is_less or not ages else worth // 8
        return is_less

    def _age(self, block: int) -> None:
        """A block is reused: what is cached from now on outlasts what is as old. One that was never hit says little of
        what is worth keeping, and counts an eighth: else what nobody shares ages what many do."""
        gain = max(0, self._ranks.get(block, 0) - self._rank)
        self._rank += gain if block in self._hit else gain // 8

    @property
    def num_published(self) -> int:
        """Blocks that can be hit."""
        return len(self._by_hash)

    def drop_least(self, worth: int) -> bool:
        """Drop the cached block without references that would be reused first, if it makes way for this worth. Returns
        whether one was dropped."""
        if not self._cached or not self.makes_way(worth, ages=False):
            return False
        self.free(self._filling([self._take_least()]))
        return True

    @property
    def num_free(self) -> int:
        """Free blocks of the slabs with references: those without are another group's as well."""
        return self.num_busy * self.size - self.num_used

    def slabs_for(self, count: int) -> int:
        """Slabs without references that ``count`` more blocks need."""
        return -(-max(0, count - self.num_free) // self.size)

    def is_used(self, slab: int) -> bool:
        """Whether blocks of a slab have references."""
        return self._used[slab] > 0

    def take_one(self, *, saves_slabs: bool) -> int:
        """A free block: of the group's fullest slab, of a free slab, the least recently used cached one, or of the
        least recently used slab of any group without references. ``saves_slabs``: take no slab without references if
        there is a free block in another one; there may be no other for a block of another group."""
        for used in range(self.size - 1, 0, -1):
            if self._open[used]:
                return self._take_plain(next(reversed(self._open[used])))
        if saves_slabs and self.num_free:
            block = next(block for block in self._cached if self._used[block // self.size])
            return self._take_cached(block)
        slabs = self._slabs
        if not self._open[0]:
            if slabs.free:
                self._adopt(slabs.free.pop())
            elif self._cached and not saves_slabs:
                return self._take_least()
            else:
                slab, pool = next(iter(slabs.idle.items()))
                pool.give_up(slab)
                self._adopt(slab)
        return self._take_plain(next(reversed(self._open[0])))

    def take(self, count: int) -> list[int]:
        return self._filling([self.take_one(saves_slabs=False) for _ in range(count)])

    def _take_plain(self, slab: int) -> int:
        block = self._plain_of[slab].pop()
        self._occupy(block)
        return block

    def _take_least(self) -> int:
        """The cached block without references that is reused first."""
        block = min(self._cached, key=self._ranks.__getitem__) if self._worth else next(iter(self._cached))
        self._age(block)
        return self._take_cached(block)

    def _take_cached(self, block: int) -> int:
        self._reuse(block)
        self._unpublish(block)
        return block

    def _adopt(self, slab: int) -> None:
        slabs, size = self._slabs, self.size
        if slabs.last[slab] not in (None, self):
            slabs.changed.append(slab)
        slabs.last[slab] = self
        self._plain_of[slab] = list(range((slab + 1) * size - 1, slab * size - 1, -1))
        self._open[0][slab] = None

    def give_up(self, slab: int) -> None:
        """Drop the prefixes of a slab without references, which gets another group."""
        for block in range(slab * self.size, (slab + 1) * self.size):
            if self._hashes[block] is not None:
                del self._cached[block]
                self._unpublish(block)
        self._leave(slab)
        del self._slabs.idle[slab]

    def _leave(self, slab: int) -> None:
        self._open[0].pop(slab, None)
        del self._plain_of[slab]

    def _occupy(self, block: int) -> None:
        """A block without references gets one."""
        slab = block // self.size
        used = self._used[slab]
        self._open[used].pop(slab, None)
        if used == 0:
            self.num_busy += 1
            self._slabs.idle.pop(slab, None)
        self._used[slab] = used + 1
        self.num_used += 1
        if self._plain_of[slab]:
            self._open[used + 1][slab] = None

    def _touched(self, block: int) -> None:
        if (slab := block // self.size) in self._slabs.idle:
            self._slabs.idle.move_to_end(slab)

    def _reuse(self, block: int) -> None:
        del self._cached[block]
        self._hit.add(block)
        self._occupy(block)

    def _add_plain(self, block: int) -> None:
        self._plain_of[block // self.size].append(block)

    def _unused(self, block: int, evict_first: bool) -> None:
        self._ranks[block] = self._rank + self._worth.get(block, 0)
        slab, slabs = block // self.size, self._slabs
        used = self._used[slab]
        self._open[used].pop(slab, None)
        self._used[slab] = used - 1
        self.num_used -= 1
        if self._plain_of[slab]:
            self._open[used - 1][slab] = None
        if used == 1:
            self.num_busy -= 1
            self._rest(slab)
            if evict_first and slab in slabs.idle:
                slabs.idle.move_to_end(slab, last=False)

    def _rest(self, slab: int) -> None:
        """A slab has no more references."""
        if len(self._plain_of[slab]) == self.size:
            self._leave(slab)
            self._slabs.free.append(slab)
        else:
            self._slabs.idle[slab] = self

    def clear_cache(self) -> None:
        for block in self._cached:
            slab = block // self.size
            self._plain_of[slab].append(block)
            self._open[self._used[slab]][slab] = None
        self._forget()
        for slab, pool in list(self._slabs.idle.items()):
            if pool is self:
                del self._slabs.idle[slab]
                self._rest(slab)

    def _plain_blocks(self) -> Iterable[int]:
        yield from chain.from_iterable(self._plain_of.values())
        for slab in range(1, len(self._used)):
            if slab not in self._plain_of:  # another group's, or free
                yield from range(slab * self.size, (slab + 1) * self.size)

    def wrong_slabs(self) -> list[str]:
        """What is not consistent between slabs and blocks."""
        slabs, wrong = self._slabs, []
        used = Counter(block // self.size for block, count in enumerate(self._references) if count)
        for slab in self._plain_of:
            is_idle = slabs.idle.get(slab) is self
            if self._used[slab] != used[slab] or is_idle != (not used[slab]) or slab in slabs.free:
                wrong.append(f"slab {slab} has {used[slab]} blocks in use, counted as {self._used[slab]}")
            if any(
                (slab in group) != (count == used[slab] and bool(self._plain_of[slab]))
                for count, group in enumerate(self._open)
            ):
                wrong.append(f"slab {slab} is not found by its {used[slab]} blocks in use")
        if (self.num_used, self.num_busy) != (sum(used.values()), len(used)):
            wrong.append(f"{self.num_used} blocks in {self.num_busy} slabs are counted as in use")
        return wrong


class BlockPools:
    """The blocks of all groups. With several groups, ``num_blocks`` slabs are shared by those that have layers."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroup] = ONE_GROUP,
        enable_caching: bool = True,
        events: KVEvents = NO_KV_EVENTS,
    ) -> None:
        self.groups = groups
        self.events = events
        self.num_blocks = num_blocks
        self._slabs = slabs = _Slabs(num_blocks + 1)
        self._sharing: list[SlabPool] = []
        self.all: list[BlockPool] = []
        """Pools of each group."""
        for group in groups:
            size = group.blocks_per_slab
            if len(groups) == 1:
                self.all.append(BlockPool(num_blocks, block_size, enable_caching))
            elif group.has_layers:
                self._sharing.append(SlabPool(slabs, size, block_size, enable_caching))
                self.all.append(self._sharing[-1])
            else:
                self.all.append(BlockPool((num_blocks + 1) * size, block_size, enable_caching, first=size))
        for number, pool in enumerate(self.all):
            pool.events, pool.group = events, number
        self.first = self.all[0]
        """Pool of the group that keeps all tokens."""

    def num_missing(self, needs: Sequence[int], hits: Sequence[Sequence[int]] = ((),)) -> int:
        """How many blocks are missing, or slabs of several groups, to take ``needs[group]`` blocks and to share
        ``hits[group]``; 0 or less: none."""
        first = self.first
        missing = needs[0] + (first.num_unreferenced(hits[0]) if hits[0] else 0) - first.num_free
        if len(needs) == 1 or (missing > 0 and not isinstance(first, SlabPool)):
            return missing
        missing = -self._slabs.num_unused
        for pool, count, shared in zip(self.all, needs, hits if len(hits) > 1 else [()] * len(needs), strict=True):
            if isinstance(pool, SlabPool):
                new = [block // pool.size for block in shared if pool.num_unreferenced((block,))]
                opened = {slab for slab in new if not pool.is_used(slab)}
                missing += len(opened) + -(
                    -max(0, count + len(new) - pool.num_free - len(opened) * pool.size) // pool.size
                )
        return missing

    def take(self, needs: Sequence[int]) -> list[list[int]]:
        """``needs[group]`` blocks of each group. The caller has made sure that none are missing."""
        if len(needs) == 1:
            return [self.first.take(needs[0]), *([] for _ in needs[1:])]
        if (missing := self.num_missing(needs)) > 0:
            raise RuntimeError(f"{list(needs)} KV blocks requested, {missing} slabs are missing")
        spare, taken = -missing, []
        for pool, count in zip(self.all, needs, strict=True):
            if not isinstance(pool, SlabPool):
                taken.append(pool.take(count))
                continue
            blocks: list[int] = []
            for left in range(count, 0, -1):
                needed, unused = pool.slabs_for(left), self._slabs.num_unused
                blocks.append(pool.take_one(saves_slabs=not spare))
                # a slab that was taken, although there were blocks in those in use
                spare -= (unused - self._slabs.num_unused) - (needed - pool.slabs_for(left - 1))
            taken.append(pool._filling(blocks))
        return taken

    def has_spare(self, group: int) -> bool:
        """Whether a block of one of several groups can be taken without dropping a cached prefix."""
        pool = self.all[group]
        return bool(self._slabs.free) or (isinstance(pool, SlabPool) and any(pool._open))

    def take_changed(self) -> list[int]:
        """Slabs that another group has got since the last call: they must be cleared before they are written."""
        changed, self._slabs.changed = self._slabs.changed, []
        return changed

    @property
    def num_used(self) -> int:
        """Blocks with references, of all groups."""
        return sum(
            pool.num_used if isinstance(pool, SlabPool) else pool.num_blocks - pool._first - pool.num_free
            for pool in self.all
        )

    def counts(self) -> list[tuple[str, int, int, int]]:
        """The kind of each group, its blocks with references, those with a cached prefix alone, and all that it can
        have. Groups share the memory of slabs."""
        found = []
        for group, pool in zip(self.groups, self.all, strict=True):
            kind = "states" if group.is_state else "all tokens" if group.window is None else f"window {group.window:,}"
            total = pool.num_blocks - pool._first
            used = pool.num_used if isinstance(pool, SlabPool) else total - pool.num_free
            found.append((kind, used, len(pool._cached), total))
        return found

    @property
    def usage(self) -> float:
        """The share of the blocks, or slabs, with references."""
        if not self._sharing:
            return 1 - self.first.num_free / self.num_blocks
        return sum(pool.num_busy for pool in self._sharing) / self.num_blocks

    def clear_cache(self) -> None:
        """See `BlockPool.clear_cache`."""
        for pool in self.all:
            pool.clear_cache()
        self.events.cleared()

    def hold(self, blocks: Sequence[Sequence[int]], *, add_reference: bool = False) -> None:
        """See `BlockPool.hold`; ``blocks`` of each group, as in the next ones."""
        for pool, ids in zip(self.all, blocks, strict=True):
            pool.hold(ids, add_reference=add_reference)

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """See `BlockPool.release`."""
        for pool, ids in zip(self.all, blocks, strict=True):
            pool.release(ids)

    def free(self, blocks: Sequence[Sequence[int]]) -> None:
        """See `BlockPool.free`."""
        for pool, ids in zip(self.all, blocks, strict=True):
            pool.free(ids)

    def check_integrity(
        self, owners: Sequence[Sequence[Sequence[int]]], holds: Sequence[Sequence[Sequence[int]]] = ()
    ) -> None:
        """`BlockPool.check_integrity` of each group, and that no slab is lost or has two groups. Each of ``owners`` and
        ``holds`` has a list for each group."""
        for group, pool in enumerate(self.all):
            pool.check_integrity([lists[group] for lists in owners], [lists[group] for lists in holds])
        slabs, wrong = self._slabs, [problem for pool in self._sharing for problem in pool.wrong_slabs()]
        owned = Counter(chain(slabs.free, *(pool._plain_of for pool in self._sharing)))
        if self._sharing and owned != Counter(range(1, self.num_blocks + 1)):
            wrong.append(f"slabs are lost or have two groups: {dict(owned - Counter(range(1, self.num_blocks + 1)))}")
        if wrong:
            raise RuntimeError("the KV slabs are not consistent: " + "; ".join(wrong[:10]))
