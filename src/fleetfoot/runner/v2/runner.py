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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fleetfoot.fusion import LayerFusion
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, DryPasses
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.model_state import StateSizes
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import Agreement, SchedulerOutput, TokenMasks, WarmUpOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.graphs import BatchShape, CaptureTable, GraphKey
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Device, open_device
from fleetfoot.runner.v2.device_step import DeviceStep, StepOutput
from fleetfoot.runner.v2.drafting import Drafting
from fleetfoot.runner.v2.grammar_masks import NO_MASKS, GrammarMasks, NoMasks
from fleetfoot.runner.v2.input_batch import InputBatch, InputBuffers, logits_batch
from fleetfoot.runner.v2.padding_work import PaddingWork, open_compiler
from fleetfoot.runner.v2.sampled_tokens import DeviceTokenSync
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.step_graphs import StepGraphs
from fleetfoot.runner.v2.warm_up import EagerStep, library_steps, warm_up_steps
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.sampler_v2 import Sampler
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification
from fleetfoot.weights.loading import ModelLoader


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
        self.graphs = StepGraphs(self.device, self._capture_table, has_sampling=self._pipeline.is_last_rank)

    # --- start ------------------------------------------------------------------------------------------------------

    def _load(self) -> CausalLM:
        model = super()._load()
        fuse(model.model.layers, self._loader.context, [self._fusion[layer].is_fused for layer in model.layers])
        return model

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        self._warm_up_blocks = layout.first_blocks
        kernels, num_drafts, device = self._kernels, self._draft_settings.num_drafts, self.device.torch_device
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
        self._masks = GrammarMasks(self.device, max_num_seqs * (1 + num_drafts), vocab_size)
        self._drafting = Drafting(self._draft_settings, state, kernels, max_model_len)
        self._family = model.make_state(StateSizes(max_num_seqs, self._max_num_batched_tokens, device))
        self._token_sync = token_sync = DeviceTokenSync(self._pipeline, state, kernels, self._family)
        self._step_on_device = DeviceStep(
            model, self._kv_caches, kernels, state, self._buffers, self._sampler, self._masks, self._drafting,
            token_sync, self._family, torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device),
        )  # fmt: skip
        table, is_last = self._capture_table, self._pipeline.is_last_rank
        most = max((key.shape.num_tokens for key in table.graphs if key.part == "sampling"), default=0) * is_last
        hidden = torch.zeros((most, model.config.hidden_size), dtype=self._loader.context.dtype, device=device)
        limits = max_num_seqs, self._max_num_batched_tokens
        self._padding = PaddingWork(self._step_on_device, table, self._pipeline, *limits, hidden)

    def warm_up(self) -> None:
        if self._ahead is not None:
            group = self._loader.context.groups.tensor
            self.kernels = self._padding.compile(self._ahead, self.graphs.keys, group)
        self._loader.context.groups.tensor.connect()
        lengths = self._max_num_batched_tokens, self._max_model_len, self._state.block_size
        steps = warm_up_steps(*lengths, self._warm_up_blocks)
        for scheduler_output in steps:
            self._run_warm_up_step(scheduler_output)
        self._sampler.remove(0)
        self._family.remove(0)
        self._token_sync.receive(steps[-1].step)
        with torch.inference_mode():
            if self._ahead is not None:
                assert self._model is not None
                works = map(self._padding.eager, map(EagerStep, library_steps(self._max_num_batched_tokens)))
                with self._model.shortened():
                    for work in (*self._padding.not_dry, *works):
                        work()
            self.capture_graphs()
        self.graphs.num_steps.clear()

    def queue_kernels(self, passes: DryPasses) -> None:
        """Request the kernels that `warm_up` compiles."""
        self._padding.queue(passes, self.graphs.keys, self._loader.context.groups.tensor)

    def capture_graphs(self) -> None:
        """Capture all graphs of this rank."""
        assert self._model is not None
        self.graphs.capture_all(self._padding.of_graph, self._model.shortened)

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
            rows_of_ranks = scheduler_output.agreement.num_tokens
            step_output = self._step_on_device.forward(
                batch, self._pipeline.receive, reads_all=reads_all, rows_of_ranks=rows_of_ranks
            )
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
            self._family.add(request)
        if scheduler_output.new_block_ids:
            state.stage_new_blocks(scheduler_output.new_block_ids)
        if scheduler_output.new_group_block_ids:
            state.stage_new_group_blocks(scheduler_output.new_group_block_ids)
        state.stage_snapshots(scheduler_output)

    def _free_rows(self, scheduler_output: SchedulerOutput) -> None:
        for _, row in scheduler_output.finished:
            self._sampler.remove(row)
            self._family.remove(row)

    @torch.inference_mode()
    def _sample(self, masks: TokenMasks | None) -> AsyncOutput:
        """From the hidden states to the output; of a graph that has sampled, only the copies are left."""
        assert self._execute_state is not None
        (scheduler_output, (batch, step_output, graph)), self._execute_state = self._execute_state, None
        shape, output = batch.shape, AsyncOutput(self.device)
        step_masks = self._masks if scheduler_output.structured else NO_MASKS
        step_masks.upload(masks)
        if graph is not None and graph.waits_for_masks:
            step_output = graph.sample()
            step_masks.used()
        if step_output.packed is not None:
            self._send_captured(batch, step_output, output)
            return output
        prompt_logprobs = self._sampler.prompt_logprobs.collect(step_output.hidden_states, scheduler_output)
        for index, position, tensors in prompt_logprobs:
            output.send_prompt_logprobs(index, position, tensors)
        samples = None
        if shape.num_sampled:
            samples = self._sample_logits(batch, step_output, output, step_masks)
            output.send_tokens(samples.packed(), shape.num_decodes, shape.num_drafts)
        num_to_propose = self._drafting.number(scheduler_output.num_to_propose)
        message = self._step_on_device.finish(batch, step_output, samples, num_to_propose)
        if scheduler_output.structured and (drafts := self._drafting.proposed(batch, shape.num_sampled)) is not None:
            output.send_drafts(drafts)
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
        self._token_sync.send(None if message is None else message[: shape.num_sampled])

    def _sample_logits(
        self, batch: InputBatch, step_output: StepOutput, output: AsyncOutput, masks: GrammarMasks | NoMasks
    ) -> DeviceSamples:
        """Sample with the features that the running requests use, and queue the copies of logprobs."""
        rows, logits = self._step_on_device.logits(batch, step_output)  # [num_logits, vocab_size]
        sampled = self._sampler(logits, rows, masks.of_rows(len(logits)))
        masks.used()
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

    @torch.inference_mode()
    def _forward_padding(self, agreement: Agreement) -> torch.Tensor | IntermediateTensors:
        shape = self.graphs.table.agreed(agreement)
        graph = None if shape is None else self.graphs.captured.get(GraphKey("forward", shape))
        if shape is None or graph is None:
            return self._padding.forward(agreement.num_tokens)
        self._padding.clear(shape)
        self._pipeline.receive(shape.num_tokens)
        graph.replay()
        hidden_states: torch.Tensor | IntermediateTensors = graph.output.hidden_states
        return hidden_states

    def shutdown(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self.graphs.drop_all()
        super().shutdown()
