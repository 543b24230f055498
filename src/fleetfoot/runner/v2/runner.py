"""Model Runner V2: state and inputs of a step are on the device, and the host only queues work.

A step, from top to bottom:

    execute_model   stage what changed; apply it on the device; prepare the inputs; forward
    sample_tokens   logits; sample and verify drafts; post-update of the rows; propose drafts; queue the copy of the
                    tokens to the host

From the preparation to the drafts a step can be one graph, which has sampled before `sample_tokens` is called. With
masks of grammars it is two, of which `sample_tokens` replays the second.

The host never waits for the device here. The next step reads the sampled tokens from the rows on the device; the host
gets them from `AsyncOutput.get`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any, cast

import torch

from fleetfoot.fusion import LayerFusion
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, can_compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.kernels.runtime.dry_tensors import DryPassError
from fleetfoot.kernels.runtime.row_buckets import distinct_rows
from fleetfoot.kernels.sampling import rows_per_chunk
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import SchedulerOutput, TokenMasks, WarmUpOutput
from fleetfoot.runner.base import ModelRunner, SampledTokenSync
from fleetfoot.runner.graphs import BatchShape, CaptureTable, GraphKey, StepShape, decode_sizes
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Device, open_device
from fleetfoot.runner.v2.drafting import Drafting, newest_tokens
from fleetfoot.runner.v2.grammar_masks import GrammarMasks
from fleetfoot.runner.v2.input_batch import InputBatch, InputBuffers, logits_batch, logits_metadata, split_decodes
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.step_graphs import StepGraphs
from fleetfoot.runner.v2.warm_up import EagerStep, eager_steps, library_steps, prompt, warm_up_steps
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.sampler_v2 import Sampler
from fleetfoot.sampling.shape import PLAIN, VARIANTS, SamplingVariant
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification, LogitsBatch
from fleetfoot.weights.loading import ModelLoader

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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tensors that the device part of a step returns, eagerly or from a graph."""

    hidden_states: torch.Tensor | IntermediateTensors
    """``[padded_tokens, hidden_size]``, or ``[num_logits, hidden_size]`` if only tokens with logits were computed; on a
    rank that is not the last of its pipeline, the input of the next rank."""
    logits_batch: LogitsBatch | None = None
    """The rows of logits, if ``hidden_states`` has their tokens only."""
    packed: torch.Tensor | None = None
    """`DeviceSamples.packed`, if the step has sampled."""
    logprobs: LogprobsTensors | None = None
    """Logprobs of each row of logits, if the step has sampled."""
    sync_message: torch.Tensor | None = None
    """The message of `SampledTokenSync`, if the step has sampled in a pipeline."""
    drafts: torch.Tensor | None = None
    """``[padded_reqs, k]``: verified next; if the step has sampled with masks, and there is speculative decoding."""


