"""The KV blocks: who owns each one, what is cached in it, and which to give away next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

FREE, FILLING, READY, LENT = range(4)
"""The owner states of a block.

FREE: nobody may read or write it, though it may still hold a cached prefix. FILLING: its requests are writing it.
READY: it is full, its contents are final in the order of queued steps, and its hash is known. LENT: its requests have
gone, but a step in flight or a connector may still read or write it; it cannot be reused.
"""
STATE_NAMES = ("FREE", "FILLING", "READY", "LENT")


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never meets this."""


class BlockPool:
    """A fixed number of KV blocks with reference counts and a prefix cache.

    A block whose last reference goes is free at once, but keeps its contents and its hash until it is given to
    someone else, so a prefix can be hit again. Blocks without a cached prefix are given away first (the last freed
    first: it is the warmest in the CPU's caches), then cached ones, the least recently used first.

    Args:
        num_blocks: how many blocks there are; ids are 0 .. num_blocks - 1.
        block_size: tokens in a block.
        enable_caching: False makes `publish` and `lookup` find nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._plain = list(range(num_blocks - 1, -1, -1))  # free, nothing cached: a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a cached prefix: least recently used first
        self._references = [0] * num_blocks
        self._loans = [0] * num_blocks  # how many of the references are lent
        self._states = bytearray(num_blocks)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that are not free, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def state(self, block: int) -> str:
        """FREE, FILLING, READY or LENT."""
        return STATE_NAMES[self._states[block]]

    def take(self, count: int) -> list[int]:
        """Give away `count` free blocks, each with one reference, FILLING.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks asked for, {self.num_free} of {self.num_blocks} free")
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

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: sharing them takes that many out of the free ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of `blocks`, which `lookup` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._states[block] = READY  # also if it was only lent: it has an owner again
            self._references[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Say that `block` is full of the tokens that `digest` stands for; from now on it can be hit.

        Where another block already has that hash, the earlier one stays the cached one.
        """
        if self._references[block] > self._loans[block]:
            self._states[block] = READY
        if self.enable_caching and self._hashes[block] is None and digest not in self._by_hash:
            self._hashes[block] = digest
            self._by_hash[digest] = block

    def lend(self, blocks: Iterable[int]) -> None:
        """Their request has gone, but something still uses them: its reference to each is lent, until `take_back`."""
        for block in blocks:
            self._loans[block] += 1
            if self._loans[block] == self._references[block]:
                self._states[block] = LENT

    def lend_more(self, blocks: Iterable[int]) -> None:
        """Lend blocks to one more borrower, whose `take_back` is its own."""
        for block in blocks:
            self._references[block] += 1
        self.lend(blocks)

    def take_back(self, blocks: Sequence[int]) -> None:
        """What was lent is not used any more."""
        for block in blocks:
            if not self._loans[block]:
                raise RuntimeError(f"KV block {block} is not lent and cannot be taken back")
            self._loans[block] -= 1
        self.free(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of a request's blocks.

        They are put back last block first, so that of one prefix the tail is reused before the head.
        """
        references, loans, states, hashes = self._references, self._loans, self._states, self._hashes
        for block in reversed(blocks):
            left = references[block] - 1
            if left < loans[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            references[block] = left
            if left == 0:
                states[block] = FREE
                if hashes[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None
            elif left == loans[block]:
                states[block] = LENT

    def forget(self) -> None:
        """Drop every cached prefix, as after new weights; blocks in use stay in use."""
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

    def check_integrity(self, owners: Iterable[Sequence[int]], loans: Iterable[Sequence[int]] = ()) -> None:
        """Compare the pool with the block lists of all who hold blocks.

        Args:
            owners: every list of blocks that holds references, lent ones included.
            loans: those that are lent.

        Raises:
            RuntimeError: a block is lost, owned twice, free and used, or its hash points elsewhere; all are named.
        """
        counted, lent = [0] * self.num_blocks, [0] * self.num_blocks
        for counts, lists in ((counted, owners), (lent, loans)):
            for blocks in lists:
                for block in blocks:
                    counts[block] += 1
        free = [*self._plain, *self._cached]
        wrong = (
            [f"block {b} is free twice" for b in {b for b in free if free.count(b) > 1}]
            if len(free) != len(set(free))
            else []
        )
        free_set = set(free)
        for block in range(self.num_blocks):
            references, state = self._references[block], self._states[block]
            if references != counted[block]:
                wrong.append(f"block {block} has {references} references, {counted[block]} owners")
            if self._loans[block] != lent[block]:
                wrong.append(f"block {block} is lent {self._loans[block]} times, {lent[block]} borrowers")
            if (state == LENT) != (references == lent[block] > 0):
                wrong.append(
                    f"block {block} is {STATE_NAMES[state]} with {lent[block]} of {references} references lent"
                )
            if (references == 0) != (block in free_set) or (references == 0) != (state == FREE):
                wrong.append(f"block {block} is {STATE_NAMES[state]} with {references} references")
            if (block in self._cached) and self._hashes[block] is None:
                wrong.append(f"block {block} is kept for a cached prefix that it does not hold")
        wrong += [f"the hash of block {b} stands elsewhere" for h, b in self._by_hash.items() if self._hashes[b] != h]
        if wrong:
            raise RuntimeError("the KV blocks are not consistent: " + "; ".join(wrong[:10]))
