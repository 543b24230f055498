"""The scheduler: which requests compute how many tokens in the next step, and what became of the last one.

A running request keeps a row of the runner's state and a list of KV blocks. Steps may be queued before the results of
earlier ones are known (overlapped scheduling): a token that a step in flight will yield counts in ``num_tokens`` as a
placeholder, and its value is filled in by `Scheduler.update`. Blocks and rows go back only after the last step that
holds them has retired.

All of this is host time that stands in the way of the device, so the loops over running requests do one thing each
and touch nothing that did not change.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from fleetfoot.scheduler.block_hash import extend_chain, root_hash
from fleetfoot.scheduler.block_pool import BlockPool
from fleetfoot.scheduler.output import ModelRunnerOutput, NewRequest, SchedulerOutput
from fleetfoot.scheduler.request import Request, RequestStatus

RUNNING = RequestStatus.RUNNING


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler; sizes in tokens, requests and blocks."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    priority: bool = False
    """False: first come, first served, whatever the requests' priorities."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A moment of the scheduler; counters are since its start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up."""
    prefix_cache_hits: int
    """Prompt tokens found."""


@dataclass(slots=True)
class StepResult:
    """What one request got out of a step."""

    request: Request
    new_token_ids: list[int]
    index: int
    """Its place in the batch, to find its logprobs."""


