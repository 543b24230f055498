"""The blocks of requests: hashes of their tokens, allocation, and what they give to the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_layout import KVGroup
from fleetfoot.records.request import Request, StateSlots
from fleetfoot.scheduler.block_pool import BlockPool, BlockPools
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.states import RequestStates

DIGEST_BYTES = 16
"""The size of a block's hash. With 128 bits, a collision, which would give wrong tokens, does not happen by chance."""


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
    """Allocates and frees the blocks of requests; reports full blocks to the prefix cache and the KV connector.

    The first group has blocks for all known tokens of a request. A group with a window has those that its layers read
    or write in the steps in flight, and 0 in place of earlier ones. That of states has slots: see `RequestStates`.
    """

    def __init__(self, config: SchedulerConfig, pools: BlockPools, connector: SchedulerConnector) -> None:
        self.pools = pools
        self.block_size = config.block_size
        self._others: list[tuple[BlockPool, KVGroup]] = list(zip(pools.all, config.groups, strict=True))[1:]
        self.frees_windows = bool(self._others)
        """Whether there are groups that free blocks while a request runs."""
        has_states = config.groups[-1].is_state
        self._windows = self._others[: len(self._others) - has_states]
        self._lookahead = config.num_lookahead
        self._publishes = keeps = config.enable_prefix_caching or connector.is_active
        self.states: RequestStates | None = None
        """None: the model has none."""
        if has_states:
            self.states = RequestStates(pools, config.block_size, keeps=keeps, max_snapshots=config.max_snapshots)
        self._connector = connector
        self.weights = ""
        """Identifies the weights that the KV of new blocks is computed with."""

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def find_cached_prefix(self, request: Request) -> list[list[int]] | None:
        """Cached blocks of the longest prefix of the request's tokens for which every group has what its layers read:
        of the first group all blocks, of a window the last ones, of states the last one. At least one token is left to
        compute, for its logits. None: the next step finds a longer one."""
        request.snapshots_at, request.num_lost = [], 0
        if not self._publishes or request.reads_whole_prompt:
            return [[] for _ in self.pools.all]
        usable = (request.num_tokens - 1) // self.block_size
        self.hash(request, usable)
        hashes = request.block_hashes[:usable]
        hits = [self.pools.first.lookup(hashes)]
        count = whole = self._usable_by(self._windows, hashes, len(hits[0]))
        if self.states is not None:
            count = self._usable_by(self._others, hashes, whole)
            if self.states.is_pending(hashes[count:whole]):
                return None
            # where an earlier prompt diverged, and where the next turn of a conversation does
            request.num_lost = (whole - count) * self.block_size
            least = whole // (16 if self.states.has_spare else 10)
            places = {usable, whole if whole - count > least else count}
            request.snapshots_at = sorted((self.block_size * place for place in places - {count}), reverse=True)
        del hits[0][count:]
        for pool, group in self._others:
            first = group.first_block(count * self.block_size, self.block_size)
            hits.append(pool.lookup(hashes[first:count]))
        return hits

    def _usable_by(self, others: Sequence[tuple[BlockPool, KVGroup]], hashes: Sequence[bytes], count: int) -> int:
        """The most blocks of the first ``count`` after which each of these groups has what a query reads."""
        before = -1
        while others and count != before:
            before = count
            for pool, group in others:
                count = self._usable(pool, group, hashes, count)
        return count

    def _usable(self, pool: BlockPool, group: KVGroup, hashes: Sequence[bytes], count: int) -> int:
        """The most blocks of the first ``count`` after which the group has what a query reads."""
        return group.usable(count, self.block_size, lambda block: pool.find(hashes[block]) is not None)

    # --- allocation -------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, hits: list[list[int]], num_external: int, num_queries: int) -> int:
        """Allocate blocks for all known tokens of a waiting request, ``hits`` first, or return how many are missing.

        Of a window: for ``num_queries`` tokens after the hits and ``num_external`` tokens that a connector loads. Of
        states: the slots of a running request, and one for a state that a connector loads.
        """
        size, pools, num_hits = self.block_size, self.pools, len(hits[0])
        # drafts need room too, but positions from the last token on are never an input
        num_positions = min(request.num_tokens + self._lookahead, request.max_total_tokens - 1)
        needs, firsts = [-(-num_positions // size) - num_hits], []
        computed = num_hits * size + num_external
        last = -(-(computed + num_queries) // size)
        for place, (_, group) in enumerate(self._others, start=1):
            first = group.first_block(computed, size)
            hits[place] = hits[place][max(0, first - num_hits + len(hits[place])) :]
            if group.is_state:
                needs.append(group.num_slots + (num_external > 0))
            else:
                needs.append(last - max(first, num_hits))
                firsts.append(first)
        if (missing := pools.num_missing(needs, hits)) > 0:
            return missing
        for pool, shared in zip(pools.all, hits, strict=True):
            pool.share(shared)
        taken = pools.take(needs)
        request.block_ids = hits[0] + taken[0]
        request.group_block_ids = [
            [0] * first + shared + new for first, shared, new in zip(firsts, hits[1:], taken[1:], strict=False)
        ]
        if self.states is not None:
            kept = [(num_hits * size, slot) for slot in hits[-1]]
            if num_external:
                kept = [(computed, taken[-1].pop())]
            is_held = self._connector.holds_prompt(request)
            request.states = StateSlots(taken[-1], size, kept, newest=num_hits * size, for_connector=is_held)
            self.states.renew(request.block_hashes[: num_hits + request.num_lost // size])
        request.num_freed = firsts
        self._set_capacity(request)
        request.num_computed = num_hits * size
        request.num_published = request.num_hits = num_hits
        return 0

    def needs(self, request: Request, num_positions: int) -> list[int]:
        """How many blocks of each group a running request lacks for so many positions."""
        last = -(-num_positions // self.block_size)
        needs = [max(0, last - len(ids)) for ids in (request.block_ids, *request.group_block_ids)]
        return needs + [0] * (self.states is not None)

    def append(self, request: Request, needs: Sequence[int]) -> list[list[int]]:
        """Allocate more blocks for a running request. Returns those of each group."""
        taken = self.pools.take(needs)
        request.block_ids += taken[0]
        for block_ids, new in zip(request.group_block_ids, taken[1:], strict=False):
            block_ids += new
        self._set_capacity(request)
        return taken

    def _set_capacity(self, request: Request) -> None:
        request.capacity = min(map(len, (request.block_ids, *request.group_block_ids))) * self.block_size

    def limit_capacity(self, request: Request) -> None:
        """To the positions of a decode for which its tables have states."""
        if request.states is not None:
            request.capacity = min(request.capacity, request.states.num_blocks * self.block_size)

    def free_windows(self, request: Request) -> None:
        """Free the blocks before what the oldest step in flight of a running request reads. Those of its last prompt
        tokens, and those that it was given, are evicted as the blocks of other prefixes are; others before. Likewise
        states."""
        position = self._retired(request)
        if self.states is not None:
            self.states.release(request, position)
        for place, (pool, group) in enumerate(self._windows):
            begin, end = request.num_freed[place], group.first_block(position, self.block_size)
            if end > begin:
                block_ids = request.group_block_ids[place]
                kept = group.first_block(
                    request.num_prompt_tokens // self.block_size * self.block_size, self.block_size
                )
                first = min(max(begin, request.num_hits), end)
                middle = min(max(first, kept), end)
                pool.free(block_ids[begin:first])
                pool.free(block_ids[first:middle], evict_first=True)
                pool.free(block_ids[middle:end])
                block_ids[begin:end] = [0] * (end - begin)
                request.num_freed[place] = end

    def _retired(self, request: Request) -> int:
        """The first position of a running request that no step before those in flight has computed."""
        position = request.num_retired
        if position >= request.num_prefill:  # it decodes: the newest known token is not computed
            position = max(position, request.num_tokens - 1)
        return position

    def drop_states(self, running: Iterable[Request]) -> bool:
        """Free the states that running requests keep for later ones. Returns whether there were any."""
        states = self.states
        if states is None:
            return False
        return any([states.release(request, self._retired(request), all_kept=True) for request in running])

    # --- publishing -------------------------------------------------------------------------------------------------

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
        if self.states is not None and not by_this_step:
            self.states.publish(request, final)

    def publish_loaded(self, request: Request) -> None:
        """Publish blocks that the connector has loaded. The connector is not notified: it has them already."""
        self._publish(request, request.num_computed)
        if self.states is not None:
            self.states.publish_loaded(request)

    def _publish(self, request: Request, num_tokens: int) -> int:
        """Returns the number of blocks that are published now; 0 if none was added."""
        last = num_tokens // self.block_size
        if not self._publishes or last <= request.num_published:
            return 0
        self.hash(request, last)
        first, hashes = request.num_published, request.block_hashes
        publish, block_ids, stored = self.pools.first.publish, request.block_ids, self.pools.events.stored
        stored(0, request, [block for block in range(first, last) if publish(block_ids[block], hashes[block])])
        for (pool, _), block_ids, freed in zip(self._windows, request.group_block_ids, request.num_freed, strict=True):
            blocks = range(max(first, freed), min(last, len(block_ids)))
            stored(pool.group, request, [b for b in blocks if pool.publish(block_ids[b], hashes[b])])
        request.num_published = last
        return last

    def hash(self, request: Request, count: int) -> None:
        """Make sure that the first ``count`` blocks of known tokens have hashes."""
        hashes, size = request.block_hashes, self.block_size
        if count > len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt, self.weights)
            token_ids = request.prompt_token_ids if count * size <= request.num_prompt_tokens else request.token_ids
            hashes += extend_chain(parent, token_ids, len(hashes) * size, count * size, size)

    # --- owners -----------------------------------------------------------------------------------------------------

    def owned(self, request: Request) -> list[list[int]]:
        """The blocks of a request in each group."""
        others = zip(request.group_block_ids, request.num_freed, strict=True)
        groups = [request.block_ids, *(block_ids[freed:] for block_ids, freed in others)]
        if (states := request.states) is not None:
            groups.append([*states.slots, *(slot for _, slot in states.kept)])
        return groups + [[] for _ in self._others[len(groups) - 1 :]]

    def kept(self, request: Request) -> list[list[int]]:
        """Those of `owned` that do not change any more when the request has ended: the running states are left out."""
        blocks = self.owned(request)
        if request.states is not None:
            blocks[-1] = [slot for _, slot in request.states.kept]
        return blocks

    def num_owned(self, request: Request) -> int:
        """Blocks of a request in all groups."""
        return sum(map(len, self.owned(request)))

    def hold(self, request: Request) -> None:
        """Hold the blocks of a request that no longer runs, until `free`."""
        request.is_held = True
        self.pools.hold(self.owned(request))

    def free(self, request: Request) -> None:
        """Free the blocks of a request that is in no step in flight; it may start again."""
        free = self.pools.release if request.is_held else self.pools.free
        free(self.owned(request))
        request.is_held = False
        request.block_ids, request.group_block_ids, request.num_freed, request.states = [], [], [], None
        request.capacity = request.num_computed = request.num_published = 0
        request.num_retired = request.num_hits = 0
