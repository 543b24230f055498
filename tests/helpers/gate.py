"""A gate in front of an executor's steps: tests decide when the engine's thread runs."""

from __future__ import annotations

import asyncio
import threading

from fleetfoot.records.step import SchedulerOutput

HANG = 60.0
"""Seconds after which a test that waits in vain fails."""


class Gate:
    """Holds the engine's thread before each step until it may take it."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, step: SchedulerOutput | None) -> None:
        if not self._is_open:
            self._arrived.release()
            assert self._permits.acquire(timeout=HANG)

    async def arrival(self) -> None:
        """Wait until the engine is about to take a step."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=HANG)

    def step(self) -> None:
        """Let it take one step."""
        self._permits.release()

    def open(self) -> None:
        """Let it run."""
        self._is_open = True
        self._permits.release()