class Scheduler:
    """First come, first served (or by priority), with paged KV, prefix caching, chunked prefill and preemption.

    Decodes go first, then prefills that are under way, then waiting requests, all within ``max_num_batched_tokens``.
    A waiting request is admitted when blocks for all its known tokens are free. When a decode finds no free block,
    the request at the end of the order is preempted: it gives everything back and will be computed again.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must hold a token of each of "
                f"max_num_seqs ({config.max_num_seqs}) requests"
            )
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in order of priority and arrival; the last one is preempted first
        self._waiting: list[Request] = []  # a heap; requests that ended while waiting are skipped when met
        self._num_waiting = 0
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished: list[tuple[str, int]] = []
        self._finished_req_ids: set[str] = set()
        self._step = 0
        self._arrivals = 0
        self._num_lent = 0  # blocks that the steps in flight will give back
        self._num_hoping = 0  # requests of this step that wait for them
        self._num_ended = 0  # requests of `running` that have ended in this update
        self._num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or it can never fit in the KV cache.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that has not ended")
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
        if not self.config.priority:
            request.priority = 0
        request.sequence_number = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request
        self._enqueue(request)

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
    def num_in_flight(self) -> int:
        """Steps queued and not yet updated."""
        return len(self._in_flight)

    # --- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Choose the next step's work; None if there is nothing that can be computed now."""
        decodes: list[Request] = []
        prefills: list[Request] = []  # running ones whose prompt is not computed to its end
        new_block_ids: list[tuple[int, int, list[int]]] = []
        self._num_hoping = 0
        num_preemptions = self._num_preemptions
        for request in self.running:  # preemption shortens it at the end only, which a list iterator allows
            computed = request.num_computed
            if request.num_tokens - computed > 1:
                prefills.append(request)
                continue
            if computed + 1 >= request.max_tokens_in_all:
                continue  # its last token is in flight, and is no input
            if computed == request.capacity and not self._grow(request, new_block_ids):
                continue
            request.num_computed = computed + 1
            request.num_tokens += 1
            request.num_in_flight += 1
            decodes.append(request)

        budget = self.config.max_num_batched_tokens - len(decodes)
        ending: list[Request] = []
        going_on: list[Request] = []
        counts: dict[int, int] = {}  # sequence number -> tokens, of prefills
        for request in prefills:
            if budget > 0:
                budget -= self._chunk(request, budget, ending, going_on, counts)
        new_requests = []
        if num_preemptions == self._num_preemptions:
            while budget > 0 and (admitted := self._admit(budget)):
                new_requests.append(self._describe(admitted))
                budget -= self._chunk(admitted, budget, ending, going_on, counts)

        batch = decodes + ending + going_on
        if not batch:
            return None
        num_scheduled = [1] * len(decodes)
        num_scheduled += [counts[request.sequence_number] for request in batch[len(decodes) :]]
        output = SchedulerOutput(
            step=self._step,
            rows=[request.row for request in batch],
            num_scheduled_tokens=num_scheduled,
            num_decodes=len(decodes),
            num_sampled=len(decodes) + len(ending),
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - budget,
            new_requests=new_requests,
            new_block_ids=new_block_ids,
            finished=self._finished,
            finished_req_ids=self._finished_req_ids,
        )
        self._finished, self._finished_req_ids = [], set()
        self._step += 1
        self._in_flight.append((output, batch))
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[StepResult]:
        """Take in the oldest step in flight: append tokens, end requests, give back what nobody holds any more."""
        in_flight, batch = self._in_flight.popleft()
        if in_flight is not output:
            raise RuntimeError(f"step {output.step} was updated before step {in_flight.step}, which is older")
        results: list[StepResult] = []
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
            self._fail(batch[index], message, results)
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

    # --- parts of a step --------------------------------------------------------------------------------------------

    def _chunk(
        self, request: Request, budget: int, ending: list[Request], going_on: list[Request], counts: dict[int, int]
    ) -> int:
        """Put the next chunk of a prefill into the step; its blocks are there since its admission."""
        missing = request.num_tokens - request.num_computed
        count = min(missing, budget)
        counts[request.sequence_number] = count
        request.num_computed += count
        request.num_in_flight += 1
        if count == missing:
            request.num_tokens += 1
            ending.append(request)
        else:
            going_on.append(request)
        self._publish(request)
        return count

    def _admit(self, budget: int) -> Request | None:
        """Let the first waiting request run, if there is one and it fits."""
        if not self._num_waiting or not self._free_rows:
            return None
        while self._waiting[0].is_finished:  # _num_waiting says that one follows that has not
            heappop(self._waiting)
        request = self._waiting[0]
        if request.num_in_flight:
            return None  # preempted a moment ago: its last token and its blocks are still on the device
        hits = self._find_prefix(request)
        block_size = self.config.block_size
        missing = request.num_tokens - len(hits) * block_size
        if not self.config.enable_chunked_prefill and budget < missing <= self.config.max_num_batched_tokens:
            return None  # what a preempted request must compute again may be more than a step: only that is split
        needed = -(-request.num_tokens // block_size) - len(hits)
        if needed > self.pool.num_free - self.pool.num_idle(hits):
            return None
        heappop(self._waiting)
        self._num_waiting -= 1
        self.pool.share(hits)
        request.block_ids = hits + self.pool.take(needed)
        request.capacity = len(request.block_ids) * block_size
        request.num_computed = len(hits) * block_size
        request.num_published = len(hits)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed
            self._prefix_queries += request.num_tokens
            self._prefix_hits += request.num_computed
        request.row = self._free_rows.pop()
        request.status = RUNNING
        insort(self.running, request)
        return request

    def _describe(self, request: Request) -> NewRequest:
        return NewRequest(
            request_id=request.request_id,
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed,
            block_ids=list(request.block_ids),
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
        )

    def _grow(self, request: Request, new_block_ids: list[tuple[int, int, list[int]]]) -> bool:
        """One more block for a decode, at another's cost if need be; False: not in this step, or preempted itself."""
        pool = self.pool
        while not pool.num_free:
            if self._num_hoping < self._num_lent:
                self._num_hoping += 1  # enough will come back when the steps in flight retire: nobody else must go
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        blocks = pool.take(1)
        new_block_ids.append((request.row, len(request.block_ids), blocks))
        request.block_ids += blocks
        request.capacity += self.config.block_size
        return True

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the request's beginning; at least one token is left to compute, for its logits."""
        if not self.config.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        usable = (request.num_tokens - 1) // self.config.block_size
        self._hash_blocks(request, usable)
        return self.pool.lookup(request.block_hashes[:usable])

    def _publish(self, request: Request) -> None:
        """Let other requests hit the blocks that this one's queued steps have filled.

        Prompts are published chunk by chunk; generated tokens when the request leaves, all at once: nobody can ask for
        them while they are being made, short of a request that is the same, and hashing them one by one costs the step.
        """
        if not self.config.enable_prefix_caching:
            return
        full = min(request.num_computed, len(request.token_ids)) // self.config.block_size
        if full > request.num_published:
            self._hash_blocks(request, full)
            for block in range(request.num_published, full):
                self.pool.publish(request.block_ids[block], request.block_hashes[block])
            request.num_published = full

    def _hash_blocks(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self.config.block_size
        if count > len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes += extend_chain(parent, request.token_ids, len(hashes) * size, count * size, size)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        heappush(self._waiting, request)
        self._num_waiting += 1

    def _preempt(self, request: Request) -> None:
        """Everything back; it waits, before all that came later, to be computed again."""
        self._num_preemptions += 1
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._publish(request)
        self._release(request)
        self._enqueue(request)

    def _end(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        if request.status is RUNNING:
            self._num_ended += 1
        else:
            self._num_waiting -= 1  # it stays in the heap until it is met
        request.status = status
        request.stop_reason = stop_reason
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        if status != RequestStatus.FINISHED_ERROR:
            self._publish(request)
        self._release(request)

    def _fail(self, request: Request, message: str, results: list[StepResult]) -> None:
        """The step's token for this request means nothing: take it back and end the request."""
        result = next((result for result in results if result.request is request), None)
        if result is None:
            return  # it had ended before
        if result.new_token_ids:
            del request.token_ids[-len(result.new_token_ids) :]
            result.new_token_ids = []
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
            request.is_lent = True
            self.pool.lend(request.block_ids)
            self._num_lent += len(request.block_ids)

    def _free(self, request: Request) -> None:
        if request.is_lent:
            request.is_lent = False
            self._num_lent -= len(request.block_ids)
        self.pool.free(request.block_ids)
        self._finished.append((request.request_id, request.row))
        self._free_rows.append(request.row)
        request.row = -1
        request.block_ids = []
        request.capacity = request.num_computed = request.num_published = 0
        request.num_tokens = len(request.token_ids)

    # --- looking in -------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=self._num_waiting,
            kv_cache_usage=self.pool.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: KV of other weights, say. Running requests keep their own blocks."""
        self.pool.forget()
        for request in self.running:
            # what it goes on to compute stands on what is forgotten, so nobody else may hit it
            request.num_published = sys.maxsize

    def check_idle(self) -> None:
        """With nothing running, everything must be free again. Costs next to nothing, so it is always on.

        Raises:
            RuntimeError: blocks or rows were lost.
        """
        if self.pool.num_free != self.config.num_blocks or len(self._free_rows) != self.config.max_num_seqs:
            raise RuntimeError(
                f"no request is left, but {self.config.num_blocks - self.pool.num_free} KV blocks and "
                f"{self.config.max_num_seqs - len(self._free_rows)} rows are not free"
            )

    def check_integrity(self) -> None:
        """Compare blocks, rows and queues with each other.

        Raises:
            RuntimeError: what does not add up.
        """
        holders = {id(request): request for _, batch in self._in_flight for request in batch if request.row >= 0}
        holders |= {id(request): request for request in self.running}
        self.pool.check_integrity(request.block_ids for request in holders.values())
        rows = sorted([request.row for request in holders.values()] + self._free_rows)
        if rows != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"rows are lost or held twice: {rows}")
        waiting = sum(not request.is_finished for request in self._waiting)
        if waiting != self._num_waiting or waiting + len(self.running) != len(self.requests):
            raise RuntimeError(
                f"{len(self.requests)} requests have not ended, but {len(self.running)} run, {waiting} wait, "
                f"and {self._num_waiting} are counted as waiting"
            )