class ModelRunnerV2(ModelRunner):
    """Implements `ModelRunner`, with its arguments and: ``max_num_batched_tokens``, of a step; ``fusion``, which layers
    of the whole model are fused, and ``capture_table``, the shapes to capture as graphs, both from the plan;
    ``device``: copies, events and graphs; None: those of the loader's device; ``ahead``: from `open_compiler`; None:
    the runner opens one, as the only rank."""

    name = "v2"

    def __init__(
        self,
        loader: ModelLoader,
        *,
        max_num_batched_tokens: int,
        fusion: Sequence[LayerFusion],
        capture_table: CaptureTable | None = None,
        device: Device | None = None,
        ahead: CompileAhead | None = None,
        **options: Any,
    ) -> None:
        super().__init__(loader, **options)
        self._kernels = loader.context.ops
        self.device = device or open_device(loader.context.device, self._kernels)
        can_capture = self.device.has_graphs and loader.context.attention.is_capturable
        self._capture_table = capture_table if can_capture and capture_table is not None else CaptureTable()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._fusion = fusion
        self._ahead = ahead or open_compiler(1, self.device.torch_device)
        self._not_dry: list[Callable[[], object]] = []
        self.graphs = StepGraphs(self.device, None, self._work, nullcontext)  # none before there is a KV cache

    # --- start ------------------------------------------------------------------------------------------------------

    def _load(self) -> CausalLM:
        model = super()._load()
        fuse(model.model.layers, self._loader.context, [self._fusion[layer].is_fused for layer in model.layers])
        return model

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        self._warm_up_blocks = layout.first_blocks
        table, is_last = self._capture_table, self._pipeline.is_last_rank
        self.graphs = StepGraphs(self.device, table, self._work, model.shortened, has_sampling=is_last)
        kernels, num_drafts = self._kernels, self._draft_settings.num_drafts
        max_num_seqs, max_model_len = self._max_num_seqs, self._max_model_len
        self._state = state = DeviceState(
            self.device,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=layout.num_token_blocks,
            block_size=layout.block_size,
            max_num_batched_tokens=self._max_num_batched_tokens,
            vocab_size=model.config.vocab_size,
            num_draft=num_drafts,
            groups=layout.groups,
            stages_all_tokens=self._connector.fills_blocks,
        )
        sizes = max_num_seqs, self._max_num_batched_tokens, max_model_len
        self._buffers = InputBuffers(state, kernels, *sizes, layout.group_of_layers[: len(model.layers)])
        verification = DraftVerification(state.tables, kernels.accept_drafts)
        compute_logits, vocab_size, has_graphs = model.compute_logits, model.config.vocab_size, self.device.has_graphs
        self._sampler = Sampler(
            state.sampling, verification, kernels, compute_logits, vocab_size, is_as_captured=has_graphs
        )
        self._vocab_size = model.config.vocab_size
        self._iota = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self.device.torch_device)
        most = max((key.shape.num_tokens for key in table.graphs if key.part == "sampling"), default=0) * is_last
        context = self._loader.context
        self._hidden = torch.zeros((most, model.config.hidden_size), dtype=context.dtype, device=context.device)
        """What graphs of sampling read, of any forward pass."""
        self._masks = GrammarMasks(self.device, max_num_seqs * (1 + num_drafts), model.config.vocab_size)
        self._drafting = Drafting(self._draft_settings, state, kernels, max_model_len)
        self._token_sync = SampledTokenSync(
            self._pipeline, num_drafts, self.device.torch_device, self._apply_sampled_tokens
        )

    def warm_up(self) -> None:
        if self._ahead is not None:
            self._compile(self._ahead)
        self._loader.context.groups.tensor.connect()
        lengths = self._max_num_batched_tokens, self._max_model_len, self._state.block_size
        steps = warm_up_steps(*lengths, self._warm_up_blocks)
        for scheduler_output in steps:
            self._run_warm_up_step(scheduler_output)
        self._sampler.remove(0)
        self._token_sync.receive(steps[-1].step)
        with torch.inference_mode():
            if self._ahead is not None:
                assert self._model is not None
                works = map(self._eager_work, map(EagerStep, library_steps(self._max_num_batched_tokens)))
                with self._model.shortened():
                    for work in (*self._not_dry, *works):
                        work()
            self.graphs.capture_all()
        self.graphs.num_steps.clear()

    def _compile(self, ahead: CompileAhead) -> None:
        """Compile every kernel that steps launch, and log the numbers and seconds. Raises `KernelCompileError`."""
        assert self._model is not None
        begin, group = time.perf_counter(), self._loader.context.groups.tensor
        with closing(ahead), torch.inference_mode(), self._model.shortened():
            work = self._all_work()
            # what takes longest is compiled while the other dry passes run
            for part in (islice(work, _FIRST), work):
                ahead.queue(partial(self._run_dry, part), group.rank / group.size)
            self.kernels = ahead.wait()
        message = "kernels: %d compiled by %d processes, %d found in the cache: %.2f s"
        numbers = self.kernels.num_compiled, ahead.num_processes, self.kernels.num_found
        logger.info(message, *numbers, time.perf_counter() - begin)

    def _run_dry(self, works: Iterable[Callable[[], object]]) -> None:
        for work in works:
            try:
                work()
            except DryPassError as error:  # an operation that needs values: `warm_up` runs it
                logger.warning("a step is not compiled ahead: %s", error)
                self._not_dry.append(work)

    def _all_work(self) -> Iterator[Callable[[], object]]:
        """Work that together launches every kernel, with those that take longest first."""
        table, most = self.graphs.table, self._max_num_batched_tokens
        num_drafts, is_last = self._draft_settings.num_drafts, self._pipeline.is_last_rank
        yield self._eager_work(EagerStep(prompt(most)))
        for key in self.graphs.keys:
            if key.part == "forward" and (key.shape.is_decode or key.shape.num_tokens in table.split):
                yield self._work(key)
        steps = eager_steps(
            () if table.shapes else decode_sizes(self._max_num_seqs),
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=most,
            num_drafts=num_drafts,
        )
        yield from map(self._eager_work, steps)
        done: set[int] = set()
        while more := [rows for rows in distinct_rows(most) if rows not in done]:
            done.update(more)
            yield from (self._eager_work(EagerStep(prompt(rows))) for rows in more)
        if is_last:
            for kind, width in {"decode": 1, "uniform": 1 + num_drafts}.items():
                for number in {1, min(self._max_num_seqs, most // width)}:
                    shape = StepShape(kind, number, number * width)
                    yield from (partial(self._sample_padding, shape, variant, 0) for variant in VARIANTS)
            if num_drafts:  # a drafter runs in graphs, and eagerly where drafting begins and ends
                decodes = [shape for shape in table.shapes if shape.is_decode]
                for shape, number in product(decodes, (num_drafts, 0)):
                    yield partial(self._sample_padding, shape, PLAIN, number)
            chunk = rows_per_chunk(self._vocab_size, self.device.torch_device)
            yield from (partial(self._log_padding, rows) for rows in distinct_rows(chunk))
        if self._pipeline.size > 1:
            yield self._token_sync.apply_nothing

    def _sample_padding(self, shape: StepShape, variant: SamplingVariant, num_to_propose: int) -> None:
        """Eager sampling after a graph, in a dry pass."""
        batch = self._buffers.batch(BatchShape.of_graph(shape), [], is_warm_up=True)
        hidden = self._empty_hidden(shape.num_tokens)
        self._sample_all(batch, StepOutput(hidden), variant, self._drafting.number(num_to_propose))

    def _log_padding(self, num_rows: int) -> None:
        """Logprobs of prompts, in a dry pass."""
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=self.device.torch_device)
        self._sampler.prompt_logprobs.logprobs(self._empty_hidden(num_rows), token_ids, 0)

    def _empty_hidden(self, num_rows: int) -> torch.Tensor:
        context, size = self._loader.context, self._hidden.shape[1]
        return torch.empty((num_rows, size), dtype=context.dtype, device=context.device)

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _forward(self, scheduler_output: SchedulerOutput) -> None:
        """From the staged updates to the hidden states, or in a graph to the drafts."""
        self._token_sync.receive(scheduler_output.awaited_step)
        self._stage_updates(scheduler_output)
        sampling = self._sampler.variant if self._sampler.fits_graph else None
        if sampling is not None and scheduler_output.structured:
            sampling = replace(sampling, masks=True)
        reads_all = self._sampler.prompt_logprobs.is_active
        num_to_propose = scheduler_output.num_to_propose
        shape, graph = self.graphs.dispatch(scheduler_output, sampling, num_to_propose, reads_all=reads_all)
        query_start_loc = self._buffers.query_start_loc(shape, scheduler_output.num_scheduled_tokens)
        self._state.staging.apply_staged_writes(scheduler_output.rows, query_start_loc, shape.padded_reqs)
        is_warm_up = isinstance(scheduler_output, WarmUpOutput)
        batch = self._buffers.batch(shape, scheduler_output.rows, is_warm_up=is_warm_up)
        if graph is None:
            self._buffers.fill(batch)
            received = self._pipeline.receive(shape.num_tokens)
            step_output = self._run_model(batch, received, all_tokens=reads_all)
        else:
            self._pipeline.receive(shape.num_tokens)  # into the buffer that the graph reads
            step_output = graph.replay()
            if step_output.packed is None and not graph.waits_for_masks and self._pipeline.is_last_rank:
                batch, step_output = self._without_padding(batch, step_output, scheduler_output)  # the rest is eager
        hidden_states = step_output.hidden_states
        if isinstance(hidden_states, IntermediateTensors):
            sampled_rows = batch.idx_mapping[: shape.num_sampled].clone()  # the next step overwrites the buffer
            self._send_to_next_stage(hidden_states.first(shape.num_tokens), scheduler_output, sampled_rows)
        else:
            self._execute_state = scheduler_output, (batch, step_output, graph)

    def _without_padding(
        self, batch: InputBatch, step_output: StepOutput, scheduler_output: SchedulerOutput
    ) -> tuple[InputBatch, StepOutput]:
        """What the forward pass of a graph left, as if the step had run eagerly."""
        hidden_states = cast("torch.Tensor", step_output.hidden_states)
        shape = BatchShape.of_step(scheduler_output, None)
        own = self._buffers.batch(shape, batch.rows, is_warm_up=batch.metadata.is_warm_up)
        if step_output.logits_batch is None:
            return own, StepOutput(hidden_states[: shape.num_tokens])
        return own, StepOutput(hidden_states[: shape.num_sampled], logits_batch(own, shape.num_sampled))

    def _stage_updates(self, scheduler_output: SchedulerOutput) -> None:
        """Stage the rows of new requests and new blocks, and update what the host tracks of the rows."""
        state, staging = self._state, self._state.staging
        staging.begin()
        self._free_rows(scheduler_output)
        for request in scheduler_output.new_requests:
            state.stage_request(request)
            self._sampler.add(request)
        if scheduler_output.new_block_ids:
            state.stage_new_blocks(scheduler_output.new_block_ids)
        if scheduler_output.new_group_block_ids:
            state.stage_new_group_blocks(scheduler_output.new_group_block_ids)

    def _free_rows(self, scheduler_output: SchedulerOutput) -> None:
        for _, row in scheduler_output.finished:
            self._sampler.remove(row)

    @torch.inference_mode()
    def _sample(self, masks: TokenMasks | None) -> AsyncOutput:
        """From the hidden states to the output; of a graph that has sampled, only the copies are left."""
        assert self._execute_state is not None
        (scheduler_output, (batch, step_output, graph)), self._execute_state = self._execute_state, None
        shape, output = batch.shape, AsyncOutput(self.device)
        has_masks = bool(scheduler_output.structured)
        if has_masks:
            self._masks.upload(masks)
            if graph is not None and graph.waits_for_masks:
                step_output = graph.sample()
                self._masks.used()
        if step_output.packed is not None:
            self._send_captured(batch, step_output, output)
            return output
        prompt_logprobs = self._sampler.prompt_logprobs.collect(step_output.hidden_states, scheduler_output)
        for index, position, tensors in prompt_logprobs:
            output.send_prompt_logprobs(index, position, tensors)
        samples = None
        if shape.num_sampled:
            samples = self._sample_logits(batch, step_output, output, has_masks=has_masks)
            output.send_tokens(samples.packed(), shape.num_decodes, shape.num_drafts)
        self._post_update(batch, samples)
        num_to_propose = self._drafting.number(scheduler_output.num_to_propose)
        self._drafting.propose(batch, step_output.hidden_states, samples, num_to_propose)
        if has_masks and (drafts := self._drafting.proposed(batch, shape.num_sampled)) is not None:
            output.send_drafts(drafts)
        message = None if samples is None else self._sampled_token_message(batch, samples)
        if message is not None:
            self._token_sync.send(message)
        return output

    def _send_captured(self, batch: InputBatch, step_output: StepOutput, output: AsyncOutput) -> None:
        """Queue the copies of what a graph has sampled, without padding. The next replay overwrites its memory."""
        shape, packed, message = batch.shape, step_output.packed, step_output.sync_message
        assert packed is not None
        packed = packed[: shape.num_sampled] if shape.num_drafts else packed[:, : shape.num_sampled]
        output.send_tokens(packed.clone(), shape.num_sampled, shape.num_drafts)
        if step_output.logprobs is not None:
            logprobs = LogprobsTensors(step_output.logprobs.packed[: shape.num_logits].clone())
            self._send_logprobs(batch, logprobs, output)
        if step_output.drafts is not None:
            output.send_drafts(step_output.drafts[: shape.num_sampled].clone())
        if message is not None:
            self._token_sync.send(message[: shape.num_sampled])

    def _sample_logits(
        self, batch: InputBatch, step_output: StepOutput, output: AsyncOutput, *, has_masks: bool
    ) -> DeviceSamples:
        """Sample with the features that the running requests use, and queue the copies of logprobs."""
        rows, logits = self._logits(batch, step_output)  # [num_logits, vocab_size]
        sampled = self._sampler(logits, rows, self._masks.of_rows(len(logits)) if has_masks else None)
        if has_masks:
            self._masks.used()
        if sampled.logprobs is not None:
            self._send_logprobs(batch, sampled.logprobs, output)
        if large := self._sampler.large_logprobs(logits, sampled.token_ids, batch.rows_of_logits):
            logprobs, sizes = large
            output.send_logprobs(logprobs, sizes, range(len(sizes)))
        return sampled.samples

    def _send_logprobs(self, batch: InputBatch, logprobs: LogprobsTensors, output: AsyncOutput) -> None:
        """Queue the copy of logprobs of every row of logits, if a request of the batch uses them."""
        if counts := self._sampler.num_logprobs(batch.rows_of_logits):
            output.send_logprobs(logprobs, counts)

    # --- device work, eager or captured -----------------------------------------------------------------------------

    def _run_model(
        self, batch: InputBatch, intermediate_tensors: IntermediateTensors | None, *, all_tokens: bool
    ) -> StepOutput:
        """The forward pass. The last layer computes only the tokens that sampling or a drafter reads. ``all_tokens``:
        the hidden states of all tokens are read."""
        assert self._model is not None
        rows = metadata = None
        if not (all_tokens or self._drafting.reads_hidden or batch.shape.is_decode) and self._model.is_last:
            rows = logits_batch(batch, batch.shape.num_sampled)
            metadata = logits_metadata(batch, rows, self._iota)
        ctx = ForwardContext(batch.metadata, self._kv_caches, metadata, batch.metadata_of_layers)
        hidden_states = self._model(batch.input_ids, ctx, intermediate_tensors)
        if isinstance(hidden_states, IntermediateTensors):  # the step ends here, with every draft taken as accepted
            self._post_update(batch, None)
        return StepOutput(hidden_states, rows)

    def _logits(self, batch: InputBatch, step_output: StepOutput) -> tuple[LogitsBatch, torch.Tensor]:
        """The rows of logits, and ``[num_logits, vocab_size]``."""
        hidden_states, rows = step_output.hidden_states, step_output.logits_batch
        assert self._model is not None and isinstance(hidden_states, torch.Tensor)
        if rows is None:
            rows = logits_batch(batch, batch.shape.num_sampled)
            if rows.indices is not None:  # a pure decode reads all hidden states, in order
                hidden_states = hidden_states.index_select(0, rows.indices)
        return rows, self._model.compute_logits(hidden_states[: batch.shape.num_logits])

    def _post_update(self, batch: InputBatch, samples: DeviceSamples | None) -> None:
        """Advance every request by its query, and keep the newest tokens; None: no request sampled."""
        tables = self._state.tables
        if samples is None:
            nothing = tables.last_sampled[:0]
            sampled = (nothing.unsqueeze(1), nothing, nothing)
        else:
            sampled = (samples.token_ids, samples.num_sampled, samples.num_rejected)
        self._kernels.post_update(batch.idx_mapping, batch.query_start_loc, tables, *sampled)

    def _work(self, key: GraphKey) -> Callable[[], StepOutput]:
        """What a graph does, for padding requests."""
        step, table = key.shape, self.graphs.table
        shape = BatchShape.of_graph(step)
        batch = self._buffers.batch(shape, [], is_warm_up=True)
        self._state.staging.clear_on_device(self._buffers.query_start_loc(shape, [0] * step.num_reqs))
        reads_all = bool(table.num_drafts) and not step.is_decode  # to verify and to propose drafts, eagerly

        def forward() -> StepOutput:
            self._buffers.fill(batch)
            if step.kind == "split":
                split_decodes(batch, self._iota)
            return self._run_model(batch, self._pipeline.buffers(step.num_tokens), all_tokens=reads_all)

        def sample(step_output: StepOutput) -> StepOutput:
            assert key.sampling is not None
            num_to_propose = table.num_drafts if step.kind == "uniform" else 0
            return self._sample_all(batch, step_output, key.sampling, self._drafting.number(num_to_propose))

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

    def _sample_all(
        self, batch: InputBatch, step_output: StepOutput, variant: SamplingVariant, num_to_propose: int | None
    ) -> StepOutput:
        """From the hidden states to the drafts, without a copy to the host."""
        hidden_states = cast("torch.Tensor", step_output.hidden_states)
        rows, logits = self._logits(batch, step_output)
        masks = self._masks.of_rows(len(logits)) if variant.masks else None
        sampled = self._sampler.sample(logits, rows, variant, masks)
        samples, packed = sampled.samples, sampled.samples.packed()
        self._post_update(batch, samples)
        self._drafting.propose(batch, hidden_states, samples, num_to_propose)
        drafts = self._drafting.proposed(batch, len(samples.token_ids)) if variant.masks else None
        message = self._sampled_token_message(batch, samples)
        return StepOutput(hidden_states, rows, packed, sampled.logprobs, message, drafts)

    def _eager_work(self, step: EagerStep) -> Callable[[], object]:
        """A step without a graph, of padding requests; not what samplers other than the plain one launch."""
        shape, num_to_propose = step.shape, self._drafting.number(step.num_to_propose)
        batch = self._buffers.batch(shape, [], is_warm_up=True)

        def work() -> None:
            self._buffers.fill(batch)
            received = self._pipeline.buffers(shape.num_tokens)
            step_output = self._run_model(batch, received, all_tokens=step.reads_all)
            if isinstance(step_output.hidden_states, IntermediateTensors):
                return
            if shape.num_sampled:
                self._sample_all(batch, step_output, PLAIN, num_to_propose)
            else:
                self._post_update(batch, None)
                self._drafting.propose(batch, step_output.hidden_states, None, num_to_propose)

        return work

    @torch.inference_mode()
    def _forward_padding(self, num_tokens: int) -> torch.Tensor | IntermediateTensors:
        shape = BatchShape.of_graph(StepShape("decode", num_tokens, num_tokens))
        batch = self._buffers.batch(shape, [], is_warm_up=True)
        self._state.staging.clear_on_device(self._buffers.query_start_loc(shape, [0] * num_tokens))
        self._buffers.fill(batch)
        return self._run_model(batch, self._pipeline.receive(num_tokens), all_tokens=True).hidden_states

    # --- sampled tokens on the other ranks of a pipeline --------------------------------------------------------------

    def _sampled_token_message(self, batch: InputBatch, samples: DeviceSamples) -> torch.Tensor | None:
        """The message of `SampledTokenSync`, after drafting, with rows of padding at its end; None without a
        pipeline."""
        if self._pipeline.size == 1:
            return None
        # A step without new drafts leaves the old ones in its rows. They may be verified beside new drafts of other
        # requests, so all ranks need the same.
        drafts = self._state.tables.draft_tokens[batch.idx_mapping[: len(samples.token_ids)]]
        num_rejected = torch.where(samples.num_sampled > 0, samples.num_rejected, -1)
        return torch.cat((torch.stack((newest_tokens(samples), num_rejected), 1), drafts), 1).to(torch.int32)

    def _apply_sampled_tokens(self, rows: torch.Tensor, message: torch.Tensor, query_len: int) -> None:
        """Correct ``rows [n]`` on a rank that has not sampled."""
        tables, has_new = self._state.tables, message[:, 1] >= 0
        # the whole query was counted; a request without a new token is a decode that had reached its length
        num_rejected = torch.where(has_new, message[:, 1], query_len)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        newest = message[:, :1].contiguous()
        self._kernels.post_update(rows, starts, tables, newest, has_new.to(torch.int32), num_rejected.contiguous())
        if message.shape[1] > 2:
            tables.draft_tokens.index_copy_(0, rows.to(torch.int64), message[:, 2:].contiguous())

    def shutdown(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self.graphs.drop_all()
        super().shutdown()
