"""The scheduler: which requests compute how many tokens in the next step, and what the last step changed.

A running request has a row of the runner's state and a list of KV blocks in each group of layers. Steps may be queued
before the results of earlier steps are known (overlapped scheduling): the next step computes the token that a step in
flight will sample, and its value reaches the host in `Scheduler.update`. Drafts count as accepted until then. Blocks
and rows are freed only after the last step that uses them has retired.

The device may wait for this code, so loops over running requests do one thing each and skip what did not change.

This file is long because `schedule`, `update` and `finish` change the same queues, rows and counts. Parts with state of
their own have files beside it: blocks, queues, transfers and drafts.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import chain, count

from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_events import NO_KV_EVENTS, KVEvents
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import FEW_DECODES, EngineOutput, ModelRunnerOutput, NewRequest, SchedulerOutput
from fleetfoot.scheduler.block_pool import BlockPool, BlockPools
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.drafting import DraftController, Drafting
from fleetfoot.scheduler.kv_blocks import RequestBlocks
from fleetfoot.scheduler.pacing import PromptPace
from fleetfoot.scheduler.request_queues import WaitingQueue, prefill_share, record_microbatch, select_microbatch
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.scheduler.transfers import Transfers

RUNNING = RequestStatus.RUNNING
_START_COST = 8
"""Tokens that take as long as the start and the end of a request, about, where steps have a set time."""
_SHORT = 4
"""A prompt of at most 1 / this of a step's tokens does not wait for the end of a long one."""


