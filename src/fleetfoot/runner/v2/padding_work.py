"""The work of padding requests: what graphs capture, and the steps of which all kernels are compiled before the first
request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice, product

import torch

from fleetfoot.distributed.groups import PipelineGroup, RankGroup
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, CompiledKernels, DryPasses, can_compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.kernels.runtime.dry_tensors import DryPassError
from fleetfoot.kernels.runtime.row_buckets import distinct_rows
from fleetfoot.kernels.sampling import rows_per_chunk
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.runner.graphs import BatchShape, CaptureTable, GraphKey, StepShape, decode_sizes
from fleetfoot.runner.v2.device_step import DeviceStep, StepOutput
from fleetfoot.runner.v2.warm_up import EagerStep, eager_steps, prompt
from fleetfoot.sampling.shape import PLAIN, VARIANTS, SamplingVariant

logger = logging.getLogger(__name__)

_FIRST = 1
"""Steps of which the kernels are compiled while the other dry passes run."""


def open_compiler(num_ranks: int, device: torch.device, pool: CompilePool | None = None) -> CompileAhead | None:
    """`CompileAhead.of_rank`; None: no kernels are compiled for ``device``, and ``pool`` is closed.

    Without a pool, processes import the compiler from now on, for seconds, so this comes before all that a start waits
    for.
    """
    if can_compile_ahead(device):
        return CompileAhead.of_rank(num_ranks, device, pool)
    if pool is not None:
        pool.close()
    return None


class PaddingWork:
    """Makes functions that queue a step for padding requests: `of_graph`, and `eager`.

    ``table``: of the graphs; ``max_num_seqs``, ``max_num_batched_tokens``: of a step; ``hidden``: ``[n, hidden_size]``,
    what graphs of sampling read, of any forward pass.
    """

    def __init__(
        self,
        step: DeviceStep,
        table: CaptureTable,
        pipeline: PipelineGroup,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        hidden: torch.Tensor,
    ) -> None:
        self._step, self._table, self._pipeline, self._hidden = step, table, pipeline, hidden
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.not_dry: list[Callable[[], object]] = []
        """Work that `compile` could not do, because an operation needs values."""

    def compile(self, ahead: CompileAhead, keys: Iterable[GraphKey], group: RankGroup) -> CompiledKernels:
        """Compile every kernel that steps launch, and log the numbers and seconds. Raises `KernelCompileError`.
        ``keys``: the graphs; ``group``: of ranks that compile the same kernels."""
        begin = time.perf_counter()
        with closing(ahead):
            self.queue(ahead, keys, group)
            kernels = ahead.wait()
        message = "kernels: %d compiled by %d processes, %d found in the cache: %.2f s"
        numbers = kernels.num_compiled, ahead.num_processes, kernels.num_found
        logger.info(message, *numbers, time.perf_counter() - begin)
        return kernels

    def queue(self, passes: DryPasses, keys: Iterable[GraphKey], group: RankGroup) -> None:
        """Request every kernel that steps launch. Arguments as of `compile`."""
        with torch.inference_mode(), self._step.model.shortened():
            work = self.all(keys)
            # what takes longest is compiled while the other dry passes run
            for part in (islice(work, _FIRST), work):
                passes.queue(partial(self._run_dry, part), group.rank / group.size)

    def _run_dry(self, works: Iterable[Callable[[], object]]) -> None:
        for work in works:
            try:
                work()
            except DryPassError as error:  # an operation that needs values: `warm_up` runs it
                logger.warning("a step is not compiled ahead: %s", error)
                self.not_dry.append(work)

    def all(self, keys: Iterable[GraphKey]) -> Iterator[Callable[[], object]]:
        """Work that together launches every kernel, with those that take longest first."""
        table, most = self._table, self._max_num_batched_tokens
        num_drafts, is_last = self._step.state.num_draft, self._pipeline.is_last_rank
        yield self.eager(EagerStep(prompt(most)))
        for key in keys:
            if key.part == "forward" and (key.shape.is_decode or key.shape.num_tokens in table.split):
                yield partial(self._step_of_graph, key)
        steps = eager_steps(
            () if table.shapes else decode_sizes(self._max_num_seqs),
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=most,
            num_drafts=num_drafts,
        )
        yield from map(self.eager, steps)
        done: set[int] = set()
        while more := [rows for rows in distinct_rows(most) if rows not in done]:
            done.update(more)
            yield from (self.eager(EagerStep(prompt(rows))) for rows in more)
        if is_last:
            for kind, width in {"decode": 1, "uniform": 1 + num_drafts}.items():
                for number in {1, min(self._max_num_seqs, most // width)}:
                    shape = StepShape(kind, number, number * width)
                    yield from (partial(self._sample_padding, shape, variant, 0) for variant in VARIANTS)
            if num_drafts:  # a drafter runs in graphs, and eagerly where drafting begins and ends
                decodes = [shape for shape in table.shapes if shape.is_decode]
                for shape, number in product(decodes, (num_drafts, 0)):
                    yield partial(self._sample_padding, shape, PLAIN, number)
            chunk = rows_per_chunk(self._step.model.config.vocab_size, self._step.iota.device)
            yield from (partial(self._log_padding, rows) for rows in distinct_rows(chunk))
        if self._pipeline.size > 1:
            yield self._step.token_sync.apply_nothing

    def _sample_padding(self, shape: StepShape, variant: SamplingVariant, num_to_propose: int) -> None:
        """Eager sampling after a graph, in a dry pass."""
        batch = self._step.buffers.batch(BatchShape.of_graph(shape), [], is_warm_up=True)
        hidden = self._empty_hidden(shape.num_tokens)
        self._step.sample(batch, StepOutput(hidden), variant, self._step.drafting.number(num_to_propose))

    def _log_padding(self, num_rows: int) -> None:
        """Logprobs of prompts, in a dry pass."""
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self._step.iota.device)
        self._step.sampler.prompt_logprobs.logprobs(self._empty_hidden(num_rows), token_ids, 0)

    def _empty_hidden(self, num_rows: int) -> torch.Tensor:
        return self._hidden.new_empty((num_rows, self._hidden.shape[1]))

    def _step_of_graph(self, key: GraphKey) -> None:
        """`of_graph`, made in the pass that runs it."""
        self.of_graph(key)()

    def of_graph(self, key: GraphKey) -> Callable[[], StepOutput]:
        """What a graph does, for padding requests."""
        step, table = key.shape, self._table
        shape = BatchShape.of_graph(step)
        batch = self._step.buffers.batch(shape, [], is_warm_up=True)
        self.clear(step)
        reads_all = bool(table.num_drafts) and not step.is_decode  # to verify and to propose drafts, eagerly

        def forward() -> StepOutput:
            splits = step.kind == "split"
            return self._step.forward(batch, self._pipeline.buffers, reads_all=reads_all, splits_decodes=splits)

        def sample(step_output: StepOutput) -> StepOutput:
            assert key.sampling is not None
            num_to_propose = table.num_drafts if step.kind == "uniform" else 0
            return self._step.sample(batch, step_output, key.sampling, self._step.drafting.number(num_to_propose))

        def forward_alone() -> StepOutput:
            output = forward()
            if reads_all or isinstance(output.hidden_states, IntermediateTensors):
                return output
            hidden = self._hidden[: len(output.hidden_states)].copy_(output.hidden_states)
            return StepOutput(hidden, output.logits_batch)

        parts = {
            "forward": forward_alone,
            "sampling": lambda: sample(StepOutput(self._hidden[: step.num_tokens])),
            "step": lambda: sample(forward()),
        }
        return parts[key.part]

    def forward(self, rows_of_ranks: int) -> torch.Tensor | IntermediateTensors:
        """The output of the layers for a decode of no request, beside the steps of other ranks (`ForwardContext`)."""
        shape = StepShape("decode", 1, 1)
        self.clear(shape)
        batch = self._step.buffers.batch(BatchShape.of_graph(shape), [], is_warm_up=True)
        output = self._step.forward(batch, self._pipeline.receive, reads_all=True, rows_of_ranks=rows_of_ranks)
        return output.hidden_states

    def clear(self, step: StepShape) -> None:
        """Queue that the requests of the next step are padding."""
        starts = self._step.buffers.query_start_loc(BatchShape.of_graph(step), [0] * step.num_reqs)
        self._step.state.staging.clear_on_device(starts)

    def eager(self, step: EagerStep) -> Callable[[], object]:
        """A step without a graph, of padding requests; not what samplers other than the plain one launch."""
        shape, num_to_propose = step.shape, self._step.drafting.number(step.num_to_propose)

        def work() -> None:
            # Made in the pass that runs it: what a dry pass makes has no memory.
            batch = self._step.buffers.batch(shape, [], is_warm_up=True)
            step_output = self._step.forward(batch, self._pipeline.buffers, reads_all=step.reads_all)
            if isinstance(step_output.hidden_states, IntermediateTensors):
                return
            if shape.num_sampled:
                self._step.sample(batch, step_output, PLAIN, num_to_propose)
            else:
                self._step.finish(batch, step_output, None, num_to_propose)

        return work
