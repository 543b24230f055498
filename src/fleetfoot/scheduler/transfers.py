"""KV transfers in the life of a request: loaded before it runs, lent after it has ended.

waiting -> LOADING -> ready -> running          its KV has come
                   -> waiting, or an error      it has not (``kv_load_failure_policy``)
                   -> ended                     aborted: its blocks stay lent until the load has ended
running -> ended, its blocks lent -> free       the connector still reads them, until it says "sent"
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.scheduler.kv_blocks import RequestBlocks
from fleetfoot.scheduler.stats import TransferStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MissedLoads:
    """Requests whose KV did not come."""

    again: list[Request] = field(default_factory=list)
    """They have given back their blocks and must wait for new ones."""
    failed: list[tuple[Request, str]] = field(default_factory=list)
    """They are to end, and why."""


class Transfers:
    """The scheduler's dealings with a KV connector. With a connector that is none, nothing here costs anything.

    Args:
        blocks: where requests have their blocks from.
        fail_on_error: False: the tokens of a load that failed are computed; True: its request fails.
    """

    def __init__(self, connector: SchedulerConnector, blocks: RequestBlocks, *, fail_on_error: bool) -> None:
        self.connector = connector
        self._blocks = blocks
        self._fail_on_error = fail_on_error
        self._loading: dict[str, Request] = {}
        self._ready: list[Request] = []  # loaded, without a row yet: a heap
        self._stale: set[str] = set()  # of those that load: the KV is of weights that have been replaced
        self._abandoned: dict[str, Request] = {}  # ended while they were loading
        self._lent: dict[str, list[int]] = {}  # blocks of requests that have ended
        self._started = self._done = self._failed = self._timed_out = self._tokens = 0
        self._counters: dict[str, int] = {}

    # --- before a request runs --------------------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Requests that hold blocks and have no row yet: one is kept free for each of them."""
        return len(self._loading) + len(self._ready)

    @property
    def ready(self) -> Request | None:
        """The first of those whose KV has been loaded."""
        return self._ready[0] if self._ready else None

    def take_ready(self) -> None:
        """`ready` begins to run."""
        heappop(self._ready)

    def uses(self, request_id: str) -> bool:
        """Whether a transfer of an ended request goes by this name."""
        return request_id in self._abandoned or request_id in self._lent

    def num_matched(self, request: Request, num_local: int) -> int:
        """Tokens that could be loaded behind the ``num_local`` that are here.

        Raises:
            RuntimeError: the connector answers what cannot be.
        """
        if not request.may_load or request.wants_prompt_logprobs:
            return 0
        matched = self.connector.get_num_new_matched_tokens(request, num_local)
        if matched and (matched < 0 or matched % self._blocks.block_size or num_local + matched >= request.num_tokens):
            raise RuntimeError(
                f"the KV connector {type(self.connector).__name__} matches {matched} tokens behind {num_local} of a "
                f"request of {request.num_tokens}: it must be whole blocks of {self._blocks.block_size}, and leave a "
                "token to compute"
            )
        return matched

    def start_load(self, request: Request, num_matched: int) -> None:
        """A request that waited has its blocks, and waits for its KV."""
        request.status = RequestStatus.LOADING
        request.num_loaded = num_matched
        self._loading[request.request_id] = request
        self._started += 1
        self.connector.update_state_after_alloc(request, request.num_computed, num_matched)

    # --- a step -----------------------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """Whether a step without a forward pass would have something to do."""
        return bool(self._loading or self._abandoned or self._lent) or self.connector.has_pending

    def update(self, output: KVConnectorOutput) -> MissedLoads:
        """Take in what has ended on all ranks."""
        self.connector.update_connector_output(output)
        for name, count in output.counters.items():
            self._counters[name] = self._counters.get(name, 0) + count
        missed = MissedLoads()
        for request_id in sorted(output.loaded):
            self._load_has_ended(request_id, None, missed)
        for request_id, failure in output.failed.items():
            self._load_has_ended(request_id, failure, missed)
        for request_id in output.sent:
            blocks = self._lent.pop(request_id, None)
            if blocks is None:
                logger.warning("the KV connector reports request %r as sent, which has lent it nothing", request_id)
            else:
                self._blocks.pool.take_back(blocks)
        return missed

    def _load_has_ended(self, request_id: str, failure: TransferFailure | None, missed: MissedLoads) -> None:
        if (request := self._abandoned.pop(request_id, None)) is not None:
            self._blocks.give_back(request)
            return
        request = self._loading.pop(request_id, None)
        if request is None:
            logger.warning("the KV connector reports that request %r was loaded, which waits for nothing", request_id)
        elif request_id in self._stale:
            self._stale.discard(request_id)
            missed.again.append(self._begin_anew(request))
        elif failure is None:
            self._done += 1
            self._tokens += request.num_loaded
            request.num_computed += request.num_loaded
            self._blocks.publish_loaded(request)
            heappush(self._ready, request)
        else:
            self._failed += 1
            self._timed_out += failure.timed_out
            if self._fail_on_error:
                heappush(self._ready, request)  # it holds its blocks until it ends, which comes next
                missed.failed.append((request, f"its KV could not be loaded: {failure.reason}"))
            else:
                logger.warning("KV of request %r could not be loaded: %s", request_id, failure.reason)
                request.may_load = False
                missed.again.append(self._begin_anew(request))

    def _begin_anew(self, request: Request) -> Request:
        self._blocks.give_back(request)
        request.status = RequestStatus.WAITING
        request.num_loaded = 0
        return request

    def build_metadata(self, output: SchedulerOutput) -> None:
        """Tell the workers what to transfer."""
        output.kv_connector_metadata = self.connector.build_connector_meta(output)

    # --- after a request --------------------------------------------------------------------------------------------

    def request_finished(self, request: Request) -> None:
        """It has ended, and has its blocks still."""
        is_lent, request.kv_transfer_output = self.connector.request_finished(request)
        if is_lent:
            self._lent[request.request_id] = request.block_ids
            self._blocks.pool.lend_more(request.block_ids)

    def leave(self, request: Request) -> None:
        """It ended before it ran: blocks that are being written to stay lent until the load has ended."""
        if self._loading.pop(request.request_id, None) is None:
            self._ready.remove(request)
            heapify(self._ready)
            self._blocks.give_back(request)
        else:
            self._stale.discard(request.request_id)
            self._abandoned[request.request_id] = request
            self._blocks.lend(request)

    def forget(self) -> list[Request]:
        """Weights have changed: KV of the old ones must not be run on. Returns the requests that wait anew."""
        self.connector.reset_cache()
        self._stale.update(self._loading)
        again = [self._begin_anew(request) for request in self._ready]
        self._ready.clear()
        return again

    # --- looking in -------------------------------------------------------------------------------------------------

    @property
    def holders(self) -> Iterator[Request]:
        """Requests that have blocks and no row."""
        return chain(self._loading.values(), self._ready, self._abandoned.values())

    @property
    def lent(self) -> list[list[int]]:
        """The blocks of each request that was sent or is being sent."""
        return list(self._lent.values())

    @property
    def num_lent_blocks(self) -> int:
        """Blocks of requests that have ended which a transfer uses."""
        # lists are made at one stroke: statistics are read by other threads too
        abandoned = [request.block_ids for request in list(self._abandoned.values())]
        return len(set(chain.from_iterable((*list(self._lent.values()), *abandoned))))

    def stats(self) -> TransferStats:
        return TransferStats(
            num_loading=self.num_loading,
            num_lent_blocks=self.num_lent_blocks,
            loads_started=self._started,
            loads_done=self._done,
            loads_failed=self._failed,
            loads_timed_out=self._timed_out,
            tokens_loaded=self._tokens,
            counters=dict(self._counters),
        )
