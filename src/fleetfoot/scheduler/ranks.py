"""Schedulers of data-parallel ranks, whose layers with experts communicate: each has its own requests, rows and blocks.

All ranks take a step together. One without work computes padding beside the others; none computes if there is no work.
How large a step is, and whether it is a graph, follows from all of its parts before any is sent, so ranks agree without
messages.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import (
    Agreement,
    EngineOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    StepOfRanks,
)
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.prefix_routing import PrefixRouting
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

Agree = Callable[[Sequence[SchedulerOutput], bool], Agreement]
"""What the parts of a step agree on; True: a request reads the hidden states of all of its tokens."""
_P = ParamSpec("_P")
_Stats = TypeVar("_Stats", DraftStats, TransferStats)


class ConnectorsOfRanks(NoSchedulerConnector):
    """The scheduler's sides of the ranks' connectors, which end together."""

    def __init__(self, parts: Sequence[SchedulerConnector]) -> None:
        self.parts = tuple(parts)

    @property
    def takes_params(self) -> bool:
        return any(part.takes_params for part in self.parts)

    def shutdown(self) -> None:
        for part in self.parts:
            part.shutdown()


def of_ranks(parts: Sequence[SchedulerConnector]) -> SchedulerConnector:
    """One for all, as of `SchedulerOfRanks.transfers`."""
    return parts[0] if len(parts) == 1 else ConnectorsOfRanks(parts)


class _Transfers:
    """What the engine calls of all ranks' `Transfers`."""

    def __init__(self, ranks: Sequence[Scheduler]) -> None:
        self._ranks = ranks

    @property
    def connector(self) -> ConnectorsOfRanks:
        return ConnectorsOfRanks([rank.transfers.connector for rank in self._ranks])

    def evict(self, request_id: str) -> bool:
        return any([rank.transfers.evict(request_id) for rank in self._ranks])

    def evict_all(self) -> None:
        for rank in self._ranks:
            rank.transfers.evict_all()


class _Drafting:
    """What the engine calls of all ranks' `Drafting`."""

    def __init__(self, ranks: Sequence[Scheduler]) -> None:
        self._ranks = ranks

    @property
    def last_drafted(self) -> int:
        return sum(rank.drafting.last_drafted for rank in self._ranks)

    @property
    def last_accepted(self) -> int:
        return sum(rank.drafting.last_accepted for rank in self._ranks)

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        for rank, part in zip(self._ranks, output.of_ranks, strict=True):
            rank.drafting.observe(part, seconds)


def _on_each(method: Callable[Concatenate[Scheduler, _P], None]) -> Callable[Concatenate[SchedulerOfRanks, _P], None]:
    """A method that calls this one on each rank."""

    @wraps(method)
    def on_each(self: SchedulerOfRanks, *args: _P.args, **keywords: _P.kwargs) -> None:
        for rank in self.ranks:
            method(rank, *args, **keywords)

    return on_each


