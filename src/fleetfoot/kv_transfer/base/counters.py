"""Counts of what a worker's side did, handed out since the last time. No torch."""

from __future__ import annotations

from collections import Counter


class TransferCounters:
    """Named counts; `take` gives those since the last call."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self._counts[name] += count

    def take(self) -> dict[str, int]:
        taken, self._counts = dict(self._counts), Counter()
        return taken
