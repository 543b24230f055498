"""The pool of KV blocks: owner states, reference counts and the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

FREE, FILLING, READY, HELD = range(4)
"""The owner states of a block.

FREE: not in use, though it may still hold a cached prefix. FILLING: its requests are writing it. READY: it is full, its
contents are final in the order of queued steps, and its hash is known. HELD: its requests have ended or were preempted,
but a step in flight or a connector may still read or write it, so it cannot be reused.
"""
STATE_NAMES = ("FREE", "FILLING", "READY", "HELD")


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are free. The scheduler checks first, so users never see this."""


class BlockPool:
    """A fixed number of KV blocks with reference counts and a prefix cache.

    A block is free as soon as its last reference is dropped, but keeps its contents and its hash until it is reused, so
    that its prefix can be hit again. Blocks without a cached prefix are reused first (the last freed first: it is the
    warmest in the CPU's caches), then cached ones, least recently used first.

    Args:
        num_blocks: number of blocks; ids are 0 .. num_blocks - 1.
        block_size: tokens in a block.
        enable_caching: False makes `lookup` find nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._plain = list(range(num_blocks - 1, -1, -1))  # free, without a cached prefix: a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a cached prefix: least recently used first
        self._references = [0] * num_blocks
        self._holds = [0] * num_blocks  # how many of the references are holds
        self._states = bytearray(num_blocks)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._cached)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are not free, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def state(self, block: int) -> str:
        """FREE, FILLING, READY or HELD."""
        return STATE_NAMES[self._states[block]]

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks, each with one reference, in state FILLING.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks requested, {self.num_free} of {self.num_blocks} free")
        plain, references, states = self._plain, self._references, self._states
        taken = []
        for _ in range(count):
            block = plain.pop() if plain else self._evict()
            references[block] = 1
            states[block] = FILLING
            taken.append(block)
        return taken

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of block hashes. Takes no reference."""
        by_hash = self._by_hash
        found = []
        for digest in hashes:
            block = by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free: `share` takes that many from the free blocks."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which `lookup` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._states[block] = READY  # a block that was HELD has an owner again
            self._references[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Mark ``block`` as full of the tokens that ``digest`` stands for, so that it can be hit.

        If another block has the same hash, that earlier one stays the cached one.
        """
        if self._references[block] > self._holds[block]:
            self._states[block] = READY
        if self.enable_caching and self._hashes[block] is None and digest not in self._by_hash:
            self._hashes[block] = digest
            self._by_hash[digest] = block

    def hold(self, blocks: Iterable[int], *, add_reference: bool = False) -> None:
        """Hold each of ``blocks`` until `release`.

        Args:
            add_reference: False turns the owner's reference into the hold; True adds a reference for it.
        """
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

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's blocks.

        The last block is freed first, so that the tail of a prefix is reused before its head.
        """
        references, holds, states, hashes = self._references, self._holds, self._states, self._hashes
        for block in reversed(blocks):
            left = references[block] - 1
            if left < holds[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            references[block] = left
            if left == 0:
                states[block] = FREE
                if hashes[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None
            elif left == holds[block]:
                states[block] = HELD

    def clear_cache(self) -> None:
        """Drop every cached prefix, for example because the weights have changed. Blocks in use stay in use."""
        self._plain.extend(self._cached)
        self._cached.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._hashes[block]
        assert digest is not None  # only published blocks are in _cached
        del self._by_hash[digest]
        self._hashes[block] = None
        return block

    def check_integrity(self, owners: Iterable[Sequence[int]], holds: Iterable[Sequence[int]] = ()) -> None:
        """Compare the pool with the block lists of all owners and holders.

        Args:
            owners: every list of blocks that has references, the held ones included.
            holds: the held ones.

        Raises:
            RuntimeError: a block is lost, owned twice, both free and in use, or its hash maps to another block. The
                message lists up to ten problems.
        """
        num_owners, num_holds = [0] * self.num_blocks, [0] * self.num_blocks
        for counts, lists in ((num_owners, owners), (num_holds, holds)):
            for blocks in lists:
                for block in blocks:
                    counts[block] += 1
        free = [*self._plain, *self._cached]
        free_set = set(free)
        wrong = []
        if len(free) != len(free_set):
            wrong += [f"block {block} is free twice" for block in free_set if free.count(block) > 1]
        for block in range(self.num_blocks):
            references, held, name = self._references[block], num_holds[block], self.state(block)
            if references != num_owners[block]:
                wrong.append(f"block {block} has {references} references, {num_owners[block]} owners")
            if self._holds[block] != held:
                wrong.append(f"block {block} has {self._holds[block]} holds, {held} holders")
            if (name == "HELD") != (references == held > 0):
                wrong.append(f"block {block} is {name} with {held} of {references} references held")
            if (references == 0) != (block in free_set) or (references == 0) != (name == "FREE"):
                wrong.append(f"block {block} is {name} with {references} references")
            if (block in self._cached) and self._hashes[block] is None:
                wrong.append(f"block {block} is kept for a cached prefix that it does not hold")
        wrong += [f"the hash of block {b} maps elsewhere" for h, b in self._by_hash.items() if self._hashes[b] != h]
        if wrong:
            raise RuntimeError("the KV blocks are not consistent: " + "; ".join(wrong[:10]))