@dataclass(slots=True)
class _Batch:
    """A step that is being scheduled."""

    budget: int
    """Tokens that may still join the step."""
    start_cost: int = 0
    """Tokens that count for the start of a request."""
    decodes: list[Request] = field(default_factory=list)
    last_chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Prefills that reach the end of their known tokens in this step, and sample; with their tokens in this step."""
    other_chunks: list[tuple[Request, int]] = field(default_factory=list)
    new_block_ids: list[tuple[int, int, list[int]]] = field(default_factory=list)
    new_group_block_ids: list[tuple[int, int, int, list[int]]] = field(default_factory=list)


class Scheduler:
    """Continuous batching with paged KV, prefix caching, chunked prefill and preemption.

    Decodes go first, then prefills in progress, then waiting requests (first come, first served, or by priority), all
    within ``max_num_batched_tokens``; in a pipeline, prompts within `prefill_share` too, and those of several clients
    within the `PromptPace`. A waiting request is admitted
    when blocks for all its known tokens are free. When a decode finds no free block, the last request in the order is
    preempted: it frees all its blocks and is computed again later. Of a group with a window, blocks are allocated chunk
    by chunk, and freed when the steps that read them have retired; a chunk is as long as there is room.

    ``connector``: moves KV in and out of the engine; None: there is none. ``controller``: decides which steps propose
    drafts; None: all of them, if ``config.num_drafts`` is above 0. ``events``: gets those of the prefix cache.
    ``numbers``: of requests in their order, shared by the schedulers of an engine's ranks; None: it has one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        connector: SchedulerConnector | None = None,
        controller: DraftController | None = None,
        weights: str = "",
        events: KVEvents = NO_KV_EVENTS,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.config = config
        self._weights = weights
        self.events = events
        self.drafting = Drafting(config.num_drafts, controller or DraftController(config.num_drafts))
        self._waiting = WaitingQueue()
        self.pace = PromptPace(config.prompt_step_s, config.max_num_batched_tokens)
        self._step = 0
        self._numbers = count() if numbers is None else numbers
        self._num_preemptions = self._prefix_queries = self._prefix_hits = 0
        self._prefix_lost = 0
        self._reset(connector or NoSchedulerConnector())

    def _reset(self, connector: SchedulerConnector) -> None:
        """Without requests: every block and every row is free."""
        config = self.config
        sizes = config.num_blocks, config.block_size, config.groups
        self.pools = BlockPools(*sizes, config.enable_prefix_caching, self.events)
        self.events.cleared()
        self.blocks = RequestBlocks(config, self.pools, connector)
        self.blocks.weights = self._weights
        self.transfers = Transfers(connector, self.blocks, fail_on_error=config.kv_load_failure_policy == "fail")
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in order of priority and arrival; the last one is preempted first
        self._waiting.clear()
        self._microbatch = self.running  # requests of `running` that may join the step that is being scheduled
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[tuple[str, int]] = []  # since the last step, for the runner
        self._finished_req_ids: set[str] = set()  # since the last step, for the KV connector
        self._newest_updated = -1
        self._num_structured = 0  # of `requests`, those under a grammar
        self._is_scheduling = False  # stays set if `schedule` raises
        self._updating: list[Request] = []  # stays set if `update` raises
        self._begun: dict[int, NewRequest] = {}  # by row: admitted requests that the runner does not know yet
        self._num_held = 0  # blocks that the steps in flight will free
        self._num_held_reserved = 0  # of these, blocks that requests of the current step wait for
        self._num_ended = 0  # requests of `running` that have ended in the current update
        self._lacks_room = False  # whether the last step lacked a row, or blocks, for the first request that waits
        self._leaving: Request | None = None  # the last request that made way for another flow

    def change_config(self, config: SchedulerConfig) -> None:
        """Schedule the next steps within other limits of a step."""
        self.config = config
        self.pace = PromptPace(config.prompt_step_s, config.max_num_batched_tokens)

    def close_events(self) -> None:
        """Send the last events of the prefix cache: the engine ends."""
        self.events.close()

    @property
    def ranks(self) -> tuple[Scheduler, ...]:
        """As of `fleetfoot.scheduler.ranks.SchedulerOfRanks`."""
        return (self,)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the first group of layers."""
        return self.pools.first

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its id is in use, it can never fit in the KV cache, or the KV connector
        refuses its kv_transfer_params."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that has not ended")
        if self.transfers.uses(request.request_id):
            raise ValueError(
                f"request id {request.request_id!r} is in use: KV of a request that had it is still being transferred"
            )
        self.config.check_fits(request)
        self.transfers.connector.check_request(request)  # last: the connector keeps state of accepted requests
        if not self.config.priority:
            request.priority = 0
        request.sequence_number = next(self._numbers)
        self._num_structured += request.grammar is not None
        self.requests[request.request_id] = request
        self._waiting.push(request)

    def restart(
        self, connector: SchedulerConnector, num_blocks: int, requests: Iterable[Request]
    ) -> list[tuple[Request, str]]:
        """Begin again with workers that have just started. ``requests``: those that have not ended. They wait, in their
        order, and keep their tokens; the prefix cache is empty, and held blocks are free. Statistics continue.

        Returns the requests that have ended because the cache or the connector refuses them, each with the reason.
        """
        self.config = replace(self.config, num_blocks=num_blocks)
        counts = self.transfers.counts
        connector.inherit(self.transfers.connector)
        self._reset(connector)
        self.transfers.counts = counts
        self.drafting.num_proposed = 0
        refused = []
        for request in requests:
            has_begun = request.status is not RequestStatus.WAITING
            request.restart()
            try:
                self.config.check_fits(request)
                if request.kv_transfer_params is None or not has_begun:  # else its KV may not be there any more
                    connector.check_request(request)
            except ValueError as error:
                request.status = RequestStatus.FINISHED_ERROR
                refused.append((request, str(error)))
                continue
            self._num_structured += request.grammar is not None
            self.requests[request.request_id] = request
            self._waiting.push(request)
        return refused

    def admit_only(self, request_ids: Set[str] | None) -> None:
        """Until the next call, begin no other waiting requests than these; None: any."""
        self._waiting.select(request_ids)

    @property
    def involved(self) -> set[Request]:
        """Requests that may have caused an error: those of the steps in flight, of an update or a schedule that has
        raised, and of transfers."""
        found = {*self._updating, *self.transfers.owners, *(r for _, batch in self._in_flight for r in batch)}
        if self._is_scheduling:
            found.update(self.running)
            if (first := self._waiting.first) is not None:
                found.add(first)
        return found

    # --- schedule: decodes, prefills in progress, waiting requests --------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Schedule the next step; None if there is nothing to do now.

        The step is idle if nothing can be computed and nothing is in flight, but the KV connector has work.
        """
        batch, self._is_scheduling = _Batch(self.config.max_num_batched_tokens), True
        if self._lacks_room:
            self._lacks_room = False
            self._make_way()
        num_preemptions = self._num_preemptions
        self._microbatch, num_drafts = self.running, self.drafting.num_proposed
        if self.config.num_stages > 1:
            self._microbatch, num_drafts = select_microbatch(self.running, self.config.num_stages, self._step)
        prefills = self._schedule_decodes(batch, 1 + num_drafts)
        if self.config.num_stages > 1 and self.config.enable_chunked_prefill:
            share = prefill_share(prefills, self._waiting, len(self._free_rows), self.config.num_stages)
            batch.budget = min(batch.budget, share)
        kept, can_admit = self._pace(batch, prefills), num_preemptions == self._num_preemptions
        rest, batch.budget = batch.budget - kept, kept
        while can_admit and self._is_short(batch.budget) and self._begin_next(batch):
            pass
        batch.budget += rest
        for request in prefills:
            if batch.budget > 0:
                self._schedule_chunk(batch, request)
        while can_admit and batch.budget > 0 and self._begin_next(batch):
            pass

        if not (batch.decodes or batch.last_chunks or batch.other_chunks):
            if (prefills or self._begun) and not self._in_flight and not self.transfers.make_room(1):
                # there is no room for the next chunk of a prefill; alone it has room where no prefix keeps a slab
                if len(self.running) == 1:
                    self.pools.clear_cache()
                self._preempt_last()
            if not self._in_flight and num_preemptions != self._num_preemptions:
                return self.schedule()  # every candidate was preempted, which made room for other requests
            if self._in_flight or not self.has_idle_work:
                self._is_scheduling = False
                return None
        return self._make_output(batch, num_drafts)

    def _schedule_decodes(self, batch: _Batch, width: int) -> list[Request]:
        """Add the decodes of the microbatch, ``width`` tokens each. Returns its prefills in progress."""
        decodes = batch.decodes
        prefills: list[Request] = []
        reach = width + self.config.num_lookahead
        self._num_held_reserved = 0
        for request in self._microbatch:  # preemption removes its last elements only, which a list iterator allows
            computed = request.num_computed
            if computed < request.num_prefill:
                prefills.append(request)
                continue
            if computed + 1 >= request.max_total_tokens and request.reaches_limit_in_flight:
                continue  # its last token is in flight, and is not an input
            if computed + reach > request.capacity and not self._append_blocks(batch, request, computed + reach):
                continue
            request.num_computed = computed + width
            request.num_in_flight += 1
            decodes.append(request)
        batch.budget -= len(decodes) * width
        return prefills

    def _pace(self, batch: _Batch, prefills: list[Request]) -> int:
        """Limit the prompts in a step with requests of clients. Returns how many tokens prefills in progress leave to
        short prompts that wait."""
        first = prefills[0] if prefills else self._waiting.first
        if len(self.requests) == 1 or first is None or not first.flow or self.config.prompt_step_s is None:
            return 0
        batch.budget, batch.start_cost = min(batch.budget, self.pace.limit), _START_COST
        part = batch.budget // _SHORT
        return part if prefills and self._is_short(part) else 0

    def _is_short(self, most: int) -> bool:
        """Whether the next request that waits has at most so many tokens."""
        return (first := self._waiting.first) is not None and first.num_tokens <= most

    def _begin_next(self, batch: _Batch) -> bool:
        """Start the next request with its first chunk; False if none can start, or if it computes nothing yet."""
        if (admitted := self._admit(batch)) is None:
            return False
        budget = batch.budget
        self._begun[admitted.row] = NewRequest.of(admitted)
        self._schedule_chunk(batch, admitted)
        if batch.budget == budget:
            return False
        batch.budget -= batch.start_cost
        return True

    def _append_blocks(self, batch: _Batch, request: Request, num_positions: int) -> bool:
        """Allocate blocks for a decode, preempting others if necessary; False if it cannot join this step."""
        # positions from the last token on are never an input
        num_positions = min(num_positions, request.max_total_tokens - 1)
        if num_positions <= request.capacity:
            return True
        if self.blocks.frees_windows:
            self.blocks.free_windows(request)
        needs = self.blocks.needs(request, num_positions)
        count = sum(needs)
        while self.pools.num_missing(needs) > 0:
            if self.blocks.drop_states(self.running):
                continue
            if self.transfers.make_room(self._num_held_reserved + count - self._num_held):
                self._num_held_reserved += count  # steps in flight and evictions will free enough: no preemption
                return False
            if self.blocks.frees_windows and self.running[-1] is request and request.num_in_flight:
                return False  # it frees blocks itself
            victim = self._preempt_last()
            if self._microbatch and self._microbatch[-1] is victim:
                self._microbatch.pop()
            if victim is request:
                return False
        self._take_blocks(batch, request, needs)
        if self.blocks.states is not None:
            batch.new_group_block_ids += self.blocks.states.extend(request, num_positions)
            self.blocks.limit_capacity(request)
        return True

    def _take_blocks(self, batch: _Batch, request: Request, needs: list[int]) -> None:
        starts = [len(request.block_ids), *map(len, request.group_block_ids)]
        first, *others = self.blocks.append(request, needs)
        if first:
            batch.new_block_ids.append((request.row, starts[0], first))
        for group, block_ids in enumerate(others[: len(starts) - 1], start=1):
            if block_ids:
                batch.new_group_block_ids.append((group, request.row, starts[group], block_ids))

    def _preempt_last(self) -> Request:
        """The last running request frees everything, and waits ahead of all later ones to be computed again."""
        victim = self.running.pop()
        self._num_preemptions += 1
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.blocks.publish(victim, by_this_step=False)
        self._release(victim)
        self._waiting.push(victim)
        return victim

    def _make_way(self) -> None:
        """Preempt the youngest request of the flow with the most of them, for one of a flow without any: a client with
        many long sequences would have all rows, or all blocks, until these end. The one that makes way comes next."""
        leaving = self._leaving
        if leaving is not None and leaving.row >= 0 and leaving.status is RequestStatus.PREEMPTED:
            return  # steps in flight use its row and its blocks
        first = self._waiting.first
        if first is None or not self.running or self._waiting.flows <= {self.running[0].flow, ""}:
            return
        flows = Counter(one.flow for one in self.running if one.priority >= first.priority)
        needy = self._waiting.first_beside(flows.keys() | {""})
        flow, count = (flows.most_common(1) or [("", 0)])[0]
        if needy is None or count < 2:
            return
        for victim in reversed(self.running):
            if victim.flow == flow and not victim.reaches_limit_in_flight:
                self._waiting.advance(needy)
                self.running.remove(victim)
                self.running.append(victim)
                victim.turn = needy.turn + 1
                self._leaving = self._preempt_last()
                return

    def _schedule_chunk(self, batch: _Batch, request: Request) -> None:
        """Add the next chunk of a prefill. Its blocks were allocated when it was admitted, but for those of windows,
        which may allow a shorter chunk only, or none."""
        missing, begin, states = request.num_prefill - request.num_computed, request.num_computed, self.blocks.states
        count = min(missing, batch.budget)
        if states is not None and self.config.enable_chunked_prefill:
            chunk = states.chunk(request, count)
            if not chunk and (batch.last_chunks or batch.other_chunks):
                return
            count = chunk or count
        if request.num_computed + count > request.capacity:
            count = self._extend_windows(batch, request, count)
            if not count:
                return
        batch.budget -= count
        (batch.last_chunks if count == missing else batch.other_chunks).append((request, count))
        request.num_computed += count
        request.num_in_flight += 1
        if states is not None:  # first: the states that it keeps are published with the blocks
            self.blocks.hash(request, request.num_computed // self.config.block_size)
            batch.new_group_block_ids += states.end_chunk(request, begin)
            if count == missing:
                self.blocks.limit_capacity(request)
        self.blocks.publish(request, by_this_step=True)

    def _extend_windows(self, batch: _Batch, request: Request, count: int) -> int:
        """Allocate blocks for the next ``count`` tokens of a prefill. Returns how many tokens there is room for."""
        self.blocks.free_windows(request)
        computed = request.num_computed
        while computed + count > request.capacity:
            needs = self.blocks.needs(request, computed + count)
            if self.pools.num_missing(needs) <= 0:
                self._take_blocks(batch, request, needs)
                break
            if self.blocks.drop_states(self.running):
                continue
            count = max(count // 2, request.capacity - computed)
            if not count:
                self.transfers.make_room(sum(needs) - self._num_held)
                break
        return count

    def _admit(self, batch: _Batch) -> Request | None:
        """Start the next request, if it fits: one with loaded KV, else the first that waits.

        A request with KV that can be loaded starts to load instead, and the one after it is tried.
        """
        transfers, budget = self.transfers, batch.budget
        if (request := transfers.ready) is not None:
            if self._fits_step(request, request.num_computed, budget):
                return self._run(transfers.pop_ready())
            return None
        while (request := self._waiting.first) is not None and len(self._free_rows) > transfers.num_loading:
            if request.num_in_flight:
                return None  # just preempted: its last token and its blocks are still on the device
            if (hits := self.blocks.find_cached_prefix(request)) is None:
                return None
            num_local = len(hits[0]) * self.config.block_size
            num_matched = transfers.num_matched(request, num_local)
            if num_matched is None or (not num_matched and not self._fits_step(request, num_local, budget)):
                return None
            num_queries = 0 if num_matched else min(budget, request.num_tokens - num_local)
            while num_missing := self.blocks.allocate(request, hits, num_matched, num_queries):
                if self.blocks.drop_states(self.running):
                    continue
                is_alone = not (self.running or self._in_flight or transfers.num_loading)
                if not (self.blocks.frees_windows and is_alone):
                    transfers.make_room(num_missing - self._num_held)
                    self._lacks_room = True
                    return None
                if num_matched:  # it is computed instead, in less room
                    if transfers.make_room(num_missing - self._num_held):
                        return None
                    num_matched, num_queries = 0, min(budget, request.num_tokens - num_local)
                elif num_queries > 1:  # no other request will free blocks: a shorter chunk may fit
                    num_queries //= 2
                elif any(hits):  # or all tokens computed again: cached blocks may keep more slabs than new ones
                    hits, num_local = [[] for _ in hits], 0
                    num_queries = min(budget, request.num_tokens)
                else:
                    transfers.make_room(num_missing - self._num_held)
                    return None
            self._waiting.pop()
            request.num_loaded = 0
            if not num_matched:
                return self._run(request)
            transfers.start_load(request, num_matched)
        self._lacks_room = request is not None
        return None

    def _fits_step(self, request: Request, num_computed: int, budget: int) -> bool:
        """Whether a request may start now. Without chunked prefill its tokens must fit in the rest of the step.

        A preempted request may have more tokens than any step holds; then they are split regardless.
        """
        missing = request.num_tokens - num_computed
        return self.config.enable_chunked_prefill or not budget < missing <= self.config.max_num_batched_tokens

    def _run(self, request: Request) -> Request:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed
            self._prefix_queries += request.num_tokens
            self._prefix_hits += request.num_computed - request.num_loaded
            self._prefix_lost += request.num_lost
        request.row = self._free_rows.pop()
        request.status = RUNNING
        request.num_prefill = request.num_tokens
        request.num_retired = request.num_computed
        request.num_proposed = 0
        if not self.running or self.running[-1] < request:  # nearly always
            self.running.append(request)
        else:
            insort(self.running, request)
        return request

    def _make_output(self, batch: _Batch, num_drafts: int) -> SchedulerOutput:
        num_decodes, chunks = len(batch.decodes), batch.last_chunks + batch.other_chunks
        num_sampled = num_decodes + len(batch.last_chunks)
        requests = batch.decodes + [request for request, _ in chunks]
        has_context = bool(chunks) or num_decodes <= FEW_DECODES
        num_scheduled_tokens = [1 + num_drafts] * num_decodes + [count for _, count in chunks]
        output = SchedulerOutput(
            step=self._step,
            rows=[request.row for request in requests],
            num_scheduled_tokens=num_scheduled_tokens,
            num_decodes=num_decodes,
            num_sampled=num_sampled,
            total_num_scheduled_tokens=sum(num_scheduled_tokens),
            new_requests=[*self._begun.values()] if requests else [],
            new_block_ids=batch.new_block_ids,
            new_group_block_ids=batch.new_group_block_ids,
            changed_slabs=self.pools.take_changed(),
            num_drafts=num_drafts if num_decodes else 0,
            num_to_propose=self.drafting.choose(num_sampled),
            longest_decode=max((each.num_computed for each in batch.decodes), default=0) if has_context else 0,
        )
        if requests:
            self._begun.clear()
        if self._num_structured:
            sampling = enumerate(requests[:num_sampled])
            output.structured = [index for index, request in sampling if request.grammar is not None]
        if self.blocks.states is not None:
            output.snapshots = self.blocks.states.publish_pending()
        if self.config.num_stages > 1:
            record_microbatch(output, requests, self._newest_updated)
        self._attach_finished(output)
        self.events.flush()
        self._step += 1
        self._in_flight.append((output, requests))
        self._is_scheduling = False
        return output

    def _attach_finished(self, output: SchedulerOutput) -> None:
        """Add the requests that have left, for the runner and the KV connector."""
        output.finished, self._freed_rows = self._freed_rows, []
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        output.kv_connector_metadata = self.transfers.connector.build_connector_meta(output)

    @property
    def newest_batch(self) -> list[Request]:
        """The requests of the step that was scheduled last, in batch order."""
        return self._in_flight[-1][1]

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Process the result of the oldest step in flight: append tokens, end requests, free blocks and rows."""
        in_flight, batch = self._in_flight.popleft()
        if in_flight is not output:
            raise RuntimeError(f"step {output.step} was updated before step {in_flight.step}, which is older")
        self._newest_updated, self._updating = output.step, batch
        self.drafting.update(output, batch, result)
        results: list[EngineOutput] = []
        if result.kv_connector_output is not None:  # first: it may concern requests that end in this step
            requeued, failed = self.transfers.update(result.kv_connector_output)
            self._waiting.push(*requeued)
            for request, reason in failed:
                self._end(request, RequestStatus.FINISHED_ERROR, reason)
                results.append(EngineOutput.last(request))
        has_more = bool(result.logprobs or result.prompt_logprobs or result.pooled)
        for index in result.invalid:  # the last token: no request may end with it
            result.sampled_token_ids[index] = result.sampled_token_ids[index][:-1]
        sampling = batch[: output.num_sampled]
        for index, (request, new_token_ids) in enumerate(zip(sampling, result.sampled_token_ids, strict=True)):
            request.num_in_flight -= 1
            if request.status is not RUNNING:
                self._update_stopped(request, new_token_ids, index, result, results)
                continue
            if len(new_token_ids) == 1 and new_token_ids[0] not in request.stop_token_ids:
                output_token_ids = request.output_token_ids
                output_token_ids.append(new_token_ids[0])
                if len(output_token_ids) >= request.max_tokens:
                    self._end(request, RequestStatus.FINISHED_LENGTH, None)
            else:
                new_token_ids = self._append_tokens(request, new_token_ids)
            results.append(item := EngineOutput(request.sequence_number, new_token_ids))
            if request.has_news or has_more:
                self._complete(item, request, index, result)
        for index, request in enumerate(batch[output.num_sampled :], start=output.num_sampled):
            request.num_in_flight -= 1
            if request.status is not RUNNING:
                self._update_stopped(request, [], index, result, results)
            elif request.has_prompt_logprobs:
                results.append(item := EngineOutput(request.sequence_number, []))
                self._complete(item, request, index, result)
        for index, message in result.invalid.items():
            if not (request := batch[index]).is_finished:
                self._end(request, RequestStatus.FINISHED_ERROR, message)
                number = request.sequence_number
                found = next((item for item in results if item.number == number), None)
                if found is None:  # it is preempted
                    results.append(EngineOutput.last(request))
                else:
                    found.add_news(request)
        if self.blocks.frees_windows:
            chunks = zip(batch[output.num_decodes :], output.num_scheduled_tokens[output.num_decodes :], strict=True)
            for request, count in chunks:
                if request.status is RUNNING:
                    request.num_retired += count
                    self.blocks.free_windows(request)
        if self._num_ended:
            self._num_ended = 0
            self.running = [request for request in self.running if request.status is RUNNING]
        self._updating = []
        self.events.flush()
        return results

    def _append_tokens(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """Append tokens up to the first that ends the request. Returns the appended tokens."""
        output_token_ids, params = request.output_token_ids, request.params
        for position, token in enumerate(new_token_ids, start=1):
            output_token_ids.append(token)
            if token in request.stop_token_ids and len(output_token_ids) >= request.min_tokens:
                reason = token if token in (params.stop_token_ids or ()) else None
                self._end(request, RequestStatus.FINISHED_STOPPED, reason)
            elif len(output_token_ids) >= request.max_tokens:
                self._end(request, RequestStatus.FINISHED_LENGTH, None)
            else:
                continue
            return new_token_ids[:position]
        return new_token_ids

    def _complete(self, item: EngineOutput, request: Request, index: int, result: ModelRunnerOutput) -> None:
        """Add what an output has besides its tokens. ``index``: of the request in the batch."""
        item.logprobs, item.prompt_logprobs = result.logprobs.get(index), result.prompt_logprobs.get(index)
        pooled = result.pooled.get(index)
        if pooled is not None and request.status is RUNNING:
            self._end(request, RequestStatus.FINISHED_STOPPED, None)
        if request.has_news:
            item.add_news(request, pooled)

    def _update_stopped(
        self,
        request: Request,
        new_token_ids: list[int],
        index: int,
        result: ModelRunnerOutput,
        results: list[EngineOutput],
    ) -> None:
        """Update a request that stopped running while this step was in flight.

        The tokens of an ended request are discarded; those of a preempted request count.
        """
        if request.status is RequestStatus.PREEMPTED and (new_token_ids or request.has_prompt_logprobs):
            results.append(item := EngineOutput(request.sequence_number, self._append_tokens(request, new_token_ids)))
            self._complete(item, request, index, result)
        self._release(request)

    # --- finish -----------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> Request | None:
        """End a request from outside: aborted, or stopped by its text. Its tokens of steps in flight are dropped. None
        if it has already ended."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RUNNING:
            self.running.remove(request)
        self._end(request, status, stop_reason)
        return request

    def final_output(self) -> SchedulerOutput | None:
        """An empty last step, without an `update`: it aborts the requests that have not ended, and gives the KV
        connector the last finished ids and its pending work. None if the connector needs no such step."""
        for request_id in list(self.requests):
            self.finish(request_id, RequestStatus.FINISHED_ABORTED)
        if not self.transfers.connector.has_pending and not self.has_unreported_ids:
            return None
        output = SchedulerOutput(-1, [], [], 0, 0, 0)
        self._attach_finished(output)
        return output

    def _end(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        was, request.status, request.stop_reason, request.has_news = request.status, status, stop_reason, True
        if was is RUNNING:
            self._num_ended += 1
        elif was is not RequestStatus.LOADING:
            self._waiting.discard_finished()
        del self.requests[request.request_id]
        self._num_structured -= request.grammar is not None
        self._finished_req_ids.add(request.request_id)
        if status != RequestStatus.FINISHED_ERROR:
            self.blocks.publish(request, by_this_step=False)
        self.transfers.request_finished(request)
        if was is RequestStatus.LOADING:
            self.transfers.abort(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Free the request's blocks and row; if steps in flight use them, hold the blocks until the last one retires
        and calls this again."""
        if request.row >= 0 and not request.num_in_flight:
            if request.is_held:
                self._num_held -= self.blocks.num_owned(request)
            self.blocks.free(request)
            if self._begun.pop(request.row, None) is None:
                self._freed_rows.append((request.request_id, request.row))
            self._free_rows.append(request.row)
            request.row = -1
        elif request.row >= 0 and not request.is_held:
            self._num_held += self.blocks.num_owned(request)
            self.blocks.hold(request)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def has_idle_work(self) -> bool:
        """Whether the KV connector needs a step without a forward pass: for a transfer, or for unreported ids."""
        return self.transfers.has_pending or self.has_unreported_ids

    @property
    def has_unreported_ids(self) -> bool:
        """Whether requests have ended since the last step was scheduled, and a KV connector must get their ids."""
        return bool(self._finished_req_ids) and self.transfers.connector.is_active

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self.pools.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            prefix_cache_lost=self._prefix_lost,
            drafts=self.drafting.stats(),
            transfers=self.transfers.stats(),
        )

    def change_weights(self, identity: str, *, is_shared: bool = False) -> None:
        """Use no KV of earlier weights for other requests; no step is in flight. Running requests keep theirs, and
        their blocks are never cached.

        ``identity``: of the new weights, not empty; ``is_shared``: other engines have the same under this identity.
        """
        self.pools.clear_cache()
        self.blocks.weights = self._weights = identity
        for request in self.requests.values():
            request.block_hashes.clear()
            if request.block_ids:  # of a load in progress, too
                request.num_published = sys.maxsize
        self._waiting.push(*self.transfers.invalidate(identity if is_shared else ""))
        self.events.flush()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> None:
        """Drop every cached prefix, and with ``reset_connector`` what the KV connector holds, because the weights have
        changed. Running requests keep their blocks, or with ``reset_running_requests`` are preempted."""
        self.pools.clear_cache()
        for request in chain(self.running, *(batch for _, batch in self._in_flight)):
            # blocks that it fills from now on depend on dropped ones, and must not be published
            request.num_published = sys.maxsize
        if reset_running_requests:
            self.preempt_running()
        if reset_connector:
            self._waiting.push(*self.transfers.invalidate())
        self.events.flush()

    # --- holding ----------------------------------------------------------------------------------------------------

    def hold_new(self) -> None:
        """Start no request that has never run, until `release_new`. Those that have, or load KV, run to their end."""
        self._waiting.hold_new()

    def release_new(self) -> None:
        """Undo `hold_new`; does nothing otherwise."""
        self._waiting.release_new()

    @property
    def has_started(self) -> bool:
        """After `hold_new`: whether unfinished requests have run before, or load KV."""
        return len(self.requests) > self._waiting.num_held

    def schedule_transfers(self) -> SchedulerOutput | None:
        """An idle step for the KV connector, whatever else could be computed; None if it needs none."""
        return self.schedule_idle() if self.has_idle_work else None

    def schedule_idle(self) -> SchedulerOutput:
        """An idle step, in which a KV connector goes on."""
        return self._make_output(_Batch(self.config.max_num_batched_tokens), 0)

    def preempt_running(self) -> None:
        """Preempt every running request, so that none has blocks or a row once the steps in flight have retired."""
        while self.running:
            self._preempt_last()

    def restart_loads(self) -> None:
        """Let requests with KV from the connector wait again; blocks of loads in progress stay until these end."""
        self._waiting.push(*self.transfers.restart_loads())

    def check_idle(self) -> None:
        """Check whenever no request is left, cheaply, that everything but the blocks of transfers is free. Raises
        RuntimeError if blocks or rows were lost."""
        num_lost = self.pools.num_used - self.transfers.num_held_blocks
        num_rows = self.config.max_num_seqs - len(self._free_rows)
        if num_lost or num_rows:
            raise RuntimeError(f"no request is left, but {num_lost} KV blocks and {num_rows} rows are not free")

    def check_integrity(self) -> None:
        """Compare blocks, rows and queues with each other, for tests. Raises RuntimeError if they do not match."""
        owners = {id(request): request for _, batch in self._in_flight for request in batch if request.row >= 0}
        owners |= {id(request): request for request in self.running}
        rows = sorted([request.row for request in owners.values()] + self._free_rows)
        if rows != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"rows are lost or used twice: {rows}")
        with_blocks = [*owners.values(), *self.transfers.owners]
        owned = self.blocks.owned
        holds = [owned(request) for request in with_blocks if request.is_held] + self.transfers.held
        self.pools.check_integrity([*(owned(r) for r in with_blocks if not r.is_held), *holds], holds)
        waiting, loading = sum(1 for _ in self._waiting), self.transfers.num_loading
        if waiting != len(self._waiting) or waiting + loading + len(self.running) != len(self.requests):
            raise RuntimeError(
                f"{len(self.requests)} requests have not ended, but {len(self.running)} run, {loading} load, {waiting} "
                f"wait, and {len(self._waiting)} are counted as waiting"
            )
