"""The KV blocks of requests: how many they need, which are there already, and what others may know of them."""

from __future__ import annotations

from collections.abc import Iterable

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.scheduler.block_hash import extend_chain, root_hash
from fleetfoot.scheduler.block_pool import BlockPool
from fleetfoot.scheduler.config import SchedulerConfig


class RequestBlocks:
    """Gives blocks to requests and takes them back; tells the prefix cache and the KV connector which are full.

    Args:
        connector: hears of every block that is filled.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, connector: SchedulerConnector) -> None:
        self.pool = pool
        self.block_size = config.block_size
        self._lookahead = config.num_lookahead
        self._finds_prefixes = config.enable_prefix_caching
        self._publishes = config.enable_prefix_caching or connector.is_active
        self._connector = connector

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's beginning; at least one token is left to compute, for its logits."""
        if not self._publishes or request.wants_prompt_logprobs:
            return []
        usable = (request.num_tokens - 1) // self.block_size
        self._hash(request, usable)
        return self.pool.lookup(request.block_hashes[:usable]) if self._finds_prefixes else []

    def take(self, request: Request, hits: list[int]) -> bool:
        """Blocks for all known tokens of a request that begins, ``hits`` first; False if too few are free."""
        size, pool = self.block_size, self.pool
        # room for drafts too, but none from the last token on, which is never an input
        num_positions = min(request.num_tokens + self._lookahead, request.max_tokens_in_all - 1)
        needed = -(-num_positions // size) - len(hits)
        if needed > pool.num_free - pool.num_idle(hits):
            return False
        pool.share(hits)
        request.block_ids = hits + pool.take(needed)
        request.capacity = len(request.block_ids) * size
        request.num_computed = len(hits) * size
        request.num_published = len(hits)
        return True

    def publish(self, request: Request, *, by_this_step: bool) -> None:
        """Let other requests hit the blocks that this one's queued steps have filled, and the connector save them.

        Prompts are published chunk by chunk; generated tokens when the request leaves, all at once: nobody can ask for
        them while they are being made, short of a request that is the same, and hashing them one by one costs the step.

        Args:
            by_this_step: see `SchedulerConnector.blocks_filled`.
        """
        if not self._publishes:
            return
        # drafts in flight count as computed, but what they stand for is not known
        final = min(request.num_computed, len(request.token_ids), request.max_tokens_in_all - 1)
        first, last = request.num_published, final // self.block_size
        if last > first:
            self._publish(request, last)
            self._connector.blocks_filled(request, first, last, by_this_step=by_this_step)

    def publish_loaded(self, request: Request) -> None:
        """What a connector has loaded can be hit as well; the connector has it already."""
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
            hashes += extend_chain(parent, request.token_ids, len(hashes) * size, count * size, size)

    def lend(self, request: Request) -> None:
        """It has gone, but something still uses its blocks, until `give_back`."""
        request.is_lent = True
        self.pool.lend(request.block_ids)

    def give_back(self, request: Request) -> None:
        """It has gone, and nothing of it is on its way any more; it may begin anew."""
        if request.is_lent:
            request.is_lent = False
            self.pool.take_back(request.block_ids)
        else:
            self.pool.free(request.block_ids)
        request.block_ids = []
        request.capacity = request.num_computed = request.num_published = 0

    def check_integrity(self, holders: Iterable[Request], lent: Iterable[list[int]]) -> None:
        """Compare the pool with all who hold blocks.

        Raises:
            RuntimeError: what does not add up.
        """
        requests = list(holders)
        loans = [request.block_ids for request in requests if request.is_lent] + list(lent)
        self.pool.check_integrity([*(request.block_ids for request in requests if not request.is_lent), *loans], loans)
