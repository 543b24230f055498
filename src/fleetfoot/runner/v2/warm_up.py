"""Warm-up: the steps that run, and the kernels that are compiled, before the first request."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from fleetfoot.kernels.runtime.compile_ahead import Compilations, CompileAhead
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest, SchedulerOutput, WarmUpOutput
from fleetfoot.runner.graphs import MIXED_TOKENS, GraphKey
from fleetfoot.sampling.shape import EVERYTHING, SamplingVariant

logger = logging.getLogger(__name__)

NAME = "warm-up"
_PROMPT_TOKENS = 1024
"""The length of a prompt for which no graph and no kernel for short queries is used."""
_LATER_AT_ONCE = 4
"""Processes that compile kernels while the engine serves, on all ranks together. Each imports torch first."""
_VARIANTS = (SamplingVariant(filters=True), SamplingVariant(filters=True, other_filters=True), EVERYTHING)
"""Variants that together launch all kernels of sampling; processed logits have another dtype."""


def warm_up_steps(max_num_batched_tokens: int, max_model_len: int, block_size: int) -> list[WarmUpOutput]:
    """A prefill and a decode of one request, in row 0 and block 0.

    They bypass the scheduler. What they leave in rows and blocks is overwritten before it is read.
    """
    length = max(1, min(4, block_size, max_num_batched_tokens, max_model_len - 1))
    request = Request(NAME, array("i", [0] * length), SamplingParams(temperature=1.0), max_tokens=2, seed=0)
    request.row, request.block_ids = 0, [0]

    def step(number: int, num_tokens: int, new_requests: list[NewRequest]) -> WarmUpOutput:
        num_decodes = int(num_tokens == 1)
        return WarmUpOutput(number, [0], [num_tokens], num_decodes, 1, num_tokens, new_requests=new_requests)

    return [step(-2, length, [NewRequest.of(request)]), step(-1, 1, [])]


def eager_shape(step: SchedulerOutput, drafting: int | None) -> GraphKey:
    """The shape of an eager step of one request."""
    kind = "decode" if step.num_decodes else "mixed"
    return GraphKey(kind, 1, step.total_num_scheduled_tokens, drafting=drafting)


def later_shapes(captured: Sequence[GraphKey], num_drafts: int, max_num_batched_tokens: int) -> list[GraphKey]:
    """Steps that together launch the kernels of serving: first a prompt that is too long for most graphs, and one that
    fills a step. ``captured``: the shapes of graphs."""
    lengths = sorted({min(_PROMPT_TOKENS, max_num_batched_tokens), max_num_batched_tokens})
    prompts = [GraphKey("mixed", 1, length) for length in lengths]
    compiled = (shape for shape in captured if shape.kind != "mixed" or shape.num_tokens <= MIXED_TOKENS[-1])
    shapes = [replace(shape, drafting=num_drafts or None) for shape in compiled]
    return [*prompts, *shapes, *(replace(shape, sampling=variant) for variant in _VARIANTS for shape in shapes[:1])]


class KernelCompiler:
    """Compiles the kernels of the warm-up, and afterwards the other kernels of serving. ``make_step``: a step of one
    shape, with padding requests only; ``shortened``: a context in which steps run few layers, which launch the kernels
    of all; ``num_ranks``: ranks that compile at the same time."""

    def __init__(
        self,
        make_step: Callable[[GraphKey], Callable[[], object]],
        shortened: Callable[[], AbstractContextManager[None]],
        num_ranks: int = 1,
    ) -> None:
        self._make_step = make_step
        self._shortened = shortened
        self._later_at_once = max(1, _LATER_AT_ONCE // num_ranks)
        self.ahead = CompileAhead()
        self.later = Compilations([])
        """The compilations of `compile_later`. Serving does not wait for them."""

    def compile_first(self, shapes: Sequence[GraphKey]) -> None:
        """Compile the kernels of some shapes, wait for them, and log their number and the seconds."""
        begin, ahead = time.perf_counter(), self.ahead
        num_failed = self._queue(shapes).wait()
        message = "kernels: %d compiled by %d threads, %d found in the cache, %d failed: %.2f s"
        seconds = time.perf_counter() - begin
        logger.info(message, ahead.num_compiled, ahead.num_threads, ahead.num_found, num_failed, seconds)

    def compile_later(self, shapes: Sequence[GraphKey]) -> None:
        """Start compiling the kernels of other shapes, unless all kernels so far were cached: then an earlier start has
        compiled these too. It is the last call."""
        if self.ahead.num_compiled:
            self.later = self._queue(shapes, self._later_at_once)
        self.ahead.finish()

    def close(self) -> None:
        """Cancel what has not started."""
        self.ahead.close()

    def _queue(self, shapes: Sequence[GraphKey], at_once: int | None = None) -> Compilations:
        try:
            with torch.inference_mode(), self._shortened():
                return self.ahead.queue(lambda: self._run_dry(shapes), at_once)
        except BaseException:
            self.ahead.close()
            raise

    def _run_dry(self, shapes: Sequence[GraphKey]) -> None:
        for shape in shapes:
            try:
                self._make_step(shape)()
            except RuntimeError as error:  # A start must not fail for this. If the step is wrong, running it will.
                logger.warning("%s: what its step launches is not compiled ahead: %s", shape, error)
