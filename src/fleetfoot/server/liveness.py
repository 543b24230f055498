"""Whether the engine makes progress: its loop turns, or what it does now is known to take longer.

The loop answers a ping between two steps. Without any message for `HEALTH_S` it is stuck, unless a call between steps
is running (an update of weights, for example), or the engine computes on this machine's CPU and its processes do work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from fleetfoot.engine.client import EngineClient

HEALTH_S = 10.0
"""Seconds without a step after which an engine with work counts as stuck."""
LONG_STEP_S = 600.0
"""Most seconds of a step on a CPU while the engine's processes do work."""
HOLD_S = 1800.0
"""Most seconds of a call between steps."""
_PING_S = 2.0
_TICK_S = 1.0
_LATE_S = 3.0
_BUSY_SHARE = 0.1
"""Share of a core that processes use at least while they do work."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessWork:
    """Whether the processes of an engine do work, by samples of their CPU time.

    Args:
        cpu_use: the CPU time of a process and its children in seconds, and whether one of them is stopped.
    """

    def __init__(self, cpu_use: Callable[[int], tuple[float, bool]]) -> None:
        self._cpu_use = cpu_use
        self._sample = (0.0, 0.0)  # when, and the CPU time until then
        self.is_stopped = False
        """Whether one of them is stopped (SIGSTOP)."""

    def look(self, now: float, pid: int) -> bool:
        """Take a sample. Returns whether they have worked since the last one, and none is stopped."""
        (then, before), (used, self.is_stopped) = self._sample, self._cpu_use(pid)
        self._sample = now, used
        works = 0 < now - then < 2 * _LATE_S and used - before >= _BUSY_SHARE * (now - then)
        return works and not self.is_stopped


class Liveness:
    """Watches an engine for an API server.

    Args:
        clock: of `EngineClient.last_message_ts`.
        cpu_use: see `ProcessWork`; None: the engine runs elsewhere.
    """

    def __init__(
        self,
        engine: EngineClient,
        clock: Callable[[], float] = time.perf_counter,
        cpu_use: Callable[[int], tuple[float, bool]] | None = None,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._work = None if cpu_use is None else ProcessWork(cpu_use)
        self._ping: asyncio.Task[None] | None = None
        self._last_tick = self._excused = self._worked = 0.0

    async def run(self) -> None:
        """Watch until it is cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(_TICK_S)

    def tick(self) -> None:
        """Ask for a sign of life if there was none for a while, and look for work."""
        now, engine = self._clock(), self._engine
        if self._last_tick and now - self._last_tick > _LATE_S:
            self._excused = now  # this process has not run, and messages may wait
        self._last_tick = now
        if not engine.is_running or now - engine.last_message_ts < _PING_S:
            return
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self._send_ping())
        if self._work is not None and self._work.look(now, engine.facts.pid) and engine.facts.computes_on_cpu:
            self._worked = now

    async def _send_ping(self) -> None:
        with contextlib.suppress(Exception):  # what fails is reported elsewhere
            await self._engine.call("ping")

    @property
    def problem(self) -> str:
        """Why the engine counts as stuck; empty: it does not."""
        now, engine = self._clock(), self._engine
        if engine.held and not (self._work is not None and self._work.is_stopped):
            return "" if now - engine.held_since < HOLD_S else f"a call holds the engine for more than {HOLD_S:g} s"
        seen = max(engine.last_message_ts, self._excused)
        if now - seen < LONG_STEP_S:
            seen = max(seen, self._worked)
        if now - seen < HEALTH_S:
            return ""
        waiting = f"{engine.num_unfinished} requests of this server wait"
        return f"the engine has taken no step for {now - seen:.0f} s, and answers nothing; {waiting}"


def cpu_use(pid: int) -> tuple[float, bool]:
    """The CPU time in seconds of a process and its children, and whether one of them is stopped (SIGSTOP)."""
    seconds, is_stopped = 0.0, False
    with contextlib.suppress(OSError):  # a process that has ended
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds, is_stopped = sum(map(int, numbers[10:12])) / _TICKS_PER_SECOND, state in "Tt"
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                more, stopped = cpu_use(int(child))
                seconds, is_stopped = seconds + more, is_stopped or stopped
    return seconds, is_stopped
