"""KV blocks: the pool with its prefix cache, and the blocks of requests."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.scheduler.config import SchedulerConfig

FREE, FILLING, READY, HELD = range(4)
"""The owner states of a block.

FREE: not in use, though it may still hold a cached prefix. FILLING: its requests are writing it. READY: it is full, its
contents are final in the order of queued steps, and its hash is known. HELD: its requests have ended or were preempted,
but a step in flight or a connector may still read or write it, so it cannot be reused.
"""
STATE_NAMES = ("FREE", "FILLING", "READY", "HELD")
DIGEST_BYTES = 16
"""The size of a block's hash. With 128 bits, a collision, which would give wrong tokens, does not happen by chance."""


class BlockPool:
    """``num_blocks`` KV blocks with reference counts and a prefix cache.

    A block is free as soon as its last reference is dropped, but keeps its contents and its hash until it is reused, so
    that its prefix can be hit again. Blocks without a cached prefix are reused first (the last freed first: it is the
    warmest in the CPU's caches), then cached ones, least recently used first. Without ``enable_caching``, `lookup`
    finds nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
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

    def state(self, block: int) -> str:
        """FREE, FILLING, READY or HELD."""
        return STATE_NAMES[self._states[block]]

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks, each with one reference, in state FILLING. Raises RuntimeError if fewer are
        free: the scheduler checks first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} KV blocks requested, {self.num_free} of {self.num_blocks} free")
        taken = [self._plain.pop() if self._plain else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            self._states[block] = FILLING
        return taken

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of block hashes. Takes no reference."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
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

    def num_released(self, blocks: Iterable[int], holds: Counter[int]) -> int:
        """How many of ``blocks`` have no references besides ``holds``."""
        return sum(self._references[block] == holds[block] for block in blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Mark ``block`` as full of the tokens that ``digest`` stands for, so that it can be hit. If another block has
        the same hash, that one stays the cached one."""
        if self._references[block] > self._holds[block]:
            self._states[block] = READY
        if self.enable_caching and self._hashes[block] is None and digest not in self._by_hash:
            self._hashes[block] = digest
            self._by_hash[digest] = block

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

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's blocks, the last one first: the tail of a prefix is reused before
        its head."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left < self._holds[block]:
                raise RuntimeError(f"KV block {block} was freed twice")
            self._references[block] = left
            if left == 0:
                self._states[block] = FREE
                if self._hashes[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None
            elif left == self._holds[block]:
                self._states[block] = HELD

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
        """Compare the pool with every list of blocks that has references (``owners``), and with the held ones of them.

        Raises RuntimeError, with up to ten problems, if a block is lost, owned twice, both free and in use, or its hash
        maps to another block.
        """
        num_owners, num_holds = (Counter(chain.from_iterable(lists)) for lists in (owners, holds))
        num_free = Counter(chain(self._plain, self._cached))
        wrong = [f"block {block} is free twice" for block, count in num_free.items() if count > 1]
        for block in range(self.num_blocks):
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
        if wrong:
            raise RuntimeError("the KV blocks are not consistent: " + "; ".join(wrong[:10]))


def root_hash(cache_salt: str | None, weights: str = "") -> bytes:
    """The start of a chain of block hashes. Requests with different salts never share a block, nor do those with
    different ``weights``: see `SchedulerConnector.reset_cache`; empty: those of the start."""
    key = weights.encode()  # at most 64 bytes
    return hashlib.blake2b((cache_salt or "").encode(), key=key, digest_size=DIGEST_BYTES).digest()


def extend_chain(parent: bytes, token_ids: array[int], start: int, stop: int, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of int32 ``token_ids[start:stop]``, chained to ``parent``: the hash of the block before
    ``start``, or `root_hash`. Equal hashes mean the same tokens in the same order from the first one on."""
    data = token_ids[start:stop].tobytes()
    step = token_ids.itemsize * block_size
    hashes = []
    for offset in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class RequestBlocks:
    """Allocates and frees the blocks of requests; reports full blocks to the prefix cache and the KV connector."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, connector: SchedulerConnector) -> None:
        self.pool = pool
        self.block_size = config.block_size
        self._lookahead = config.num_lookahead
        self._publishes = config.enable_prefix_caching or connector.is_active
        self._connector = connector
        self.weights = ""
        """Identifies the weights that the KV of new blocks is computed with."""

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's first tokens. At least one token is left to compute, for its logits."""
        if not self._publishes or request.reads_whole_prompt:
            return []
        usable = (request.num_tokens - 1) // self.block_size
        self._hash(request, usable)
        return self.pool.lookup(request.block_hashes[:usable])

    def allocate(self, request: Request, hits: list[int]) -> int:
        """Allocate blocks for all known tokens of a waiting request, ``hits`` first, or return how many are missing."""
        size, pool = self.block_size, self.pool
        # drafts need room too, but positions from the last token on are never an input
        num_positions = min(request.num_tokens + self._lookahead, request.max_total_tokens - 1)
        needed = -(-num_positions // size) - len(hits)
        if (missing := needed + pool.num_unreferenced(hits) - pool.num_free) > 0:
            return missing
        pool.share(hits)
        request.block_ids = hits + pool.take(needed)
        request.capacity = len(request.block_ids) * size
        request.num_computed = len(hits) * size
        request.num_published = len(hits)
        return 0

    def publish(self, request: Request, *, by_this_step: bool) -> None:
        """Make the blocks that the request's queued steps have filled available to other requests and the connector.

        Prompts are published chunk by chunk. Generated tokens are published together when the request leaves: until
        then only an identical request could hit them, and hashing them one by one would slow down every step.
        ``by_this_step``: see `SchedulerConnector.blocks_filled`.
        """
        # drafts in flight count as computed, but their tokens are not known
        final = min(request.num_computed, request.num_tokens, request.max_total_tokens - 1)
        first = request.num_published
        if last := self._publish(request, final):
            self._connector.blocks_filled(request, first, last, by_this_step=by_this_step)

    def publish_loaded(self, request: Request) -> None:
        """Publish blocks that the connector has loaded. The connector is not notified: it has them already."""
        self._publish(request, request.num_computed)

    def _publish(self, request: Request, num_tokens: int) -> int:
        """Returns the number of blocks that are published now; 0 if none was added."""
        last = num_tokens // self.block_size
        if not self._publishes or last <= request.num_published:
            return 0
        self._hash(request, last)
        for block in range(request.num_published, last):
            self.pool.publish(request.block_ids[block], request.block_hashes[block])
        request.num_published = last
        return last

    def _hash(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        if count > len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt, self.weights)
            token_ids = request.prompt_token_ids if count * size <= request.num_prompt_tokens else request.token_ids
            hashes += extend_chain(parent, token_ids, len(hashes) * size, count * size, size)

    def hold(self, request: Request) -> None:
        """Hold the blocks of a request that no longer runs, until `free`."""
        request.is_held = True
        self.pool.hold(request.block_ids)

    def free(self, request: Request) -> None:
        """Free the blocks of a request that is in no step in flight; it may start again."""
        free = self.pool.release if request.is_held else self.pool.free
        free(request.block_ids)
        request.is_held = False
        request.block_ids = []
        request.capacity = request.num_computed = request.num_published = 0
