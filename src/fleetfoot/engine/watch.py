"""What an engine does, step by step, for those who look at it. Nothing is kept while nobody does.

Requests are lanes with numbers: neither their ids nor their texts are told. A step costs a record of a dozen numbers,
and one for each prompt chunk of a lane; decodes cost nothing, because lanes say when they begin and end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from fleetfoot.engine.stats import NO_WATCH, NoWatch
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import SchedulerOutput

if TYPE_CHECKING:
    from fleetfoot.plan.plan import EnginePlan

PATIENCE_S = 3.0
"""Seconds after the last look of a viewer in which steps are kept for it."""
MOST_STEPS = 2048
"""Steps that are kept at most between two looks; older ones are dropped."""
MOST_LANES = 48
"""Requests that are told apart; others are counted."""


class Watch(NoWatch):
    """The records of an engine's last steps. `EngineCore` calls `record` while ``core.watch`` is this object.

    Args:
        engine: the `LLMEngine`.
        facts: what a viewer is told at first; see `plan_facts`.
    """

    def __init__(self, engine: Any, facts: Callable[[], dict[str, Any]]) -> None:
        self._engine, self._facts = engine, facts
        # the last look, and the first step and the first ended lane after it
        self._viewers: dict[str, tuple[float, int, int]] = {}
        self._follower: Callable[[float], object] | None = None
        self._steps: deque[list[Any]] = deque(maxlen=MOST_STEPS)
        self._num_steps = 0
        self._forget_lanes()

    def _forget_lanes(self) -> None:
        self._numbers = count()
        self._lanes: dict[str, tuple[int, Request]] = {}  # by request id
        self._ended: deque[list[int]] = deque(maxlen=MOST_STEPS)
        self._num_ended = 0
        self._rows: dict[tuple[int, int], str] = {}  # rank and row -> request id
        self._begun: dict[str, tuple[Request, float]] = {}  # by steps in flight, and how long they have waited

    def begin(self, request: Request, now: float) -> None:
        """Note how long a request has waited."""
        self._begun[request.request_id] = request, max(0.0, now - request.queued_ts)

    def record(self, output: SchedulerOutput, began: float, seconds: float, drafts: tuple[int, int]) -> None:
        """Keep a step that has retired. ``seconds``: since the step before; ``drafts``: verified, accepted."""
        begun, chunks, left = [], [], []
        num_decodes = num_prompt_tokens = 0
        for rank, part in enumerate(output.of_ranks):
            for request_id, row in part.finished:
                self._rows.pop((rank, row), None)
                if request_id in self._lanes:
                    is_preempted = request_id in self._requests(rank)
                    left.append((self._lanes[request_id][0], is_preempted))
                    if not is_preempted:
                        self._end(request_id)
            for new in part.new_requests:
                request, waited = self._begun.pop(new.request_id, (self._requests(rank).get(new.request_id), 0.0))
                if request is not None and (lane := self._lane(request)) is not None:
                    self._rows[rank, new.row] = new.request_id
                    begun.append((lane, new.num_prompt_tokens, new.num_computed_tokens, waited))
            first = part.num_decodes
            num_decodes += first
            for row, size in zip(part.rows[first:], part.num_scheduled_tokens[first:], strict=True):
                num_prompt_tokens += size
                if (name := self._rows.get((rank, row))) is not None and name in self._lanes:
                    chunks.append((self._lanes[name][0], size))
        self._num_steps += 1
        counts = len(output.rows), num_decodes, num_prompt_tokens
        self._steps.append([began, seconds, *counts, *drafts, begun, chunks, left])
        if self._follower is not None:
            self._follower(began + seconds)
        if self._num_steps % 64 == 0:
            self._drop_viewers()

    def _requests(self, rank: int) -> dict[str, Request]:
        return self._engine.core.scheduler.ranks[rank].requests

    def _lane(self, request: Request) -> int | None:
        """The number of a request; None: there are many others."""
        if request.request_id not in self._lanes:
            if len(self._lanes) >= MOST_LANES:
                return None
            self._lanes[request.request_id] = next(self._numbers), request
        return self._lanes[request.request_id][0]

    def _end(self, request_id: str) -> None:
        lane, request = self._lanes.pop(request_id)
        self._ended.append([lane, *_made(request)])
        self._num_ended += 1

    def _drop_viewers(self) -> None:
        """Forget viewers that have left. Without any, steps are not recorded any more."""
        now, core = self._engine.core.clock(), self._engine.core
        if self._follower is None:
            self._viewers = {name: seen for name, seen in self._viewers.items() if now - seen[0] < PATIENCE_S}
        if not self._viewers:
            core.watch = NO_WATCH
            self._steps.clear()
            self._forget_lanes()

    def follow(self, follower: Callable[[float], object] | None) -> None:
        """Call ``follower(now)`` after each step, which may look; meanwhile no viewer is forgotten. None: no more."""
        self._follower = follower

    def look(self, viewer: str) -> dict[str, Any]:
        """What has happened since the viewer's last look, plain data; with its first one, what the plan has decided.
        Times are seconds of the engine's clock."""
        core, engine = self._engine.core, self._engine
        now, is_new = core.clock(), viewer not in self._viewers
        if is_new and core.watch is not self:
            core.watch = self
            for rank, scheduler in enumerate(core.scheduler.ranks):
                self._rows |= {(rank, request.row): request.request_id for request in scheduler.running}
        lanes = self._live_lanes(now)
        _, begin, begin_ended = (now, self._num_steps, self._num_ended) if is_new else self._viewers[viewer]
        self._viewers[viewer] = now, self._num_steps, self._num_ended
        self._drop_viewers()
        stats, scheduled = engine.core.stats, core.scheduler.stats()
        drafts = scheduled.drafts
        missed = max(0, self._num_steps - begin - len(self._steps))
        new_steps = list(self._steps)[len(self._steps) - (self._num_steps - begin - missed) :]
        balance = stats.balance
        seen: dict[str, Any] = {
            "now": now,
            "steps": new_steps,
            "missed": missed,
            "lanes": lanes,
            "ended": list(self._ended)[len(self._ended) - min(len(self._ended), self._num_ended - begin_ended) :],
            "running": scheduled.num_running,
            "waiting": scheduled.num_waiting,
            "preemptions": scheduled.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generation_tokens,
            "prefix": [scheduled.prefix_cache_queries, scheduled.prefix_cache_hits, scheduled.prefix_cache_lost],
            "drafts": [drafts.num_drafted, drafts.num_accepted, drafts.off_reason],
            "transfers": [scheduled.transfers.num_loading, scheduled.transfers.num_held_blocks],
            "kv_usage": scheduled.kv_cache_usage,
            "kv": [scheduler.pools.counts() for scheduler in core.scheduler.ranks],
            "experts": None if balance is None else {
                "loads": list(balance.rank_loads), "balancedness": balance.balancedness, "least": balance.least,
                "expected": balance.expected, "rounds": balance.num_rounds, "moved": balance.num_moved,
            },
            "finished": dict(stats.num_finished),
        }  # fmt: skip
        return seen | ({"plan": self._facts()} if is_new else {})

    def _live_lanes(self, now: float) -> list[list[Any]]:
        """Unfinished requests with lanes: lane, state (``w``aits, ``p``rompt, ``d``ecodes, ``x``: preempted), tokens of
        the prompt and computed ones, what `_made` has, preemptions, seconds since it was queued. Other lanes end."""
        lanes = []
        for scheduler in self._engine.core.scheduler.ranks:
            for request in scheduler.requests.values():
                if (lane := self._lane(request)) is None:
                    continue
                first = lane, _state_of(request), request.num_prompt_tokens, request.num_computed
                lanes.append([*first, *_made(request), request.num_preemptions, now - request.queued_ts])
        live = {lane for lane, *_ in lanes}
        for name in [name for name, (lane, _) in self._lanes.items() if lane not in live]:
            self._end(name)
        return lanes


