"""Warm-up: the steps that run, and the kernels that are compiled, before the first request."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, TensorGroup
from fleetfoot.kernels.runtime.compile_ahead import Compilations, CompileAhead
from fleetfoot.kernels.runtime.compile_worker import MANY_PROCESSES
from fleetfoot.kernels.runtime.triton_support import nothing_is_ready
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NOT_COMPILED, NewRequest, SchedulerOutput, WarmUpOutput
from fleetfoot.runner.graphs import MIXED_TOKENS, Capture, GraphKey
from fleetfoot.sampling.shape import EVERYTHING, PLAIN, SamplingVariant

if TYPE_CHECKING:
    from triton import FutureKernel

logger = logging.getLogger(__name__)

NAME = "warm-up"
_PROMPT_TOKENS = 1024
"""The length of a prompt for which no graph and no kernel for short queries is used."""
_LIBRARY_TOKENS = (16, 128, 512, 2048)
_BETWEEN_TOKENS = 640
"""A fine size for which a kernel is used (gate and up of up to 1,536 inputs) that no other shape here has."""
_FIRST = 2
_MOST_NOTES = 100
_LIBRARY_IS_COLD = "the library is not warm"
_START_S = 1.0
"""What captures may add to a start with compiled kernels."""
_SECONDS_PER_LAYER = 0.0004
"""Of a capture, on the host. A constant, not a clock, so that all ranks capture the same shapes."""
_VARIANTS = (
    SamplingVariant(filters=True, masks=True),
    SamplingVariant(filters=True, other_filters=True),
    SamplingVariant(logits_processors=True),
    SamplingVariant(filters=True, logits_processors=True),
    EVERYTHING,
)
"""Variants that together launch all kernels of sampling; processed logits have another dtype, for
which token masks have a kernel, too."""


def warm_up_steps(
    max_num_batched_tokens: int, max_model_len: int, block_size: int, blocks: Sequence[int] = (0,)
) -> list[WarmUpOutput]:
    """A prefill and a decode of one request, in row 0 and one of ``blocks`` in each group of layers.

    They bypass the scheduler. What they leave in rows and blocks is overwritten before it is read.
    """
    length = max(1, min(4, block_size, max_num_batched_tokens, max_model_len - 1))
    request = Request(NAME, array("i", [0] * length), SamplingParams(temperature=1.0), max_tokens=2, seed=0)
    request.row, request.block_ids = 0, [blocks[0]]
    request.group_block_ids = [[block] for block in blocks[1:]]

    def step(number: int, num_tokens: int, new_requests: list[NewRequest]) -> WarmUpOutput:
        num_decodes = int(num_tokens == 1)
        return WarmUpOutput(number, [0], [num_tokens], num_decodes, 1, num_tokens, new_requests=new_requests)

    return [step(-2, length, [NewRequest.of(request)]), step(-1, 1, [])]


def eager_shape(step: SchedulerOutput, drafting: int | None) -> GraphKey:
    """The shape of an eager step of one request; of a decode, with a context so short that all kernels can be used."""
    kind, max_context = ("decode", 1) if step.num_decodes else ("mixed", 0)
    return GraphKey(kind, 1, step.total_num_scheduled_tokens, drafting=drafting, max_context=max_context)


def prompt_shapes(max_num_batched_tokens: int) -> list[GraphKey]:
    """A prompt that is too long for most graphs, and one that fills a step. With the library, their kernels can
    compute every step."""
    lengths = sorted({min(_PROMPT_TOKENS, max_num_batched_tokens), max_num_batched_tokens})
    return [GraphKey("mixed", 1, length) for length in lengths]


def library_shapes(max_num_batched_tokens: int) -> list[GraphKey]:
    """Steps for which the library has different kernels, and that use all operations of sampling."""
    lengths = (length for length in _LIBRARY_TOKENS if length <= max_num_batched_tokens)
    prompts = [GraphKey("mixed", 1, length) for length in lengths]
    return [*prompts, GraphKey("decode", 1, 1, EVERYTHING)]


def later_shapes(captured: Sequence[GraphKey], fine: Sequence[int], num_drafts: int) -> list[GraphKey]:
    """Steps that together launch the kernels of serving. ``captured``: the shapes of graphs; ``fine``: tokens of mixed
    batches between and beyond these."""
    compiled = [shape for shape in captured if shape.kind != "mixed" or shape.num_tokens <= MIXED_TOKENS[-1]]
    by_size = {shape.num_reqs: shape for shape in reversed(compiled)}
    if _BETWEEN_TOKENS in fine:
        compiled.append(GraphKey("mixed", max(by_size), _BETWEEN_TOKENS))
    # sampling has kernels for one row, for few and for many
    counts = sorted(by_size)
    sizes = dict.fromkeys((*counts[:2], *counts[-1:]))
    samplers = (replace(by_size[size], sampling=variant) for variant in _VARIANTS for size in sizes)
    return [replace(shape, drafting=num_drafts or None) for shape in (*compiled, *samplers)]


def captures_of_start(num_layers: int) -> int:
    """The number of graphs that a start captures at most."""
    return int(_START_S / (_SECONDS_PER_LAYER * num_layers))


def waits_for(shape: GraphKey, num_processes: int) -> bool:
    """Whether a start waits for the kernels of one of `later_shapes`."""
    return shape.sampling == PLAIN and num_processes >= MANY_PROCESSES


def uses_library(shape: GraphKey) -> bool:
    """Whether a step of this shape uses kernels of the library or of torch that most of `later_shapes` do not."""
    return shape.kind == "mixed" or shape.sampling == EVERYTHING


class KernelCompiler:
    """Compiles the kernels of the warm-up, and afterwards the other kernels of serving. ``make_step``: a step of one
    shape, with padding requests only; ``shortened``: a context in which steps run few layers, which launch the kernels
    of all; ``group``: of ranks with the same kernels."""

    def __init__(
        self,
        make_step: Callable[[GraphKey], Callable[[], object]],
        shortened: Callable[[], AbstractContextManager[None]],
        ahead: CompileAhead,
        group: TensorGroup = SINGLE_TENSOR_GROUP,
    ) -> None:
        self._make_step = make_step
        self._shortened = shortened
        self._group = group
        self.ahead = ahead
        self.later: Compilations | None = None
        """The compilations of `compile_later`. Serving does not wait for them; a start does if all are in the cache."""
        self.compiled: set[GraphKey] = set()
        """Shapes with kernels that `compile_first` has waited for, on every rank of the group."""
        self._has_all = self._has_plain = False
        self._missing: dict[GraphKey, list[FutureKernel]] = {}
        self._without: dict[GraphKey, list[FutureKernel]] = {}  # optional kernels, of its forward pass too
        self._notes: list[str] = []

    def compile_first(
        self,
        shapes: Sequence[GraphKey],
        library_shapes: Sequence[GraphKey] = (),
        later_shapes: Sequence[GraphKey] = (),
    ) -> None:
        """Compile the kernels of some shapes, wait for them, and log their number and the seconds. Meanwhile, run steps
        of ``library_shapes`` without any of ours, which loads the kernels of the library and of torch.

        If all kernels are in the cache, those of ``later_shapes`` too, wait for all, and run steps of these shapes
        instead: no step will be without a kernel.
        """
        begin, ahead, self.compiled = time.perf_counter(), self.ahead, {*shapes}
        plain = {shape for shape in later_shapes if shape.sampling == PLAIN}
        self._has_plain = bool(plain) and plain <= self.compiled
        # those of prompts take longest, and begin while the dry passes of the others run
        compilations = [self._queue(part) for part in (shapes[:_FIRST], shapes[_FIRST:])]
        ahead.compiles_here &= ahead.num_uncached > 0
        if later_shapes and not ahead.num_uncached:
            self._queue_later(later_shapes)
        all_cached = self.later is not None and not ahead.num_uncached
        if self.later is not None and all_cached:
            compilations.append(self.later)
        if all_cached and self._group.size == 1:
            self.compiled |= {*later_shapes}
            self._has_all = True
            num_failed = sum(part.wait() for part in compilations)
            with torch.inference_mode(), self._shortened(), ahead.serving():
                self._run([shape for shape in later_shapes if uses_library(shape)], _LIBRARY_IS_COLD)
        else:  # ranks run the same steps, although what each one finds may differ
            with torch.inference_mode(), self._shortened(), nothing_is_ready():
                self._run(library_shapes, _LIBRARY_IS_COLD)
            num_failed = sum(part.wait() for part in compilations)
        message = "kernels: %d compiled by %d processes, %d found in the cache, %d failed: %.2f s"
        seconds = time.perf_counter() - begin
        logger.info(message, ahead.num_compiled, ahead.num_processes, ahead.num_found, num_failed, seconds)

    def compile_later(self, shapes: Sequence[GraphKey]) -> None:
        """Start compiling the kernels of other shapes beside the steps, or loading them from the cache, without those
        that `compile_first` has compiled. Each rank of a group begins with others."""
        self.ahead.leave_cores()
        if self.later is None:
            self._queue_later(shapes)
        self.ahead.finish()

    def _queue_later(self, shapes: Sequence[GraphKey]) -> None:
        self.later = self._queue(
            [shape for shape in shapes if shape not in self.compiled], self._group.rank / self._group.size
        )

    def has_kernels(self, key: GraphKey) -> bool:
        """Whether `compile_first` has waited for the kernels of a graph: all, or those of a step of this size. With the
        kernels of all shapes with plain sampling, it has those of every mixed one."""
        if self._has_all or (self._has_plain and key.kind == "mixed" and key.sampling in (None, PLAIN)):
            return True
        return any(replace(shape, num_reqs=key.num_reqs) == key for shape in self.compiled)

    def capture(self, key: GraphKey, capture: Callable[[Callable[[], bool]], Capture | None]) -> Capture | None:
        """Capture a shape; None: kernels of it are not ready. The next attempt waits for those that this one missed.
        ``capture``: as `Device.capture`, of the step of this shape."""
        if any(kernel.kernel is None for kernel in self._missing.get(key, ())):
            return None
        self._note_missed()
        missing: list[FutureKernel] = []

        def may_capture() -> bool:
            missing.extend(self.ahead.take_missed())
            return not missing

        captured = capture(may_capture)
        self._missing[key] = missing
        if others := self.ahead.take_missed_optional():
            self._without[key] = [*others]
        sampling = "" if key.sampling in (None, PLAIN) else f" {key.sampling}"
        verb = "tried to capture" if captured is None else "captured"
        self._notes.append(f"{verb} {key.kind} {key.num_reqs} {key.num_tokens}{sampling}")
        if captured is None:
            self._note_missed(others)
        return captured

    def take_outdated(self) -> list[GraphKey]:
        """Graphs that were captured without optional kernels that are ready now."""
        ready = [key for key, kernels in self._without.items() if all(kernel.kernel for kernel in kernels)]
        for key in ready:
            del self._without[key]
        return ready

    def take_notes(self) -> list[str]:
        """What the steps since the last call did beside their work: other paths that they took, and captures."""
        self._note_missed()
        notes, self._notes = self._notes, []
        return notes

    def _note_missed(self, *others: Mapping[FutureKernel, str]) -> None:
        missed = self.ahead.take_missed(), self.ahead.take_missed_optional(), *others
        names = sorted({name for kernels in missed for name in kernels.values()})
        self._notes = [*self._notes[-_MOST_NOTES:], *(f"{name} {NOT_COMPILED}" for name in names)]

    def close(self) -> None:
        """Cancel what has not started."""
        self.ahead.close()

    def _queue(self, shapes: Sequence[GraphKey], begin: float = 0.0) -> Compilations:
        try:
            with torch.inference_mode(), self._shortened():
                return self.ahead.queue(lambda: self._run(shapes, "what it launches is not compiled ahead"), begin)
        except BaseException:
            self.ahead.close()
            raise

    def _run(self, shapes: Sequence[GraphKey], effect: str) -> None:
        for shape in shapes:
            try:
                self._make_step(shape)()
            except RuntimeError as error:  # A start must not fail for this. If the step is wrong, running it will.
                logger.warning("%s: %s: %s", shape, effect, error)
