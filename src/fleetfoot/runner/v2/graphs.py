"""The one place that decides whether a step replays a captured graph or runs eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.capture_table import CaptureTable, GraphKey
from fleetfoot.runner.v2.device import Capture
from fleetfoot.runner.v2.input_batch import BatchShape
from fleetfoot.sampling.shape import SamplingVariant

CaptureMaker = Callable[[GraphKey], Capture]
"""Captures a shape. Called at most once for each key."""


class GraphManager:
    """Dispatches batches to captured shapes, captures lazily, and counts.

    Args:
        table: the shapes; an empty one makes every step eager.
        make: captures a shape; None where the device has no graphs.
        has_end: False: steps end with the forward pass, as on a rank that is not the last of its pipeline; keys then
            know nothing of what comes after it.
    """

    def __init__(self, table: CaptureTable, make: CaptureMaker | None = None, *, has_end: bool = True) -> None:
        self._has_end = has_end
        self._table = table if make is not None else CaptureTable()
        self._make = make
        self._captured: dict[GraphKey, Capture] = {}
        self.num_steps: Counter[str] = Counter()
        """Steps by the way they went: ``eager``, ``decode``, ``uniform``, ``mixed``."""

    def dispatch(
        self, output: SchedulerOutput, *, sampling: SamplingVariant | None, drafting: int | None = None
    ) -> tuple[BatchShape, GraphKey | None]:
        """The shape that a step runs in, padded if a graph serves it, and that graph's key.

        Args:
            sampling, drafting: as in `GraphKey`.
        """
        num_reqs, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        is_uniform = output.num_decodes == num_reqs
        max_query_len = 1 + output.num_drafts if is_uniform else max(output.num_scheduled_tokens)
        key = self._table.dispatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            is_uniform=is_uniform,
            longest_decode=output.longest_decode,
            sampling=sampling if self._has_end else None,
            drafting=drafting if self._has_end else None,
        )
        shape = BatchShape(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_decodes=output.num_decodes,
            num_sampled=output.num_sampled,
            max_query_len=max_query_len,
            padded_reqs=num_reqs if key is None else key.num_reqs,
            padded_tokens=num_tokens if key is None else key.num_tokens,
            num_drafts=output.num_drafts,
        )
        self.num_steps["eager" if key is None else key.kind] += 1
        return shape, key

    def get(self, key: GraphKey) -> Capture:
        """The captured shape; the first time, it is captured now."""
        captured = self._captured.get(key)
        if captured is None:
            if self._make is None:
                raise RuntimeError(f"{key} cannot be captured on this device")
            captured = self._captured[key] = self._make(key)
        return captured

    def capture_first(self) -> None:
        """Capture the shapes that are wanted at the start."""
        for key in self.first_keys:
            self.get(key)

    @property
    def first_keys(self) -> tuple[GraphKey, ...]:
        """The shapes that are wanted at the start."""
        return tuple(
            key if self._has_end else replace(key, sampling=None, drafting=None) for key in self._table.first_keys
        )

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every shape that can be captured, as steps are that want no more than a temperature."""
        return self._table.keys

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """What has been captured so far."""
        return tuple(self._captured)
