"""The KV blocks of requests: allocation, chained hashes, and publication to the prefix cache and the connector."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.scheduler.block_pool import BlockPool
from fleetfoot.scheduler.config import SchedulerConfig

DIGEST_BYTES = 16
"""128 bits: a chance collision, which would give wrong tokens, is out of reach."""


def root_hash(cache_salt: str | None) -> bytes:
    """The start of a chain of block hashes. Requests with different salts never share a block."""
    return hashlib.blake2b((cache_salt or "").encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(parent: bytes, token_ids: array[int], start: int, stop: int, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids[start:stop]``, chained to ``parent``.

    Equal hashes mean the same tokens in the same order from the first one on.

    Args:
        parent: the hash of the block before ``start``, or `root_hash`.
        token_ids: all tokens, as int32.
        start: a block boundary.
        stop: any later position; a last block that is not full is left out.
        block_size: tokens in a block.
    """
    data = token_ids[start:stop].tobytes()
    step = token_ids.itemsize * block_size
    hashes = []
    for offset in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class RequestBlocks:
    """Allocates and frees the blocks of requests; reports full blocks to the prefix cache and the KV connector.

    Args:
        config: the scheduler's limits.
        pool: where blocks come from.
        connector: notified of every block that is filled.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, connector: SchedulerConnector) -> None:
        self.pool = pool
        self.block_size = config.block_size
        self._lookahead = config.num_lookahead
        self._caches_prefixes = config.enable_prefix_caching
        self._publishes = config.enable_prefix_caching or connector.is_active
        self._connector = connector

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's first tokens. At least one token is left to compute, for its logits."""
        if not self._publishes or request.has_prompt_logprobs:
            return []
        usable = (request.num_tokens - 1) // self.block_size
        self._hash(request, usable)
        return self.pool.lookup(request.block_hashes[:usable]) if self._caches_prefixes else []

    def allocate(self, request: Request, hits: list[int]) -> bool:
        """Allocate blocks for all known tokens of a waiting request, ``hits`` first; False if too few are free."""
        size, pool = self.block_size, self.pool
        # drafts need room too, but positions from the last token on are never an input
        num_positions = min(request.num_tokens + self._lookahead, request.max_total_tokens - 1)
        needed = -(-num_positions // size) - len(hits)
        if needed > pool.num_free - pool.num_unreferenced(hits):
            return False
        pool.share(hits)
        request.block_ids = hits + pool.take(needed)
        request.capacity = len(request.block_ids) * size
        request.num_computed = len(hits) * size
        request.num_published = len(hits)
        return True

    def publish(self, request: Request, *, by_this_step: bool) -> None:
        """Make the blocks that the request's queued steps have filled available to other requests and the connector.

        Prompts are published chunk by chunk. Generated tokens are published together when the request leaves: until
        then only an identical request could hit them, and hashing them one by one would slow down every step.

        Args:
            request: owner of the blocks.
            by_this_step: see `SchedulerConnector.blocks_filled`.
        """
        if not self._publishes:
            return
        # drafts in flight count as computed, but their tokens are not known
        final = min(request.num_computed, request.num_tokens, request.max_total_tokens - 1)
        first, last = request.num_published, final // self.block_size
        if last > first:
            self._publish(request, last)
            self._connector.blocks_filled(request, first, last, by_this_step=by_this_step)

    def publish_loaded(self, request: Request) -> None:
        """Publish blocks that the connector has loaded. The connector is not notified: it has them already."""
        if self._publishes:
            self._publish(request, request.num_computed // self.block_size)

    def _publish(self, request: Request, last: int) -> None:
        self._hash(request, last)
        for block in range(request.num_published, last):
            self.pool.publish(request.block_ids[block], request.block_hashes[block])
        request.num_published = last

    def _hash(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        if count > len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            token_ids = request.prompt_token_ids if count * size <= request.num_prompt_tokens else request.token_ids
            hashes += extend_chain(parent, token_ids, len(hashes) * size, count * size, size)

    def hold(self, request: Request) -> None:
        """Hold the blocks of a request that no longer runs, until `free`."""
        request.is_held = True
        self.pool.hold(request.block_ids)

    def free(self, request: Request) -> None:
        """Free the blocks of a request that is in no step in flight; it may start again."""
        if request.is_held:
            request.is_held = False
            self.pool.release(request.block_ids)
        else:
            self.pool.free(request.block_ids)
        request.block_ids = []
        request.capacity = request.num_computed = request.num_published = 0

    def check_integrity(self, owners: Iterable[Request], held: Iterable[list[int]]) -> None:
        """Compare the pool with the requests that have blocks.

        Args:
            owners: all requests with blocks.
            held: further block lists, held by transfers.

        Raises:
            RuntimeError: they do not match.
        """
        requests = list(owners)
        holds = [request.block_ids for request in requests if request.is_held] + list(held)
        self.pool.check_integrity([*(request.block_ids for request in requests if not request.is_held), *holds], holds)
