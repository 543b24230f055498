"""What an engine does, step by step, as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) opens.

It is made of what a viewer of the engine is told (`fleetfoot.engine.watch`): a track of steps, tracks of requests with
their phases, and counters. Kernels are in the traces of ``torch.profiler`` (`fleetfoot.executor.profiling`).
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MOST_EVENTS = 500_000
"""Events of a trace at most; what comes later is left out."""
_LOOK_S = 0.25
_VIEWER = "profile"
_STEPS = 0
"""The track of the steps; those of requests follow."""


@dataclass
class _Lane:
    """A request. Times are on the engine's clock, in seconds."""

    begin: float
    phases: list[tuple[str, float, float, dict[str, Any]]] = field(default_factory=list)
    waits_from: float | None = None
    wait: str = "queued"
    decodes_from: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def _facts(output: int, drafted: int, accepted: int, cached: int) -> dict[str, Any]:
    drafts = {"drafted tokens": drafted, "accepted tokens": accepted} if drafted else {}
    return {"cached tokens": cached, "output tokens": output, **drafts}


class StepTrace:
    """The trace of one engine.

    Args:
        name: of the engine, in the trace.
        number: of the engine, among those of the trace.
        wall: the time at which the first look is taken; it is where the engine's clock is put.
    """

    def __init__(self, name: str, number: int = 1, wall: Callable[[], float] = time.time) -> None:
        self.name, self._pid, self._wall = name, number, wall
        self._offset: float | None = None
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[int, _Lane] = {}
        self._finals: dict[int, dict[str, Any]] = {}  # of lanes that have ended since the look before
        self._free_from: list[int] = []  # of each track of requests, microseconds
        self._now = 0.0
        self.missed = 0
        """Steps that are not in the trace."""
        self.plan: dict[str, Any] = {}

    def take(self, seen: dict[str, Any]) -> None:
        """Add a look; see `Watch.look`."""
        self._now = seen["now"]
        if self._offset is None:
            self._offset = self._wall() - self._now
        self.plan = seen.get("plan", self.plan)
        self.missed += seen["missed"]
        if len(self._events) >= MOST_EVENTS:
            self.missed += len(seen["steps"])
            return
        self._finals = {number: _facts(*made) for number, *made in seen["ended"]}
        for step in seen["steps"]:
            self._take_step(step)
        live = set()
        for number, state, prompt, _, *made, preemptions, age in seen["lanes"]:
            live.add(number)
            if number not in self._lanes:
                begin = self._now - age
                decodes_from = self._now if state == "d" else None
                self._lanes[number] = _Lane(
                    begin, waits_from=begin if state == "w" else None, decodes_from=decodes_from
                )
            facts = {"prompt tokens": prompt, **({"preemptions": preemptions} if preemptions else {})}
            self._lanes[number].facts |= facts | _facts(*made)
        for number in [number for number in self._lanes if number not in live]:
            self._close(number, self._now)
        self._count("requests", self._now, running=seen["running"], waiting=seen["waiting"])
        self._count("KV in use, %", self._now, usage=round(100 * seen["kv_usage"], 2))
        queries, hits, _ = seen["prefix"]
        self._count("prefix cache, tokens", self._now, queries=queries, hits=hits)
        if seen["experts"] is not None:
            loads = {f"rank {rank}": load for rank, load in enumerate(seen["experts"]["loads"])}
            self._count("load of experts", self._now, **loads)

    def _take_step(self, step: Sequence[Any]) -> None:
        began, seconds, batch, decodes, prompt, drafted, accepted, begun, chunks, left = step
        end = began + seconds
        facts = {"requests": batch, "decodes": decodes, "prompt tokens": prompt}
        facts |= {"drafted tokens": drafted, "accepted tokens": accepted} if drafted else {}
        self._span(_STEPS, "step", began, end, facts)
        self._count("tokens of a step", began, decodes=decodes, prompt=prompt)
        if drafted:
            self._count("drafts of a step", began, accepted=accepted, rejected=drafted - accepted)
        for number, is_preempted in left:
            if is_preempted:
                lane = self._lanes.setdefault(number, _Lane(began))
                self._end_decode(lane, began)
                lane.waits_from, lane.wait = began, "preempted"
            elif number in self._lanes:
                self._close(number, began)
        for number, num_prompt_tokens, computed, waited in begun:
            new = _Lane(began - waited, waits_from=began - waited, facts={"prompt tokens": num_prompt_tokens})
            lane = self._lanes.setdefault(number, new)
            if lane.waits_from is not None:
                lane.phases.append((lane.wait, lane.waits_from, began, {"tokens computed before": computed}))
                lane.waits_from = None
        for number, size in chunks:
            lane = self._lanes.setdefault(number, _Lane(began))
            lane.phases.append(("prompt", began, end, {"tokens": size}))
            lane.decodes_from = end

    @staticmethod
    def _end_decode(lane: _Lane, at: float) -> None:
        if lane.decodes_from is not None and lane.decodes_from < at:
            lane.phases.append(("decode", lane.decodes_from, at, {}))
        lane.decodes_from = None

    def _close(self, number: int, at: float) -> None:
        """Give an ended request a track that is free in its time."""
        lane = self._lanes.pop(number)
        self._end_decode(lane, at)
        if lane.waits_from is not None:
            lane.phases.append((lane.wait, lane.waits_from, at, {}))
        begin = self._microseconds(lane.begin)
        track = next((track for track, free in enumerate(self._free_from) if free <= begin), len(self._free_from))
        if track == len(self._free_from):
            self._free_from.append(0)
        facts = lane.facts | self._finals.get(number, {})
        self._free_from[track] = self._span(1 + track, f"request {number}", lane.begin, at, facts)
        for name, began, end, facts in lane.phases:
            self._span(1 + track, name, max(began, lane.begin), min(end, at), facts)

    def _microseconds(self, seconds: float) -> int:
        assert self._offset is not None
        return round(1e6 * (seconds + self._offset))

    def _span(self, track: int, name: str, begin: float, end: float, facts: dict[str, Any]) -> int:
        """Returns its end, in microseconds."""
        at, until = self._microseconds(begin), self._microseconds(end)
        place = {"pid": self._pid, "tid": track, "ts": at, "dur": max(0, until - at)}
        self._events.append({"ph": "X", "name": name, **place, "args": facts})
        return until

    def _count(self, name: str, at: float, **values: float) -> None:
        place = {"pid": self._pid, "tid": _STEPS, "ts": self._microseconds(at)}
        self._events.append({"ph": "C", "name": name, **place, "args": values})

    def events(self) -> list[dict[str, Any]]:
        """All events; requests that have not ended last until the last look. Nothing can be taken afterwards."""
        for number in list(self._lanes):
            self._close(number, self._now)
        names = [(_STEPS, "steps"), *((1 + track, f"requests {track}") for track in range(len(self._free_from)))]
        heads = [{"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": self.name}}]
        for track, name in names:
            place = {"pid": self._pid, "tid": track}
            heads.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            heads.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": track}})
        return [*heads, *self._events]


