"""What a runner does before the first request comes: kernels are compiled, and every buffer is touched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fleetfoot.ops.compile_ahead import Compilations, CompileAhead
from fleetfoot.runner.capture_table import EVERYTHING, GraphKey, SamplingVariant
from fleetfoot.sampling.params import SamplingParams
from fleetfoot.scheduler.output import NewRequest, SchedulerOutput

logger = logging.getLogger(__name__)

NAME = "warm-up"
_PROMPT_TOKENS = 1024
"""Of a prompt that no graph and no kernel for short queries serves."""
_VARIANTS = (SamplingVariant(filters=True), EVERYTHING)
"""Of sampling, which together launch what it has; edited logits are of another type."""


def warm_up_steps(max_num_batched_tokens: int, max_model_len: int, block_size: int) -> list[SchedulerOutput]:
    """A prefill and a decode of one request, in row 0 and block 0.

    Rows and blocks are the scheduler's, which knows nothing of this; what is left in them is written over before anyone
    reads it.
    """
    length = max(1, min(4, block_size, max_num_batched_tokens, max_model_len - 1))
    request = NewRequest(
        request_id=NAME,
        row=0,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=[0],
        params=SamplingParams(max_tokens=2, temperature=1.0),
        seed=0,
        stop_token_ids=frozenset(),
        bad_words_token_ids=[],
    )
    prefill = SchedulerOutput(
        step=-2,
        rows=[0],
        num_scheduled_tokens=[length],
        num_decodes=int(length == 1),
        num_sampled=1,
        total_num_scheduled_tokens=length,
        new_requests=[request],
    )
    decode = SchedulerOutput(
        step=-1,
        rows=[0],
        num_scheduled_tokens=[1],
        num_decodes=1,
        num_sampled=1,
        total_num_scheduled_tokens=1,
    )
    return [prefill, decode]


def eager_shape(step: SchedulerOutput, drafting: int | None) -> GraphKey:
    """The shape of a step of one request that no graph serves."""
    kind = "decode" if step.num_decodes else "mixed"
    return GraphKey(kind, 1, step.total_num_scheduled_tokens, drafting=drafting)


def prompt_shape(max_num_batched_tokens: int) -> GraphKey:
    """A step that serving begins with: it is a prompt, and too long for the graphs."""
    return GraphKey("mixed", 1, min(_PROMPT_TOKENS, max_num_batched_tokens))


def later_shapes(captured: Sequence[GraphKey], num_drafts: int) -> list[GraphKey]:
    """Steps whose kernels are those of all that serving may meet.

    Args:
        captured: the shapes that graphs serve.
    """
    shapes = [replace(shape, drafting=num_drafts or None) for shape in captured]
    return shapes + [replace(shape, sampling=variant) for variant in _VARIANTS for shape in shapes[:1]]


@dataclass(frozen=True, slots=True)
class KernelsUnderWay:
    """Kernels that are compiled while the warm-up runs, and behind it."""

    ahead: CompileAhead
    prompt: Compilations

    def wait(self) -> None:
        """For those that the first prompt needs."""
        self.prompt.wait()

    def close(self) -> None:
        """Give up what has not begun."""
        self.ahead.close()


def compile_kernels(
    make_step: Callable[[GraphKey], Callable[[], object]],
    first: Sequence[GraphKey],
    prompt: GraphKey,
    later: Sequence[GraphKey],
) -> KernelsUnderWay:
    """Compile what the warm-up is going to launch, and begin with what serving will launch besides.

    Logs how many kernels there are, and the seconds until the warm-up can go on.

    Args:
        make_step: a step of one shape, of padding requests alone.
        first: the shapes of the warm-up, whose kernels are waited for.
        prompt: queued before them, for its kernel takes the longest to compile.
        later: queued behind them if any kernel had to be compiled: where none had, an earlier start has compiled these.
    """
    begin = time.perf_counter()
    ahead = CompileAhead()

    def queue(shapes: Sequence[GraphKey]) -> Compilations:
        return ahead.queue(lambda: [make_step(shape)() for shape in shapes])

    try:
        with torch.inference_mode():
            of_prompt, of_warm_up = queue([prompt]), queue(first)
            num_failed = of_warm_up.wait()
            logger.info(
                "kernels: %d compiled by %d threads, %d found in the cache, %d failed: %.2f s",
                ahead.num_compiled,
                ahead.num_threads,
                ahead.num_found,
                num_failed,
                time.perf_counter() - begin,
            )
            if ahead.num_compiled:
                queue(later)
    except BaseException:
        ahead.close()
        raise
    ahead.finish()
    return KernelsUnderWay(ahead, of_prompt)
