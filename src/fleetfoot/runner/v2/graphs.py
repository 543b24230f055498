"""The one place that decides whether a step replays a captured graph or runs eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from fleetfoot.plan.graphs import CaptureTable, GraphKey
from fleetfoot.runner.v2.input_batch import BatchShape
from fleetfoot.scheduler.output import SchedulerOutput


class Capture(Protocol):
    """Captures and replays one shape on a device."""

    def replay(self) -> None:
        """Queue the captured work."""
        ...


CaptureMaker = Callable[[GraphKey], Capture]
"""Runs a shape once under capture. Called at most once for each key."""


class GraphManager:
    """Dispatches batches to captured shapes, captures lazily, and counts.

    Args:
        table: the shapes; an empty one makes every step eager.
        make: captures a shape; None where the device has no graphs.
    """

    def __init__(self, table: CaptureTable, make: CaptureMaker | None = None) -> None:
        self._table = table if make is not None else CaptureTable()
        self._make = make
        self._captured: dict[GraphKey, Capture] = {}
        self.num_steps: Counter[str] = Counter()
        """Steps by the way they went: ``eager``, ``decode``, ``uniform``, ``mixed``."""

    def dispatch(self, output: SchedulerOutput) -> tuple[BatchShape, GraphKey | None]:
        """The shape that a step runs in, padded if a graph serves it, and that graph's key."""
        num_reqs, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        max_query_len = 1 if output.num_decodes == num_reqs else max(output.num_scheduled_tokens)
        is_uniform = num_tokens == num_reqs * max_query_len and output.num_decodes == num_reqs
        key = self._table.dispatch(
            num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=max_query_len, is_uniform=is_uniform
        )
        shape = BatchShape(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=output.num_decodes,
            num_sampled=output.num_sampled,
            max_query_len=max_query_len,
            padded_reqs=num_reqs if key is None else key.num_reqs,
            padded_tokens=num_tokens if key is None else key.num_tokens,
        )
        return shape, key

    def run(self, key: GraphKey | None, eager: Callable[[], None]) -> None:
        """Replay ``key``, capturing it first if this is its first time, or call ``eager``."""
        self.num_steps["eager" if key is None else key.kind] += 1
        if key is None or self._make is None:
            eager()
            return
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._make(key)
        captured.replay()

    def capture_first(self) -> None:
        """Capture the shapes that are wanted at the start."""
        if self._make is not None:
            for key in self._table.keys[: self._table.eager_capture]:
                if key not in self._captured:
                    self._captured[key] = self._make(key)

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """What has been captured so far."""
        return tuple(self._captured)