def encoded(traces: Iterable[StepTrace]) -> bytes:
    """The JSON of a file for Perfetto."""
    traces = [*traces]
    facts = {one.name: {**one.plan, "steps that are missing": one.missed} for one in traces}
    events = [event for one in traces for event in one.events()]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


class EngineProfiler:
    """Traces of steps, or of each rank by ``torch.profiler``. ``engine``: the `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._running: tuple[StepTrace, Path] | None = None
        self._next_look = 0.0

    def start(self, prefix: str | None) -> None:
        """See `EngineCalls.start_profile`."""
        plan = self._engine.plan
        config = plan.config.profiler_config
        if config is None or config.profiler != "steps":
            self._engine.collective_rpc("start_profile", args=(prefix,))
            return
        if self._running is not None:
            raise RuntimeError("start_profile was called before; call stop_profile first")
        self._running = StepTrace("engine"), config.new_file(prefix, "steps", "trace.json")
        self._engine.watching.follow(self._after_step)
        self._take(self._running[0])

    def _take(self, trace: StepTrace) -> None:
        seen = self._engine.watching.look(_VIEWER)
        trace.take(seen)
        self._next_look = seen["now"] + _LOOK_S

    def _after_step(self, now: float) -> None:
        if self._running is not None and now >= self._next_look:
            self._take(self._running[0])

    def stop(self) -> list[str]:
        """See `EngineCalls.stop_profile`."""
        config = self._engine.plan.config.profiler_config
        if config is None or config.profiler != "steps":
            files: list[str] = self._engine.collective_rpc("stop_profile")
            return files
        if self._running is None:
            raise RuntimeError("stop_profile was called without a start_profile before it")
        (trace, path), self._running = self._running, None
        self._take(trace)
        self._engine.watching.follow(None)
        content = encoded([trace])
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return [str(path)]
