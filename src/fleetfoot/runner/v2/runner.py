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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from fleetfoot.fusion import LayerFusion
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, can_compile_ahead
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import SchedulerOutput, TokenMasks, WarmUpOutput
from fleetfoot.runner.base import CompiledKernels, ModelRunner, SampledTokenSync
from fleetfoot.runner.graphs import BatchShape, Capture, CaptureTable, GraphKey, GraphManager
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Device, open_device
from fleetfoot.runner.v2.drafting import Drafting, newest_tokens
from fleetfoot.runner.v2.grammar_masks import GrammarMasks
from fleetfoot.runner.v2.input_batch import InputBatch, InputBuffers, logits_batch, logits_metadata, split_decodes
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.step_graphs import StepGraphs, TwoGraphs
from fleetfoot.runner.v2.warm_up import (
    KernelCompiler,
    captures_of_start,
    eager_shape,
    later_shapes,
    library_shapes,
    prompt_shapes,
    waits_for,
    warm_up_steps,
)
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.sampler_v2 import Sampler
from fleetfoot.sampling.shape import PLAIN
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification, LogitsBatch
from fleetfoot.weights.loading import ModelLoader

logger = logging.getLogger(__name__)


def open_compiler(
    num_ranks: int,
    device: torch.device,
    on_compiled: Callable[[int], object] = lambda number: None,
    pool: CompilePool | None = None,
) -> CompileAhead | None:
    """`CompileAhead.of_rank`; None: no kernels are compiled for ``device``, and ``pool`` is closed.

    Without a pool, processes import the compiler from now on, for seconds, so this comes before all that a start waits
    for.
    """
    if can_compile_ahead(device):
        return CompileAhead.of_rank(num_ranks, device, on_compiled, pool)
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
        self.graphs = GraphManager(
            capture_table or CaptureTable(),
            self._capture if can_capture else None,
            includes_sampling=self._pipeline.is_last_rank,
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._fusion = fusion
        self._ahead = ahead or open_compiler(1, self.device.torch_device)
        self._compiler: KernelCompiler | None = None
        self._has_failed_to_prepare, self._num_eager = False, 0
        self._serving: Callable[[], AbstractContextManager[None]] = nullcontext  # the context of a step

    # --- start ------------------------------------------------------------------------------------------------------

    def _load(self) -> CausalLM:
        model = super()._load()
        fuse(model.model.layers, self._loader.context, [self._fusion[layer].is_fused for layer in model.layers])
        return model

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        self._warm_up_blocks = layout.first_blocks
        self._step_graphs = StepGraphs(self.device, self.graphs.forwards, self._parts, model.shortened)
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
        self._sampler = Sampler(state.sampling, verification, kernels, model.compute_logits, model.config.vocab_size)
        self._iota = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self.device.torch_device)
        self._masks = GrammarMasks(self.device, max_num_seqs * (1 + num_drafts), model.config.vocab_size)
        self._drafting = Drafting(self._draft_settings, state, kernels, max_model_len)
        self._token_sync = SampledTokenSync(
            self._pipeline, num_drafts, self.device.torch_device, self._apply_sampled_tokens
        )

    def warm_up(self) -> None:
        lengths = self._max_num_batched_tokens, self._max_model_len, self._state.block_size
        steps = warm_up_steps(*lengths, self._warm_up_blocks)
        if self._ahead is not None:
            assert self._model is not None
            group = self._loader.context.groups.tensor
            self._compiler = KernelCompiler(self._step_graphs.step, self._model.shortened, self._ahead, group)
            in_library, later = library_shapes(self._max_num_batched_tokens), self._later_shapes()
            self._compiler.compile_first(self._first_shapes(steps), in_library, later)
        self._loader.context.groups.tensor.connect()
        for scheduler_output in steps:
            self._run_warm_up_step(scheduler_output)
        self._sampler.remove(0)
        self._token_sync.receive(steps[-1].step)
        with torch.inference_mode():
            self.graphs.capture_first()
        self.graphs.num_steps.clear()
        if self._compiler is not None:
            most = captures_of_start(len(self._fusion))
            with torch.inference_mode(), self._compiler.ahead.serving():  # a shape without a kernel is not captured
                self.graphs.capture_common(self._compiler.has_kernels, most)
            self._compiler.take_notes()
            self._compiler.compile_later(self._later_shapes())
            self._serving = self._compiler.ahead.serving

    def _first_shapes(self, steps: Sequence[SchedulerOutput]) -> list[GraphKey]:
        """The shapes of the warm-up's steps, of the graphs that it captures, and of prompts."""
        num_processes = 0 if self._ahead is None else self._ahead.num_processes
        later = (shape for shape in self._later_shapes() if waits_for(shape, num_processes))
        shapes = [*prompt_shapes(self._max_num_batched_tokens), *self.graphs.first_keys, *later]
        for step in steps:
            drafting = self._drafting.num_to_propose(step)
            _, key = self.graphs.dispatch(step, sampling=PLAIN, drafting=drafting)
            shapes += [] if key is None else [key]
            if key is None or key.sampling is None:  # behind the forward pass of a graph the step is eager
                shapes.append(eager_shape(step, drafting))
        return shapes

    def _later_shapes(self) -> list[GraphKey]:
        table = self.graphs.table
        return later_shapes(table.keys, table.fine, self._draft_settings.num_drafts)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _forward(self, scheduler_output: SchedulerOutput) -> None:
        """From the staged updates to the hidden states, or in a graph to the drafts."""
        numbers = scheduler_output.num_kernels
        self._advance(numbers[self._pipeline.rank] if numbers else None)
        with torch.inference_mode(), self._serving():
            self._run_forward(scheduler_output)

    def _advance(self, num_kernels: int | None) -> None:
        """Use kernels that are compiled: see `CompileAhead.advance`."""
        if self._compiler is not None:
            self._compiler.ahead.advance(num_kernels)
            self.graphs.outdate(self._compiler.take_outdated())

    def _run_forward(self, scheduler_output: SchedulerOutput) -> None:
        self._token_sync.receive(scheduler_output.awaited_step)
        self._stage_updates(scheduler_output)
        sampling = self._sampler.variant if self._sampler.fits_graph else None
        if sampling is not None and scheduler_output.structured:
            sampling = replace(sampling, masks=True)
        drafting = self._drafting.num_to_propose(scheduler_output)
        shape, key = self.graphs.dispatch(scheduler_output, sampling=sampling, drafting=drafting)
        graph = None if key is None else self.graphs.get(key)  # a first capture must precede the step's staged writes
        if key is not None and graph is None and (graph := self.graphs.forwards.get(key.forward)) is None:
            shape = self.graphs.without_graph(scheduler_output, key)
        query_start_loc = self._buffers.query_start_loc(shape, scheduler_output.num_scheduled_tokens)
        self._state.staging.apply_staged_writes(scheduler_output.rows, query_start_loc, shape.padded_reqs)
        is_warm_up = isinstance(scheduler_output, WarmUpOutput)
        batch = self._buffers.batch(shape, scheduler_output.rows, is_warm_up=is_warm_up)
        if graph is None:
            self._buffers.fill(batch)
            received = self._pipeline.receive(shape.num_tokens)
            step_output = self._run_model(batch, received, all_tokens=self._sampler.prompt_logprobs.is_active)
        else:
            self._pipeline.receive(shape.num_tokens)  # into the buffer that the graph reads
            graph.replay()
            step_output = graph.output
            if step_output.packed is None and not isinstance(graph, TwoGraphs) and self._pipeline.is_last_rank:
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

    def _sample(self, masks: TokenMasks | None) -> AsyncOutput:
        """From the hidden states to the output; of a graph that has sampled, only the copies are left."""
        with torch.inference_mode(), self._serving():
            return self._run_sample(masks)

    def _run_sample(self, masks: TokenMasks | None) -> AsyncOutput:
        assert self._execute_state is not None
        (scheduler_output, (batch, step_output, graph)), self._execute_state = self._execute_state, None
        shape, output = batch.shape, AsyncOutput(self.device)
        has_masks = bool(scheduler_output.structured)
        if has_masks:
            self._masks.upload(masks)
            if isinstance(graph, TwoGraphs):
                graph.sampling.replay()
                step_output = graph.sampling.output
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
        num_to_propose = self._drafting.num_to_propose(scheduler_output)
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

    def _capture(self, key: GraphKey) -> Capture | None:
        capture = partial(self._step_graphs.capture, key)
        return capture() if self._compiler is None else self._compiler.capture(key, capture)

    def prepare(self) -> bool:
        if self._compiler is None or self._has_failed_to_prepare or self._loader.context.groups.tensor.size > 1:
            return False  # ranks capture in the same step
        try:
            self._advance(None)
            with torch.inference_mode(), self._serving():
                return self.graphs.capture_next()
        except Exception as error:  # no request needs it
            self._has_failed_to_prepare = True
            logger.warning("no more graphs are captured between requests: %s: %s", type(error).__name__, error)
            return False

    def wait_for_kernels(self) -> CompiledKernels:
        if self._ahead is None:
            return CompiledKernels()
        num_failed = self._ahead.wait_for_all()
        return CompiledKernels(self._ahead.num_found, self._ahead.num_compiled, num_failed)

    def take_notes(self) -> list[str]:
        """What the steps since the last call did beside their work, where kernels are compiled; for benchmarks."""
        if self._compiler is None:
            return []
        num_eager, self._num_eager = self._num_eager, self.graphs.num_steps["eager"]
        return [*self._compiler.take_notes(), *(["ran eagerly"] if self._num_eager > num_eager else [])]

    def _parts(self, key: GraphKey) -> tuple[Callable[[], StepOutput], Callable[[StepOutput], StepOutput]]:
        """Both parts of a step of padding requests: preparation and forward, and from its output to the drafts."""
        shape = BatchShape.of_graph(key)
        batch = self._buffers.batch(shape, [], is_warm_up=True)
        self._state.staging.clear_on_device(self._buffers.query_start_loc(shape, [0] * key.num_reqs))

        def forward() -> StepOutput:
            self._buffers.fill(batch)
            if key.splits_decodes:
                split_decodes(batch, self._iota)
            received = self._pipeline.buffers(key.num_tokens)
            return self._run_model(batch, received, all_tokens=key.sampling is None)

        def sample(step_output: StepOutput) -> StepOutput:
            variant = key.sampling
            if isinstance(step_output.hidden_states, IntermediateTensors) or variant is None:
                return step_output
            rows, logits = self._logits(batch, step_output)
            masks = self._masks.of_rows(len(logits)) if variant.masks else None
            sampled = self._sampler.sample(logits, rows, variant, masks)
            samples, packed = sampled.samples, sampled.samples.packed()
            self._post_update(batch, samples)
            self._drafting.propose(batch, step_output.hidden_states, samples, key.drafting)
            drafts = self._drafting.proposed(batch, len(samples.token_ids)) if variant.masks else None
            message = self._sampled_token_message(batch, samples)
            return StepOutput(step_output.hidden_states, rows, packed, sampled.logprobs, message, drafts)

        return forward, sample

    @torch.inference_mode()
    def _forward_padding(self, num_tokens: int) -> torch.Tensor | IntermediateTensors:
        shape = BatchShape.of_graph(GraphKey("decode", num_tokens, num_tokens))
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
