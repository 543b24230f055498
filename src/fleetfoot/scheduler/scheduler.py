"""The scheduler: which requests compute how many tokens in the next step, and what became of the last one.

A running request keeps a row of the runner's state and a list of KV blocks. Steps may be queued before the results of
earlier ones are known (overlapped scheduling): a token that a step in flight will yield is computed further by the next
step before the host knows it, and becomes known in `Scheduler.update`; drafts count as accepted until then. Blocks and
rows go back only after the last step that holds them has retired.

All of this is host time that stands in the way of the device, so the loops over running requests do one thing each
and touch nothing that did not change.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from itertools import chain

from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.request import Request, RequestStatus, StepResult
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from fleetfoot.scheduler.block_pool import BlockPool
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.drafting import ConstantDrafts, DraftController, Drafting
from fleetfoot.scheduler.kv_blocks import RequestBlocks
from fleetfoot.scheduler.rotation import drafts_of_turn, note_turn, take_turn
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.scheduler.transfers import Transfers
from fleetfoot.scheduler.waiting import WaitingQueue

RUNNING = RequestStatus.RUNNING
NewBlockIds = list[tuple[int, int, list[int]]]


class Scheduler:
    """First come, first served (or by priority), with paged KV, prefix caching, chunked prefill and preemption.

    Decodes go first, then prefills that are under way, then waiting requests, all within ``max_num_batched_tokens``.
    A waiting request is admitted when blocks for all its known tokens are free. When a decode finds no free block,
    the request at the end of the order is preempted: it gives everything back and will be computed again.

    Args:
        connector: moves KV in and out of the engine; None: nothing does.
        controller: decides which steps propose drafts; None: all, if ``config.num_drafts`` is above 0.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        connector: SchedulerConnector | None = None,
        controller: DraftController | None = None,
    ) -> None:
        connector = connector or NoSchedulerConnector()
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.blocks = RequestBlocks(config, self.pool, connector)
        self.transfers = Transfers(connector, self.blocks, fail_on_error=config.kv_load_failure_policy == "fail")
        self.drafting = Drafting(config.num_drafts, controller or ConstantDrafts(config.num_drafts))
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in order of priority and arrival; the last one is preempted first
        self._waiting = WaitingQueue()
        self._turn = self.running  # those of `running` that may be in the step that is being made
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished: list[tuple[str, int]] = []
        self._finished_req_ids: set[str] = set()
        self._step = 0
        self._newest_updated = -1
        self._arrivals = 0
        self._num_lent = 0  # blocks that the steps in flight will give back
        self._num_hoping = 0  # blocks for which requests of this step wait for them
        self._num_ended = 0  # requests of `running` that have ended in this update
        self._num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, it can never fit in the KV cache, or its kv_transfer_params mean nothing.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that has not ended")
        if self.transfers.uses(request.request_id):
            raise ValueError(
                f"request id {request.request_id!r} is in use: KV of a request that had it is still being transferred"
            )
        # the last token is never an input, so it needs no room
        room, wanted = self.config.num_blocks * self.config.block_size, request.max_tokens_in_all - 1
        if wanted > room:
            raise ValueError(
                f"request {request.request_id!r} needs KV for {wanted} tokens ({request.num_prompt_tokens} of prompt "
                f"and {request.max_tokens_in_all - request.num_prompt_tokens} to generate, less one), and the whole "
                f"cache holds {room} ({self.config.num_blocks} blocks of {self.config.block_size}); shorten the prompt "
                f"or set max_tokens to at most {max(0, room + 1 - request.num_prompt_tokens)}"
            )
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and request.num_prompt_tokens > budget:
            raise ValueError(
                f"request {request.request_id!r} has a prompt of {request.num_prompt_tokens} tokens, and a step holds "
                f"{budget}; raise max_num_batched_tokens or set enable_chunked_prefill=True"
            )
        self.transfers.connector.check_request(request)  # last: the connector remembers what it has not refused
        if not self.config.priority:
            request.priority = 0
        request.sequence_number = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request
        self._waiting.push(request)

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> Request | None:
        """End a request from outside: aborted, or stopped by its text. None if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RUNNING:
            self.running.remove(request)
        self._end(request, status, stop_reason)
        return request

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def has_idle_work(self) -> bool:
        """Whether a step without a forward pass would have something to do: for a transfer, or because the KV connector
        has not been given the ids of requests that have ended."""
        return self.transfers.is_pending or self.has_unreported_ids

    @property
    def has_unreported_ids(self) -> bool:
        """Whether requests have ended since the last step was made, and a KV connector is to get their ids."""
        return bool(self._finished_req_ids) and self.transfers.connector.is_active

    @property
    def num_in_flight(self) -> int:
        """Steps queued and not yet updated."""
        return len(self._in_flight)

    # --- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Choose the next step's work; None if there is nothing that can be done now.

        The step is idle where nothing can be computed and nothing is in flight, but the KV connector has work.
        """
        new_block_ids: NewBlockIds = []
        self._num_hoping = 0
        num_preemptions = self._num_preemptions
        stages = self.config.num_stages
        self._turn = self.running if stages == 1 else take_turn(self.running, stages, self._step)
        num_drafts = self.drafting.num_proposed if stages == 1 else drafts_of_turn(self._turn)
        decodes, prefills = self._take_decodes(1 + num_drafts, new_block_ids)
        budget = self.config.max_num_batched_tokens - len(decodes) * (1 + num_drafts)
        ending: list[Request] = []
        going_on: list[Request] = []
        counts: dict[int, int] = {}  # sequence number -> tokens, of prefills
        for request in prefills:
            if budget > 0:
                budget -= self._chunk(request, budget, ending, going_on, counts)
        new_requests = []
        if num_preemptions == self._num_preemptions:
            while budget > 0 and (admitted := self._admit(budget)):
                new_requests.append(NewRequest.of(admitted))
                budget -= self._chunk(admitted, budget, ending, going_on, counts)

        batch = decodes + ending + going_on
        if not batch and not self._in_flight and num_preemptions != self._num_preemptions:
            return self.schedule()  # whoever could run was preempted: there is room for somebody else
        if not batch and (self._in_flight or not self.has_idle_work):
            return None
        num_sampled = len(decodes) + len(ending)
        is_mixed = len(decodes) < len(batch)
        num_scheduled = [1 + num_drafts] * len(decodes)
        num_scheduled += [counts[request.sequence_number] for request in batch[len(decodes) :]]
        output = SchedulerOutput(
            step=self._step,
            rows=[request.row for request in batch],
            num_scheduled_tokens=num_scheduled,
            num_decodes=len(decodes),
            num_sampled=num_sampled,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - budget,
            new_requests=new_requests,
            new_block_ids=new_block_ids,
            finished=self._finished,
            finished_req_ids=self._finished_req_ids,
            num_drafts=num_drafts if decodes else 0,
            num_to_propose=self.drafting.choose(num_sampled),
            longest_decode=max((request.num_computed for request in decodes), default=0) if is_mixed else 0,
        )
        if stages > 1:
            note_turn(output, batch, self._newest_updated)
        self._hand_over(output)
        self._step += 1
        self._in_flight.append((output, batch))
        return output

    def final_output(self) -> SchedulerOutput | None:
        """An empty last step, which no `update` follows: requests that have not ended are aborted, and the KV connector
        gets the last ids and whatever it has pending. None if there is nothing for it."""
        for request_id in list(self.requests):
            self.finish(request_id, RequestStatus.FINISHED_ABORTED)
        if not self.transfers.connector.has_pending and not self.has_unreported_ids:
            return None
        output = SchedulerOutput(-1, [], [], 0, 0, 0, finished=self._finished, finished_req_ids=self._finished_req_ids)
        self._hand_over(output)
        return output

    def _hand_over(self, output: SchedulerOutput) -> None:
        """The step carries what the KV connector and the runner have not been given yet."""
        self.transfers.build_metadata(output)
        self._finished, self._finished_req_ids = [], set()

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[StepResult]:
        """Take in the oldest step in flight: append tokens, end requests, give back what nobody holds any more."""
        in_flight, batch = self._in_flight.popleft()
        if in_flight is not output:
            raise RuntimeError(f"step {output.step} was updated before step {in_flight.step}, which is older")
        self._newest_updated = output.step
        self.drafting.take_back(output, batch, result)
        results: list[StepResult] = []
        if result.kv_connector_output is not None:  # first: what it says may count for requests that end with this step
            self._update_transfers(result.kv_connector_output, results)
        sampled, num_sampled = result.sampled_token_ids, output.num_sampled
        for index, request in enumerate(batch):
            request.num_in_flight -= 1
            if request.status is not RUNNING:
                self._update_left(request, sampled[index] if index < num_sampled else [], index, results)
            elif index >= num_sampled:
                if request.wants_prompt_logprobs:
                    results.append(StepResult(request, [], index))
            else:
                new_token_ids = sampled[index]
                token_ids = request.token_ids
                if len(new_token_ids) == 1 and new_token_ids[0] not in request.stop_token_ids:
                    token_ids.append(new_token_ids[0])
                    if len(token_ids) >= request.max_tokens_in_all:
                        self._end(request, RequestStatus.FINISHED_LENGTH, None)
                else:
                    new_token_ids = self._append(request, new_token_ids)
                results.append(StepResult(request, new_token_ids, index))
        for index, message in result.invalid.items():
            self._fail(batch[index], message, len(sampled[index]), results)
        if self._num_ended:
            self._num_ended = 0
            self.running = [request for request in self.running if request.status is RUNNING]
        return results

    def _append(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """Append tokens up to the first that ends the request; returns those that count."""
        token_ids, params = request.token_ids, request.params
        for count, token in enumerate(new_token_ids, start=1):
            token_ids.append(token)
            if token in request.stop_token_ids and len(token_ids) >= request.min_tokens_in_all:
                reason = token if token in (params.stop_token_ids or ()) else None
                self._end(request, RequestStatus.FINISHED_STOPPED, reason)
            elif len(token_ids) >= request.max_tokens_in_all:
                self._end(request, RequestStatus.FINISHED_LENGTH, None)
            else:
                continue
            return new_token_ids[:count]
        return new_token_ids

    def _update_left(self, request: Request, new_token_ids: list[int], index: int, results: list[StepResult]) -> None:
        """A request that stopped running while this step was in flight.

        If it ended, its token is discarded. If it was preempted, the token counts like any other.
        """
        if request.status is RequestStatus.PREEMPTED and (new_token_ids or request.wants_prompt_logprobs):
            results.append(StepResult(request, self._append(request, new_token_ids), index))
        self._release(request)

    def _update_transfers(self, output: KVConnectorOutput, results: list[StepResult]) -> None:
        missed = self.transfers.update(output)
        for request in missed.again:
            self._waiting.push(request)
        for request, reason in missed.failed:
            self._end(request, RequestStatus.FINISHED_ERROR, reason)
            results.append(StepResult(request, [], -1))

    # --- parts of a step --------------------------------------------------------------------------------------------

    def _take_decodes(self, width: int, new_block_ids: NewBlockIds) -> tuple[list[Request], list[Request]]:
        """Put the decodes of this turn into the step, ``width`` tokens each; returns them, and the prefills."""
        decodes: list[Request] = []
        prefills: list[Request] = []  # running ones whose prompt is not computed to its end
        reach = width + self.config.num_lookahead
        for request in self._turn:  # preemption shortens it at the end only, which a list iterator allows
            computed = request.num_computed
            if computed < request.num_prefill:
                prefills.append(request)
                continue
            if computed + 1 >= request.max_tokens_in_all and request.has_certainly_ended:
                continue  # its last token is in flight, and is no input
            if computed + reach > request.capacity and not self._grow(request, computed + reach, new_block_ids):
                continue
            request.num_computed = computed + width
            request.num_in_flight += 1
            decodes.append(request)
        return decodes, prefills

    def _chunk(
        self, request: Request, budget: int, ending: list[Request], going_on: list[Request], counts: dict[int, int]
    ) -> int:
        """Put the next chunk of a prefill into the step; its blocks are there since its admission."""
        missing = request.num_prefill - request.num_computed
        count = min(missing, budget)
        counts[request.sequence_number] = count
        request.num_computed += count
        request.num_in_flight += 1
        if count == missing:
            ending.append(request)
        else:
            going_on.append(request)
        self.blocks.publish(request, by_this_step=True)
        return count

    def _admit(self, budget: int) -> Request | None:
        """Let the next request run, if there is one and it fits: one whose KV has been loaded, or the first that waits.

        Requests whose KV can be loaded begin to load on the way.
        """
        transfers = self.transfers
        if (request := transfers.ready) is not None:
            if not self._fits_step(request, request.num_computed, budget):
                return None
            transfers.take_ready()
            return self._run(request)
        while self._waiting and len(self._free_rows) > transfers.num_loading:
            request = self._waiting.first
            if request.num_in_flight:
                return None  # preempted a moment ago: its last token and its blocks are still on the device
            hits = self.blocks.find_prefix(request)
            num_local = len(hits) * self.config.block_size
            num_matched = transfers.num_matched(request, num_local)
            if not num_matched and not self._fits_step(request, num_local, budget):
                return None
            if not self.blocks.take(request, hits):
                return None
            self._waiting.pop()
            request.num_loaded = 0
            if not num_matched:
                return self._run(request)
            transfers.start_load(request, num_matched)
        return None

    def _fits_step(self, request: Request, num_computed: int, budget: int) -> bool:
        """Whether a prompt may begin: one that must not be split waits for a step that holds the rest of it.

        What a preempted request must compute again may be more than any step: only that is split then.
        """
        missing = request.num_tokens - num_computed
        return self.config.enable_chunked_prefill or not budget < missing <= self.config.max_num_batched_tokens

    def _run(self, request: Request) -> Request:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed
            self._prefix_queries += request.num_tokens
            self._prefix_hits += request.num_computed - request.num_loaded
        request.row = self._free_rows.pop()
        request.status = RUNNING
        request.num_prefill = request.num_tokens
        request.num_proposed = 0
        if not self.running or self.running[-1] < request:  # as nearly always
            self.running.append(request)
        else:
            insort(self.running, request)
        return request

    def _grow(self, request: Request, num_positions: int, new_block_ids: NewBlockIds) -> bool:
        """Blocks for a decode, at another's cost if need be; False: not in this step, or preempted itself."""
        pool, block_size = self.pool, self.config.block_size
        if num_positions >= request.max_tokens_in_all:
            num_positions = request.max_tokens_in_all - 1  # from the last token on nothing is ever an input
            if num_positions <= request.capacity:
                return True
        count = (num_positions - request.capacity + block_size - 1) // block_size
        while pool.num_free < count:
            if self._num_hoping + count <= self._num_lent:
                self._num_hoping += count  # enough will come back when the steps in flight retire: nobody else must go
                return False
            victim = self.running.pop()
            if self._turn and self._turn[-1] is victim:
                self._turn.pop()
            self._preempt(victim)
            if victim is request:
                return False
        blocks = pool.take(count)
        new_block_ids.append((request.row, len(request.block_ids), blocks))
        request.block_ids += blocks
        request.capacity += count * block_size
        return True

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Everything back; it waits, before all that came later, to be computed again."""
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.blocks.publish(request, by_this_step=False)
        self._release(request)
        self._waiting.push(request)

    def _end(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        was = request.status
        if was is RUNNING:
            self._num_ended += 1
        elif was is not RequestStatus.LOADING:
            self._waiting.note_ended()
        request.status = status
        request.stop_reason = stop_reason
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        if status != RequestStatus.FINISHED_ERROR:
            self.blocks.publish(request, by_this_step=False)
        self.transfers.request_finished(request)
        if was is RequestStatus.LOADING:
            self.transfers.leave(request)
        else:
            self._release(request)

    def _fail(self, request: Request, message: str, num_new: int, results: list[StepResult]) -> None:
        """The last of the step's tokens for this request means nothing: take it back and end the request."""
        result = next((result for result in results if result.request is request), None)
        if result is None or len(result.new_token_ids) < num_new:
            return  # it had ended before, or before that token
        if result.new_token_ids:
            del request.token_ids[-1]
            result.new_token_ids = result.new_token_ids[:-1]
        if request.is_finished:
            request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, message
        else:
            self._end(request, RequestStatus.FINISHED_ERROR, message)

    def _release(self, request: Request) -> None:
        """Give back blocks and row, now or, called again then, when the last step that holds the request retires."""
        if request.row < 0:
            return
        if not request.num_in_flight:
            self._free(request)
        elif not request.is_lent:
            self.blocks.lend(request)
            self._num_lent += len(request.block_ids)

    def _free(self, request: Request) -> None:
        if request.is_lent:
            self._num_lent -= len(request.block_ids)
        self.blocks.give_back(request)
        self._finished.append((request.request_id, request.row))
        self._free_rows.append(request.row)
        request.row = -1

    # --- looking in -------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self.pool.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            drafts=self.drafting.stats(),
            transfers=self.transfers.stats(),
        )

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget every cached prefix. Running requests keep their own blocks.

        Args:
            reset_connector: what a KV connector holds was computed with other weights, and may not be loaded again.
        """
        self.pool.forget()
        in_flight = (request for _, batch in self._in_flight for request in batch)
        for request in chain(self.running, in_flight):
            # what it goes on to compute stands on what is forgotten, so nobody else may hit it
            request.num_published = sys.maxsize
        if reset_connector:
            for request in self.transfers.forget():
                self._waiting.push(request)

    def check_idle(self) -> None:
        """With nothing running, everything must be free again but what transfers use. Costs next to nothing, so it is
        always on.

        Raises:
            RuntimeError: blocks or rows were lost.
        """
        num_lost = self.config.num_blocks - self.pool.num_free - self.transfers.num_lent_blocks
        num_rows = self.config.max_num_seqs - len(self._free_rows)
        if num_lost or num_rows:
            raise RuntimeError(f"no request is left, but {num_lost} KV blocks and {num_rows} rows are not free")

    def check_integrity(self) -> None:
        """Compare blocks, rows and queues with each other.

        Raises:
            RuntimeError: what does not add up.
        """
        holders = {id(request): request for _, batch in self._in_flight for request in batch if request.row >= 0}
        holders |= {id(request): request for request in self.running}
        rows = sorted([request.row for request in holders.values()] + self._free_rows)
        if rows != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"rows are lost or held twice: {rows}")
        self.blocks.check_integrity([*holders.values(), *self.transfers.holders], self.transfers.lent)
        waiting, loading = sum(1 for _ in self._waiting), self.transfers.num_loading
        if waiting != len(self._waiting) or waiting + loading + len(self.running) != len(self.requests):
            raise RuntimeError(
                f"{len(self.requests)} requests have not ended, but {len(self.running)} run, {loading} load, {waiting} "
                f"wait, and {len(self._waiting)} are counted as waiting"
            )
