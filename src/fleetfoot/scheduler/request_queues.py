"""Which requests come next: the waiting queue, and the microbatches of a pipeline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Set
from heapq import heapify, heappop, heappush
from itertools import chain, islice

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput

_LEAST_PREFILL, _PREFILL_IN_FLIGHT = 512, 4096
"""Size of a step of a pipeline, in tokens of prompts: up to how many a step is not split, and the most of all steps in
flight. Shorter steps are bound by the host that launches them. On H200s, two stages of Llama-3.1-8B made 1.58 times one
GPU's tokens/s (768 requests, benchmarks/RESULTS.md) with steps of up to 8192 tokens, 1.61 with 512 or 1024 as the
least, and 1.49 to 1.54 with 256."""


_FLOWS = 64
"""So many flows are remembered at least, besides twice as many as requests wait."""


class WaitingQueue:
    """A heap of requests, ordered by priority and turn.

    Turns are those of self-clocked fair queueing (Golestani 1994), in tokens: the flows of a priority get equal shares,
    and within a flow requests are in the order of arrival. A request keeps its turn, so that one that was preempted
    comes before all that have not run.

    A request that ends while it waits is no longer counted. It stays in the heap until it reaches the front, or until
    most entries have ended. Between `hold_new` and `release_new`, requests that have never run are set aside, and after
    `select`, all that are not selected.
    """

    def __init__(self) -> None:
        # with its sort key: tuples of ints compare faster than `Request.__lt__`
        self._heap: list[tuple[int, int, int, Request]] = []
        self._size = 0
        self._now: dict[int, int] = {}  # the latest turn of each priority that has begun to run
        self._begin = 0  # the same of priorities that are not in `_now`
        self._last_turns: dict[tuple[int, str], int] = {}  # by priority and flow, where they are after `_now`
        self._flows: dict[str, dict[int, Request]] = {}  # what was pushed and not popped, by flow and number
        self._aside: list[Request] = []  # counted, and not in the heap
        self._holds_new = False
        self._selected: Set[str] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """The counted requests, in no particular order."""
        entries = (entry[-1] for entry in self._heap)
        return (request for request in chain(entries, self._aside) if not request.is_finished)

    def push(self, *requests: Request) -> None:
        for request in requests:
            if request.turn < 0:
                self._take_turn(request)
            self._flows.setdefault(request.flow, {})[request.sequence_number] = request
            is_new = self._holds_new and request.num_cached_tokens < 0
            if is_new if self._selected is None else request.request_id not in self._selected:
                self._aside.append(request)
            else:
                heappush(self._heap, (request.priority, request.turn, request.sequence_number, request))
        self._size += len(requests)

    def _take_turn(self, request: Request) -> None:
        flow, turns = (request.priority, request.flow), self._last_turns
        now = self._now.setdefault(request.priority, self._begin)
        request.turn = turns[flow] = max(now, turns.get(flow, 0)) + request.num_tokens
        if len(turns) > 2 * self._size + _FLOWS:  # most flows have had their turns
            self._last_turns = {flow: turn for flow, turn in turns.items() if turn > self._now[flow[0]]}
            waiting = {priority for priority, _ in self._last_turns}
            self._begin = max(self._begin, *self._now.values())
            self._now = {priority: now for priority, now in self._now.items() if priority in waiting}

    def clear(self) -> list[Request]:
        """Remove all requests, and return those that were counted."""
        waiting, self._heap, self._aside, self._flows, self._size = list(self), [], [], {}, 0
        return waiting

    def hold_new(self) -> None:
        """Set aside the requests that have never run, and those that arrive."""
        self._holds_new = True
        self.push(*self.clear())

    def release_new(self) -> None:
        """Undo `hold_new`; does nothing otherwise."""
        self._holds_new = False
        self.push(*self.clear())

    def select(self, request_ids: Set[str] | None) -> None:
        """From now on `first` is one of these requests, held or not; None: any."""
        if request_ids != self._selected:
            self._selected = request_ids
            self.push(*self.clear())

    @property
    def num_held(self) -> int:
        """How many requests `hold_new` sets aside."""
        return sum(not request.is_finished and request.num_cached_tokens < 0 for request in self._aside)

    def discard_finished(self) -> None:
        """Stop counting one request, which has ended while it was waiting."""
        self._size -= 1
        if len(self._heap) + len(self._aside) > 2 * self._size:
            self.push(*self.clear())

    def num_tokens(self, num_requests: int, limit: int) -> int:
        """Tokens of ``num_requests`` that may run, in no particular order; of fewer, if these have ``limit``."""
        total = 0
        for entry in islice(self._heap, num_requests):
            total += entry[-1].num_tokens
            if total >= limit:
                break
        return total

    @property
    def first(self) -> Request | None:
        """The next request to run; None if there is none that may."""
        while self._heap and self._heap[0][-1].is_finished:
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> None:
        """Remove `first`."""
        priority, turn, number, request = heappop(self._heap)
        self._now[priority] = max(turn, self._now.get(priority, self._begin))
        self._size -= 1
        del self._flows[request.flow][number]
        if not self._flows[request.flow]:
            del self._flows[request.flow]

    @property
    def flows(self) -> Set[str]:
        """Those that have been pushed and not popped."""
        return self._flows.keys()

    def first_beside(self, flows: Set[str]) -> Request | None:
        """The next request, as urgent as `first`, of another flow than these; None: there is none."""
        if (first := self.first) is None or self._aside:
            return None
        heads = (
            next((one for one in requests.values() if not one.is_finished and one.priority == first.priority), None)
            for flow, requests in self._flows.items()
            if flow not in flows
        )
        return min((one for one in heads if one is not None), key=lambda one: one.turn, default=None)

    def advance(self, request: Request) -> None:
        """Make a request that waits `first`, before others of its priority."""
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        request.turn = min([request.turn, *(entry[1] - 1 for entry in self._heap if entry[0] == request.priority)])
        self._heap.append((request.priority, request.turn, request.sequence_number, request))
        heapify(self._heap)


def select_microbatch(running: list[Request], num_stages: int, step: int) -> tuple[list[Request], int]:
    """The running requests, in their order, that may join a step of a pipeline; and the drafts of each of its decodes.

    The steps in flight hold different decodes, so that every stage is busy. Prefills always join: their chunks need no
    token that is still in flight. Of the decodes, at most one in ``num_stages`` (rounded up) joins, least recently
    sampled first. Decodes that one of the last ``num_stages - 1`` steps sampled would stall the first stage, and join
    only if there are no others. A decode verifies as many drafts as were proposed when it was last sampled.
    """
    last_steps = sorted(
        request.last_sampled_step
        for request in running
        if request.num_computed >= request.num_prefill and not request.reaches_limit_in_flight
    )
    share = -(-len(last_steps) // num_stages)
    num_rested = bisect_right(last_steps, step - num_stages)
    share = min(share, num_rested or share)
    newest = last_steps[share - 1] if share else -1
    num_ties = share - bisect_left(last_steps, newest)  # how many of the requests last sampled in step `newest` join
    microbatch = []
    for request in running:
        if request.num_computed >= request.num_prefill:
            if request.last_sampled_step > newest or request.reaches_limit_in_flight:
                continue
            if request.last_sampled_step == newest:
                if not num_ties:
                    continue
                num_ties -= 1
        microbatch.append(request)
    return microbatch, max((request.num_proposed for request in microbatch), default=0)


def record_microbatch(output: SchedulerOutput, batch: list[Request], newest_updated: int) -> None:
    """Record which step samples each request of ``batch``, and set ``output.awaited_step``.

    Results up to step ``newest_updated``, which are on the host, cost the earlier ranks no waiting, and are always
    awaited: the row of a new request is then never changed by a step of the row's previous owner.
    """
    output.awaited_step = max([newest_updated, *(request.last_sampled_step for request in batch[: output.num_decodes])])
    for request in batch[: output.num_sampled]:
        request.last_sampled_step = output.step
        request.num_proposed = output.num_to_propose


def prefill_share(prefills: list[Request], waiting: WaitingQueue, num_free_rows: int, num_stages: int) -> int:
    """The most tokens of prompts in a step of a pipeline.

    While one stage has a long step, the other stages wait for it. So the prompts that could run now are spread evenly
    over as many steps as there are stages: one long prompt occupies all stages, and a few prompts that have arrived
    beside many decodes do not make one step in flight longer than the others.

    Args:
        prefills: prefills in progress.
        num_free_rows: most waiting requests that could run.
    """
    num_left = sum(request.num_prefill - request.num_computed for request in prefills)
    num_left += waiting.num_tokens(num_free_rows, _PREFILL_IN_FLIGHT)
    return max(_LEAST_PREFILL, min(-(-num_left // num_stages), _PREFILL_IN_FLIGHT // num_stages))
