"""KV transfers of requests: loads before a request runs, holds after it has ended.

waiting -> LOADING -> ready -> running          the load succeeded
                   -> waiting, or an error      the load failed (``kv_load_failure_policy``)
                   -> aborted                   its blocks stay HELD until the load has ended
running -> ended, its blocks HELD -> free       the connector reads them until it reports the request as sent or evicted
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.scheduler.kv_blocks import RequestBlocks
from fleetfoot.scheduler.stats import TransferStats

logger = logging.getLogger(__name__)


class Transfers:
    """The scheduler's use of a KV connector. Without an active connector every operation is a cheap no-op.
    ``fail_on_error``: a request fails with its load; else its tokens are computed instead."""

    def __init__(self, connector: SchedulerConnector, blocks: RequestBlocks, *, fail_on_error: bool) -> None:
        self.connector = connector
        self._blocks = blocks
        self._fail_on_error = fail_on_error
        self._loading: dict[str, Request] = {}
        self._ready: list[Request] = []  # loaded, without a row yet: a heap
        self._stale: set[str] = set()  # requests that load KV of weights that have been replaced
        self._aborted: dict[str, Request] = {}  # ended while they were loading
        # blocks of ended requests that the connector reads, of each group of layers; oldest first
        self._held: dict[str, list[list[int]]] = {}
        self._evicting: set[str] = set()  # of these
        self.counts = Counter[str](), Counter[str]()
        """By their names in TransferStats, and those of the connector."""

    # --- before a request runs --------------------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Requests that have blocks and no row yet. A row is reserved for each of them."""
        return len(self._loading) + len(self._ready)

    @property
    def ready(self) -> Request | None:
        """The first request with loaded KV."""
        return self._ready[0] if self._ready else None

    def pop_ready(self) -> Request:
        """Remove and return `ready`."""
        return heappop(self._ready)

    def uses(self, request_id: str) -> bool:
        """Whether a transfer of an ended request still has this id."""
        return request_id in self._aborted or request_id in self._held

    def num_matched(self, request: Request, num_local: int) -> int | None:
        """Tokens that the connector can load after the ``num_local`` tokens of the prefix cache; None: not known yet.
        Raises RuntimeError if it returns an impossible number."""
        if not request.can_load or request.reads_whole_prompt:
            return 0
        matched = self.connector.get_num_new_matched_tokens(request, num_local)
        if matched and (matched < 0 or matched % self._blocks.block_size or num_local + matched >= request.num_tokens):
            raise RuntimeError(
                f"the KV connector {type(self.connector).__name__} matches {matched} tokens after {num_local} of a "
                f"request of {request.num_tokens}: it must be whole blocks of {self._blocks.block_size}, and leave a "
                "token to compute"
            )
        return matched

    def start_load(self, request: Request, num_matched: int) -> None:
        """Start to load KV into the blocks of a request that was waiting."""
        request.status = RequestStatus.LOADING
        request.num_loaded = num_matched
        request.num_lost = max(0, request.num_lost - num_matched)
        self._loading[request.request_id] = request
        self.counts[0]["loads_started"] += 1
        self.connector.update_state_after_alloc(request, request.num_computed, num_matched)

    # --- a step -----------------------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether a step without a forward pass would have work for the connector."""
        return bool(self._loading or self._aborted or self._held) or self.connector.has_pending

    def update(self, output: KVConnectorOutput) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Process the transfers that have ended on all ranks. Returns the requests that wait again because their load
        failed (without blocks; their tokens will be computed), and those that must end, each with its error."""
        self.connector.update_connector_output(output)
        self.counts[1].update(output.counters)
        requeued: list[Request] = []
        failed: list[tuple[Request, str]] = []
        ended: dict[str, TransferFailure | None] = {**dict.fromkeys(sorted(output.loaded)), **output.failed}
        for request_id, failure in ended.items():
            if (aborted := self._aborted.pop(request_id, None)) is not None:
                self._blocks.free(aborted)
            elif (request := self._loading.pop(request_id, None)) is None:
                logger.warning("the KV connector reports request %r as loaded, but it is not loading", request_id)
            elif request_id in self._stale:
                self._stale.discard(request_id)
                requeued.append(self._restart(request))
            elif failure is None:
                self.counts[0].update(loads_done=1, tokens_loaded=request.num_loaded)
                request.num_computed += request.num_loaded
                self._blocks.publish_loaded(request)
                heappush(self._ready, request)
            else:
                self.counts[0].update(loads_failed=1, loads_timed_out=int(failure.timed_out))
                if self._fail_on_error:
                    heappush(self._ready, request)  # it keeps its blocks until the scheduler ends it
                    failed.append((request, f"its KV could not be loaded: {failure.reason}"))
                else:
                    logger.warning("KV of request %r could not be loaded: %s", request_id, failure.reason)
                    request.can_load = False
                    requeued.append(self._restart(request))
        for request_id in output.sent:
            self._evicting.discard(request_id)
            blocks = self._held.pop(request_id, None)
            if blocks is None:
                logger.warning("the KV connector reports request %r as sent, but holds no blocks of it", request_id)
            else:
                self._blocks.pools.release(blocks)
        return requeued, failed

    def _restart(self, request: Request) -> Request:
        self._blocks.free(request)
        request.status = RequestStatus.WAITING
        request.num_loaded = 0
        return request

    # --- after a request --------------------------------------------------------------------------------------------

    def request_finished(self, request: Request) -> None:
        """Report a request that has ended and still has its blocks."""
        is_held, request.kv_transfer_output = self.connector.request_finished(request)
        if is_held:
            self._held[request.request_id] = blocks = self._blocks.kept(request)
            self._blocks.pools.hold(blocks, add_reference=True)

    def evict(self, request_id: str) -> bool:
        """Release the held blocks of a request, unless they are being read: then they are released after the read.
        False: it has none, or the connector cannot."""
        if request_id in self._held and request_id not in self._evicting and self.connector.evict(request_id):
            self._evicting.add(request_id)
        return request_id in self._evicting

    def make_room(self, num_blocks: int) -> bool:
        """Evict the oldest requests that hold ``num_blocks`` alone. False: fewer are held, or the connector cannot."""
        pools = self._blocks.pools
        evicted, holds = list[str](), [Counter[int]() for _ in pools.all]
        for request_id in sorted(self._held, key=lambda request_id: request_id not in self._evicting):
            if num_blocks <= 0:
                break
            evicted.append(request_id)
            for pool, blocks, held in zip(pools.all, self._held[request_id], holds, strict=True):
                held.update(blocks)
                num_blocks -= pool.num_released(blocks, held)
        return num_blocks <= 0 and all([self.evict(request_id) for request_id in evicted])

    def abort(self, request: Request) -> None:
        """End the transfer of a request that ended before it ran. Blocks stay HELD while a load writes them."""
        if self._loading.pop(request.request_id, None) is None:
            self._ready.remove(request)
            heapify(self._ready)
            self._blocks.free(request)
        else:
            self._stale.discard(request.request_id)
            self._aborted[request.request_id] = request
            self._blocks.hold(request)

    def evict_all(self) -> None:
        """Release the held blocks of all requests, unless they are being read."""
        for request_id in list(self._held):
            self.evict(request_id)

    def invalidate(self, weights: str = "") -> list[Request]:
        """Discard KV of earlier weights, loads in progress included. Returns the requests that must wait again."""
        self.connector.reset_cache(weights)
        return self.restart_loads()

    def restart_loads(self) -> list[Request]:
        """Discard loaded KV, loads in progress included. Returns the requests that must wait again."""
        self._stale.update(self._loading)
        requeued = [self._restart(request) for request in self._ready]
        self._ready.clear()
        return requeued

    # --- inspection -------------------------------------------------------------------------------------------------

    @property
    def owners(self) -> Iterator[Request]:
        """Requests that have blocks and no row."""
        return chain(self._loading.values(), self._ready, self._aborted.values())

    @property
    def held(self) -> list[list[list[int]]]:
        """The blocks of each ended request that the connector reads, of each group."""
        return list(self._held.values())

    @property
    def num_held_blocks(self) -> int:
        """Blocks of ended requests that a transfer uses."""
        # `list` copies atomically: other threads read statistics too
        lists = [*self.held, *(self._blocks.owned(request) for request in list(self._aborted.values()))]
        return sum(len(set(chain(*blocks))) for blocks in zip(*lists, strict=True))

    def stats(self) -> TransferStats:
        counts, counters = self.counts
        return TransferStats(self.num_loading, self.num_held_blocks, counters=dict(counters), **counts)
