"""Graphs of steps: all of them are captured at the start, and a step replays those of its shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.graphs import BatchShape, Capture, CaptureTable, GraphKey, StepShape
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling.shape import SamplingVariant
from fleetfoot.utils.progress import report_progress


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graphs of a step. ``forward``: the forward pass, or the whole step; ``sampling``: what follows, if a graph
    has it; ``waits_for_masks``: `replay` ends with the forward pass, for token masks arrive before `sample`."""

    forward: Capture
    sampling: Capture | None
    waits_for_masks: bool

    def replay(self) -> Any:
        """Queue the work. Returns the output of what has been queued."""
        self.forward.replay()
        return self.forward.output if self.sampling is None or self.waits_for_masks else self.sample()

    def sample(self) -> Any:
        """Queue the sampling. Returns its output."""
        assert self.sampling is not None
        self.sampling.replay()
        return self.sampling.output


class StepGraphs:
    """Captures the graphs of a table, selects those of a step, and counts.

    ``has_sampling``: False on a rank that is not the last of its pipeline, where steps end with the forward pass.
    """

    def __init__(self, device: Device, table: CaptureTable, *, has_sampling: bool = True) -> None:
        self.table = table
        self.captured: dict[GraphKey, Capture] = {}
        self.num_steps: Counter[str] = Counter()
        """Number of steps: ``eager``, or by the kind of their graph."""
        self._device, self._has_sampling = device, has_sampling

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs of this rank."""
        return tuple(key for key in self.table.graphs if self._has_sampling or key.part == "forward")

    def capture_all(
        self, work: Callable[[GraphKey], Callable[[], Any]], shortened: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Capture all graphs. ``work``: what a graph does, for padding requests; ``shortened``: a context in which it
        runs few layers, which launch the kernels of all. The work of a part first runs there, so that the capture loads
        nothing; whole steps, the last ones, consist of such parts."""
        keys = self.keys
        for number, key in enumerate(keys):
            report_progress("graphs", number, len(keys))
            warm_up = None if key.part == "step" else shortened()
            self.captured[key] = self._device.capture(work(key), warm_up)

    def dispatch(
        self, output: SchedulerOutput, sampling: SamplingVariant | None, num_to_propose: int, *, reads_all: bool = False
    ) -> tuple[BatchShape, StepGraph | None]:
        """The shape of a step, padded to that of its graphs, and these; None: the step runs eagerly.

        ``sampling``: the parts that its requests use; None: a graph cannot have one of them; ``num_to_propose``: drafts
        for each request; ``reads_all``: hidden states of all tokens are read, which mixed graphs only have with drafts.
        """
        shape = self.table.dispatch(output)
        is_agreed = bool(output.agreement.num_tokens)
        reads_all = reads_all and not is_agreed  # the request that reads them has ended
        if shape is None or not self.captured or (reads_all and not shape.is_decode and not self.table.num_drafts):
            self.num_steps["eager"] += 1
            return BatchShape.of_step(output, None), None
        self.num_steps[shape.kind] += 1
        return BatchShape.of_step(output, shape), self._graph(shape, sampling, num_to_propose)

    def _graph(self, shape: StepShape, sampling: SamplingVariant | None, num_to_propose: int) -> StepGraph:
        variant = self.table.captured(shape, sampling, num_to_propose) if self._has_sampling else None
        if (whole := self.captured.get(GraphKey("step", shape, variant))) is not None:
            return StepGraph(whole, None, waits_for_masks=False)
        forward = self.captured[GraphKey("forward", shape)]
        if variant is None:
            return StepGraph(forward, None, waits_for_masks=False)
        sampling_graph = self.captured[GraphKey("sampling", shape.of_sampling, variant)]
        return StepGraph(forward, sampling_graph, variant.masks)

    def drop_all(self) -> None:
        """Free the graphs. NCCL's communicators can only be destroyed after all graphs with their kernels: until then
        `torch.distributed.destroy_process_group` waits."""
        self.captured.clear()