class _Pace:
    """What the engine calls of all ranks' `PromptPace`, of which each gets its part of a step."""

    def __init__(self, ranks: Sequence[Scheduler]) -> None:
        self._ranks = ranks

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        count = len(self._ranks)
        for rank in self._ranks:
            rank.pace.observe(num_decodes // count, num_prompt_tokens // count, seconds)


class SchedulerOfRanks:
    """Has the methods of `Scheduler` that an engine calls.

    Args:
        ranks: a scheduler for each data-parallel rank, with the same settings.
        agree: see `Agree`.
    """

    def __init__(self, ranks: Sequence[Scheduler], agree: Agree) -> None:
        self.ranks = tuple(ranks)
        self.transfers, self.drafting, self.pace = _Transfers(self.ranks), _Drafting(self.ranks), _Pace(self.ranks)
        self._agree = agree
        self._routing: PrefixRouting[int] = PrefixRouting()
        self._step = 0
        self._newest: StepOfRanks | None = None

    @property
    def config(self) -> SchedulerConfig:
        return self.ranks[0].config

    @property
    def requests(self) -> ChainMap[str, Request]:
        """All that have not ended, by their ids."""
        return ChainMap(*(rank.requests for rank in self.ranks))

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request on the rank that has the beginning of its prompt, or little to do. Raises ValueError as
        `Scheduler.add_request`."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that has not ended")
        self._choose(request).add_request(request)

    def _choose(self, request: Request) -> Scheduler:
        numbers = range(len(self.ranks)) if request.rank < 0 else (request.rank,)
        loads = {number: len(self.ranks[number].requests) for number in numbers}
        prompt = request.token_ids[: request.num_prompt_tokens].tobytes()
        return self.ranks[self._routing.choose(prompt, loads, request.session)]

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> Request | None:
        """See `Scheduler.finish`."""
        for rank in self.ranks:
            if request_id in rank.requests:
                return rank.finish(request_id, status, stop_reason)
        return None

    def restart(
        self, connector: SchedulerConnector, num_blocks: int, requests: Iterable[Request]
    ) -> list[tuple[Request, str]]:
        """See `Scheduler.restart`. ``connector``: `ConnectorsOfRanks`. Requests stay on their ranks."""
        assert isinstance(connector, ConnectorsOfRanks)
        own: list[list[Request]] = [[] for _ in self.ranks]
        for request in requests:
            known = (number for number, rank in enumerate(self.ranks) if request.request_id in rank.requests)
            own[next(known, 0)].append(request)
        refused = []
        for rank, part, some in zip(self.ranks, connector.parts, own, strict=True):
            refused += rank.restart(part, num_blocks, some)
        return refused

    @property
    def involved(self) -> set[Request]:
        """See `Scheduler.involved`."""
        return set().union(*(rank.involved for rank in self.ranks))

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepOfRanks | None:
        """The next step of all ranks; None if none has anything to do now."""
        return self._step_of([rank.schedule() for rank in self.ranks])

    def schedule_transfers(self) -> StepOfRanks | None:
        """See `Scheduler.schedule_transfers`."""
        return self._step_of([rank.schedule_transfers() for rank in self.ranks])

    def _step_of(self, found: Sequence[SchedulerOutput | None]) -> StepOfRanks | None:
        if all(part is None for part in found):
            return None
        has_connector = self.ranks[0].transfers.connector.is_active
        parts = [
            part or (rank.schedule_idle() if has_connector else SchedulerOutput(self._step, [], [], 0, 0, 0))
            for rank, part in zip(self.ranks, found, strict=True)
        ]
        if computing := [part for part in parts if part.rows]:
            reads_all = any(each.has_prompt_logprobs for rank in self.ranks for each in rank.running)
            agreement = self._agree(computing, reads_all)
            for part in parts:
                part.agreement = agreement
        self._newest = StepOfRanks.of(self._step, parts, [part is not None or has_connector for part in found])
        self._step += 1
        return self._newest

    @property
    def newest_batch(self) -> list[Request]:
        """The requests of the step that was scheduled last, in batch order, those of one rank after the other's."""
        assert self._newest is not None
        return [
            request
            for rank, is_scheduled in zip(self.ranks, self._newest.is_scheduled, strict=True)
            if is_scheduled
            for request in rank.newest_batch
        ]

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """See `Scheduler.update`."""
        assert isinstance(output, StepOfRanks)
        outputs = []
        each = zip(self.ranks, output.of_ranks, result.of_ranks, output.is_scheduled, strict=True)
        for rank, part, own, is_scheduled in each:
            if is_scheduled:
                outputs += rank.update(part, own)
        return outputs

    def final_output(self) -> StepOfRanks | None:
        """See `Scheduler.final_output`."""
        return self._step_of([rank.final_output() for rank in self.ranks])

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return any(rank.has_unfinished for rank in self.ranks)

    @property
    def has_idle_work(self) -> bool:
        """See `Scheduler.has_idle_work`."""
        return any(rank.has_idle_work for rank in self.ranks)

    @property
    def has_unreported_ids(self) -> bool:
        """See `Scheduler.has_unreported_ids`."""
        return any(rank.has_unreported_ids for rank in self.ranks)

    @property
    def has_started(self) -> bool:
        """See `Scheduler.has_started`."""
        return any(rank.has_started for rank in self.ranks)

    def stats(self) -> SchedulerStats:
        """The sum of the ranks' statistics; of the use of the KV cache the mean."""
        all_stats = [rank.stats() for rank in self.ranks]
        first, count = all_stats[0], len(all_stats)
        queues = "num_running", "num_waiting", "num_preemptions"
        names = *queues, "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_lost"
        return replace(
            first,
            **{name: sum(getattr(each, name) for each in all_stats) for name in names},
            kv_cache_usage=sum(each.kv_cache_usage for each in all_stats) / count,
            drafts=_sum([each.drafts for each in all_stats]),
            transfers=_sum([each.transfers for each in all_stats]),
        )

    admit_only = _on_each(Scheduler.admit_only)
    change_config = _on_each(Scheduler.change_config)
    close_events = _on_each(Scheduler.close_events)
    change_weights = _on_each(Scheduler.change_weights)
    reset_prefix_cache = _on_each(Scheduler.reset_prefix_cache)
    hold_new = _on_each(Scheduler.hold_new)
    release_new = _on_each(Scheduler.release_new)
    preempt_running = _on_each(Scheduler.preempt_running)
    restart_loads = _on_each(Scheduler.restart_loads)
    check_idle = _on_each(Scheduler.check_idle)
    check_integrity = _on_each(Scheduler.check_integrity)


AnyScheduler = Scheduler | SchedulerOfRanks
"""What schedules the steps of an engine, with one rank or several."""


def _sum(parts: Sequence[_Stats]) -> _Stats:
    """Numbers added, dictionaries too; of texts the first that is not empty."""
    found: dict[str, Any] = {}
    for name in parts[0].__dataclass_fields__:
        values = [getattr(part, name) for part in parts]
        match values[0]:
            case dict():
                found[name] = dict(sum(map(Counter, values), Counter[str]()))
            case tuple():
                found[name] = tuple(map(sum, zip(*values, strict=True)))
            case str():
                found[name] = next(filter(None, values), "")
            case _:
                found[name] = sum(values)
    return replace(parts[0], **found)
