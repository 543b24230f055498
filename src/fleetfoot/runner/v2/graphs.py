"""Dispatch of steps to captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.capture_table import CaptureTable, GraphKey
from fleetfoot.runner.v2.device import Capture
from fleetfoot.runner.v2.input_batch import BatchShape
from fleetfoot.sampling.shape import SamplingVariant

CaptureShape = Callable[[GraphKey], Capture]
"""Captures a shape; called at most once for each key."""


class GraphManager:
    """Decides whether a step replays a graph or runs eagerly, captures shapes when they are first needed, and counts.

    Args:
        table: the shapes; with an empty table every step is eager.
        capture: captures a shape; None: the device has no graphs.
        includes_sampling: False on a rank that is not the last of its pipeline, whose steps end with the forward pass.
    """

    def __init__(
        self, table: CaptureTable, capture: CaptureShape | None = None, *, includes_sampling: bool = True
    ) -> None:
        self._includes_sampling = includes_sampling
        self._table = table if capture is not None else CaptureTable()
        self._capture = capture
        self._captured: dict[GraphKey, Capture] = {}
        self.num_steps: Counter[str] = Counter()
        """Number of steps: ``eager``, or by the kind of their graph."""

    def dispatch(
        self, output: SchedulerOutput, *, sampling: SamplingVariant | None, drafting: int | None = None
    ) -> tuple[BatchShape, GraphKey | None]:
        """The shape of a step, padded to that of its graph, and the graph's key; None: the step runs eagerly.

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
            sampling=sampling if self._includes_sampling else None,
            drafting=drafting if self._includes_sampling else None,
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
        """The graph of a shape, which is captured if this is its first use."""
        captured = self._captured.get(key)
        if captured is None:
            if self._capture is None:
                raise RuntimeError(f"{key} cannot be captured on this device")
            captured = self._captured[key] = self._capture(key)
        return captured

    def capture_first(self) -> None:
        """Capture `first_keys`."""
        for key in self.first_keys:
            self.get(key)

    @property
    def first_keys(self) -> tuple[GraphKey, ...]:
        """The shapes that are captured at the start."""
        return tuple(
            key if self._includes_sampling else replace(key, sampling=None, drafting=None)
            for key in self._table.first_keys
        )

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every shape that can be captured, with plain sampling."""
        return self._table.keys

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """The shapes captured so far."""
        return tuple(self._captured)