def _made(request: Request) -> list[int]:
    """Generated tokens, drafts, accepted ones, prompt tokens found in the cache."""
    cached = max(0, request.num_cached_tokens)
    return [request.num_output_tokens, request.num_drafted, request.num_accepted, cached]


def _state_of(request: Request) -> str:
    if request.status is RequestStatus.PREEMPTED:
        return "x"
    if request.status is not RequestStatus.RUNNING:
        return "w"
    return "p" if request.num_computed < request.num_prefill else "d"


def plan_facts(plan: EnginePlan, runner: str) -> dict[str, Any]:
    """What the plan has decided, and why, for a person."""
    config, memory = plan.config, plan.memory
    fusions: dict[str, int] = {}
    for layer in plan.fusion:
        title = f"{'fused' if layer.is_fused else 'plain'}: {layer.reason}"
        fusions[title] = fusions.get(title, 0) + 1
    return {
        "model": config.model,
        "architecture": plan.model.architecture,
        "parameters": plan.model.num_parameters,
        "runner": runner,
        "is_explicit": plan.explicit,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "device": plan.device,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "kv_layout": plan.kv_layout,
        "kv_blocks": memory.num_blocks,
        "kv_reason": memory.kv_reason,
        "block_size": memory.block_size,
        "executor": plan.executor,
        "ranks": [config.tensor_parallel_size, config.pipeline_parallel_size, config.num_data_ranks],
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "overlaps_steps": plan.async_scheduling,
        "drafter": None if config.speculative_config is None else config.speculative_config.method,
        "connector": None if plan.connector is None else plan.connector.config.kv_connector,
        "memory": dict(memory.footprint),
        "kernels": dict(plan.kernels),
        "layers": fusions,
    }
