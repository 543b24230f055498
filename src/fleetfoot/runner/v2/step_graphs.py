"""A step as one graph, or as two: the forward pass, and what samples its output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fleetfoot.runner.graphs import Capture, GraphKey
from fleetfoot.runner.v2.device import Device, always

Parts = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The forward pass of a step, and what it does with the output: sampling, verification and drafts."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TwoGraphs:
    """Implements `Capture`: the forward pass, and its sampling. ``waits_for_masks``: a replay ends with the forward
    pass, for token masks arrive before ``sampling`` is replayed."""

    forward: Capture
    sampling: Capture
    waits_for_masks: bool

    @property
    def output(self) -> Any:
        """Of what a replay runs."""
        return (self.forward if self.waits_for_masks else self.sampling).output

    def replay(self) -> None:
        self.forward.replay()
        if not self.waits_for_masks:
            self.sampling.replay()


class StepGraphs:
    """Captures steps; see `GraphKey.is_whole`.

    ``forwards``: of `GraphManager`. Until the sampling of a variant can be captured, it runs eagerly behind one of
    these. ``parts``: of a step of padding requests; ``shortened``: a context in which they run few layers, which launch
    the kernels of all.
    """

    def __init__(
        self,
        device: Device,
        forwards: dict[GraphKey, Capture],
        parts: Callable[[GraphKey], Parts],
        shortened: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._device = device
        self._forwards = forwards
        self._parts = parts
        self._shortened = shortened

    def step(self, key: GraphKey) -> Callable[[], Any]:
        """The work of a graph: preparation, forward, and the rest if ``key`` samples."""
        forward, sample = self._parts(key)
        return forward if key.sampling is None else lambda: sample(forward())

    def capture(self, key: GraphKey, may_capture: Callable[[], bool] = always) -> Capture | None:
        """Capture a shape, or what is missing of it, if ``may_capture`` is true after its kernels were launched."""
        if key.is_whole:
            step = self.step(key)
            return self._device.capture(step, may_capture, lambda: self._load_kernels(step))
        forward, sample = self._parts(key)
        first = self._forwards.get(key.forward)
        if first is None:
            first = self._device.capture(forward, may_capture, lambda: self._load_kernels(forward))
            if first is None:
                return None
            self._forwards[key.forward] = first
        load = partial(self._load_kernels, lambda: sample(forward()))  # the output of a graph has no values yet
        second = self._device.capture(lambda: sample(first.output), may_capture, load)
        waits = key.sampling is not None and key.sampling.masks
        return None if second is None else cast("Capture", TwoGraphs(first, second, waits))

    def _load_kernels(self, work: Callable[[], object]) -> None:
        """Launch the kernels of a step, each in as few layers as have all of them: the step that captures waits."""
        with self._shortened():
            work()
