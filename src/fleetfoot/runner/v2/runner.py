"""Model Runner V2: state on the device, inputs made on the device, and a host that only queues.

A step, from top to bottom:

    execute_model   note what changed in the staging buffer; take it in on the device; gather inputs; forward
    sample_tokens   logits; sample, and verify drafts; write the results back into the rows; draft for the next step;
                    queue the copy of the tokens to the host; the KV connector

From the gathering to the drafts a step can be one graph, which then has sampled before `sample_tokens` is called.

Nothing here waits for the device. The tokens of a step reach the next one through the rows, on the device, and the
host by way of `AsyncOutput`, whenever it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, PipelineGroup
from fleetfoot.kernels.runtime.compile_ahead import can_compile_ahead
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.intermediate import IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.capture_table import CaptureTable, GraphKey
from fleetfoot.runner.contract import ExecuteModelState
from fleetfoot.runner.kv_cache import allocate_kv_cache
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Capture, Device, open_device
from fleetfoot.runner.v2.drafting import Drafting
from fleetfoot.runner.v2.graphs import GraphManager
from fleetfoot.runner.v2.input_batch import BatchShape, InputBatch, InputBuffers
from fleetfoot.runner.v2.logits import logits_batch, wanted_tokens
from fleetfoot.runner.v2.pipeline import SampledTokenSync
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.warm_up import KernelCompiler, eager_shape, later_shapes, warm_up_steps
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.sampler_v2 import Sampler
from fleetfoot.sampling.shape import PLAIN
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification, LogitsBatch
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings
from fleetfoot.weights.model_loader import ModelLoader


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step has left on the device."""

    hidden: torch.Tensor | IntermediateTensors
    """``[padded_tokens, hidden_size]``, or ``[num_logits, hidden_size]`` of the tokens that need logits; what goes to
    the next rank, if this one is not the last of its pipeline."""
    logits_batch: LogitsBatch | None = None
    """The rows of logits, if ``hidden`` has their tokens only."""
    packed: torch.Tensor | None = None
    """Of `DeviceSamples.packed`, if everything up to drafting was part of it."""
    logprobs: LogprobsTensors | None = None
    """Then also of the sampler, for each row of logits."""
    packet: torch.Tensor | None = None
    """Then also what the last rank of a pipeline sends to the others."""


class ModelRunnerV2:
    """Implements `ModelRunner`.

    Args:
        loader: builds the model, or a pipeline's part of it, when `load_model` is called.
        max_num_seqs: most requests in a step. max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request.
        capture_table: the shapes to capture as graphs, from the plan.
        device: copies and events; None: those of the loader's device.
        draft_settings: who makes drafts; on the last rank alone, but for their number.
        connector: moves KV; None: nobody does.
        pipeline: the ranks that the layers are spread over.
    """

    name = "v2"

    def __init__(
        self,
        loader: ModelLoader,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        capture_table: CaptureTable | None = None,
        device: Device | None = None,
        draft_settings: DraftSettings = NO_DRAFTING,
        connector: StepConnector | None = None,
        pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP,
    ) -> None:
        self.device = device or open_device(loader.context.device, loader.context.ops)
        can_capture = self.device.has_graphs and loader.context.attention.is_capturable
        self.graphs = GraphManager(
            capture_table or CaptureTable(), self._capture if can_capture else None, has_end=pipeline.is_last_rank
        )
        self._loader = loader
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._draft_settings = draft_settings
        self._connector = connector or NoConnector()
        self._pipeline = pipeline
        self._model: CausalLM | None = None
        self._kv_caches: list[torch.Tensor] = []
        self._pending: ExecuteModelState | None = None
        self._left: AsyncOutput | None = None  # the output of a step that ended in `execute_model`
        self._compiler: KernelCompiler | None = None

    # --- starting ---------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._model = self._loader.load()
        if self._draft_settings.drafter is not None:
            self._draft_settings.drafter.load_model(self._model)

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        if self._model is None:
            raise RuntimeError("initialize_kv_cache was called before load_model")
        kv_caches = allocate_kv_cache(layout, self.device.torch_device)
        num_layers = len(self._model.layers)
        self._kv_caches = kv_caches[:num_layers]
        if self._draft_settings.drafter is not None:
            self._draft_settings.drafter.bind_kv_caches(kv_caches[num_layers:])
        self._connector.register_kv_caches(kv_caches, layout)
        state = DeviceState(
            self.device,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            max_num_batched_tokens=self._max_num_batched_tokens,
            vocab_size=self._model.config.vocab_size,
            num_draft=self._draft_settings.num_drafts,
            stages_all_tokens=self._connector.fills_blocks,
        )
        self._state = state
        model, kernels = self._model, self._loader.context.ops
        self._buffers = InputBuffers(
            state, kernels, self._max_num_seqs, self._max_num_batched_tokens, self._max_model_len
        )
        verification = DraftVerification(state.tables, kernels.accept_drafts)
        self._sampler = Sampler(state.sampling, verification, kernels, model.compute_logits, model.config.vocab_size)
        self._iota = torch.arange(self._max_num_seqs + 1, dtype=torch.int32, device=self.device.torch_device)
        self._drafting = Drafting(self._draft_settings, state, self._max_model_len)
        self._token_sync = SampledTokenSync(self._pipeline, state, kernels)

    def warm_up(self) -> None:
        steps = warm_up_steps(self._max_num_batched_tokens, self._max_model_len, self._state.block_size)
        if can_compile_ahead(self.device.torch_device):
            num_ranks = self._loader.context.tensor_group.size * self._pipeline.size
            self._compiler = KernelCompiler(self._step, self._shortened, num_ranks)
            self._compiler.compile_first(self._first_shapes(steps))
        for scheduler_output in steps:
            self._forward(scheduler_output)
            if self._pending is not None:
                self._sample().get()
        self._sampler.remove(0)
        self._token_sync.receive_all()
        with torch.inference_mode():
            self.graphs.capture_first()
        self.graphs.num_steps.clear()
        if self._compiler is not None:
            self._compiler.compile_later(self._later_shapes())

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        """Steps have few layers meanwhile: enough for all kernels to be launched."""
        whole, kv_caches = self._model, self._kv_caches
        assert whole is not None
        self._model, kept = whole.shortened()
        self._kv_caches = [kv_caches[index] for index in kept]
        try:
            yield
        finally:
            self._model, self._kv_caches = whole, kv_caches

    def _first_shapes(self, steps: list[SchedulerOutput]) -> list[GraphKey]:
        """Of the warm-up's steps, and the graphs that it captures."""
        shapes = [*self.graphs.first_keys]
        for step in steps:
            drafting = self._drafting.wanted(step)
            _, key = self.graphs.dispatch(step, sampling=PLAIN, drafting=drafting)
            shapes.append(key or eager_shape(step, drafting))
        return shapes

    def _later_shapes(self) -> list[GraphKey]:
        """Each rank of a tensor group begins with others: it finds in the cache what the others have compiled."""
        shapes = later_shapes(self.graphs.keys, self._draft_settings.num_drafts, self._max_num_batched_tokens)
        group = self._loader.context.tensor_group
        begin = len(shapes) * group.rank // group.size
        return shapes[begin:] + shapes[:begin]

    # --- a step -----------------------------------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        if scheduler_output.is_idle:
            self._give_back(scheduler_output)
            self._left = AsyncOutput(self.device, self._connector.no_forward(scheduler_output))
            return None
        try:
            self._connector.pre_forward(scheduler_output)
            hidden = self._forward(scheduler_output, intermediate_tensors)
            if self._pending is None:  # the last writer of this rank's KV
                self._left = AsyncOutput(self.device, self._connector.post_forward(scheduler_output.finished_req_ids))
        except BaseException:
            self._connector.abandon()
            raise
        return hidden

    def sample_tokens(self, grammar_output: object | None) -> AsyncOutput:
        if self._left is not None:
            output, self._left = self._left, None
            return output
        finished = set() if self._pending is None else self._pending.finished_req_ids
        try:
            output = self._sample()
            output.kv_connector_output = self._connector.post_forward(finished)
        except BaseException:
            self._connector.abandon()
            raise
        return output

    @torch.inference_mode()
    def _forward(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        if self._model is None or not self._kv_caches:
            raise RuntimeError("execute_model was called before load_model and initialize_kv_cache")
        self._token_sync.receive_for(scheduler_output)
        self._note(scheduler_output)
        sampling = self._sampler.variant if self._sampler.fits_graph else None
        drafting = self._drafting.wanted(scheduler_output)
        shape, key = self.graphs.dispatch(scheduler_output, sampling=sampling, drafting=drafting)
        graph = None if key is None else self.graphs.get(key)  # captured, if need be, before this step is sent
        starts = self._buffers.query_start_loc(shape, scheduler_output.num_scheduled_tokens)
        self._state.staging.send(scheduler_output.rows, starts, shape.padded_reqs)
        batch = self._buffers.batch(shape, scheduler_output.rows)
        if graph is None:
            self._buffers.fill(batch)
            received = intermediate_tensors or self._pipeline.receive(shape.num_tokens)
            done = self._run_model(batch, received, needs_all=self._sampler.prompt_logprobs.is_active)
        else:
            self._pipeline.receive(shape.num_tokens)  # to where the graph reads it
            graph.replay()
            done = graph.output
        if isinstance(done.hidden, IntermediateTensors):
            return self._pass_on(done.hidden.first(shape.num_tokens), batch)
        self._pending = ExecuteModelState(
            scheduler_output, done.hidden, scheduler_output.finished_req_ids, (batch, done)
        )
        return None

    def _note(self, scheduler_output: SchedulerOutput) -> None:
        """Put what changed into the staging buffer, and into the few things that the host keeps about rows."""
        state, staging = self._state, self._state.staging
        staging.begin()
        self._give_back(scheduler_output)
        for request in scheduler_output.new_requests:
            state.stage_request(request)
            self._sampler.add(request)
        if scheduler_output.new_block_ids:
            state.block_tables.stage_appended(scheduler_output.new_block_ids, staging)

    def _give_back(self, scheduler_output: SchedulerOutput) -> None:
        for _, row in scheduler_output.finished:
            self._sampler.remove(row)

    def _pass_on(self, hidden: IntermediateTensors, batch: InputBatch) -> IntermediateTensors | None:
        """The end of a step on a rank that is not the last of its pipeline."""
        self._token_sync.expect(batch)
        if self._pipeline.size == 1:
            return hidden
        self._pipeline.send(hidden)
        return None

    @torch.inference_mode()
    def _sample(self) -> AsyncOutput:
        if self._pending is None or self._model is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        pending, self._pending = self._pending, None
        batch, done = pending.extra
        scheduler_output, shape = pending.scheduler_output, batch.shape
        output = AsyncOutput(self.device)
        if done.packed is not None:  # the graph has sampled; its memory is written over by the next replay
            packed = done.packed[: shape.num_sampled] if shape.num_drafts else done.packed[:, : shape.num_sampled]
            output.send_tokens(packed.clone(), shape.num_sampled, shape.num_drafts)
            if done.logprobs is not None:
                logprobs = LogprobsTensors(done.logprobs.packed[: shape.num_logits].clone())
                self._send_logprobs(batch, logprobs, output)
            self._token_sync.send(None if done.packet is None else done.packet[: shape.num_sampled])
            return output
        for index, position, tensors in self._sampler.prompt_logprobs.collect(done.hidden, scheduler_output):
            output.send_prompt_logprobs(index, position, tensors)
        new = None
        if shape.num_sampled:
            new = self._sample_logits(batch, done, output)
            output.send_tokens(new.packed(), shape.num_decodes, shape.num_drafts)
        self._post_update(batch, new)
        self._drafting.propose(batch, done.hidden, new, self._drafting.wanted(scheduler_output))
        if new is not None:
            self._token_sync.send(self._token_sync.pack(batch, new))
        return output

    def _sample_logits(self, batch: InputBatch, done: StepTensors, output: AsyncOutput) -> DeviceSamples:
        """Sample with the features that the running requests use, and queue the copies of logprobs."""
        rows, logits = self._logits(batch, done)  # [num_logits, vocab_size]
        sampled = self._sampler(logits, rows)
        if sampled.logprobs is not None:
            self._send_logprobs(batch, sampled.logprobs, output)
        if large := self._sampler.large_logprobs(logits, sampled.token_ids, batch.rows_of_logits):
            logprobs, sizes = large
            output.send_logprobs(logprobs, list(sizes), list(sizes.values()), range(len(sizes)))
        return sampled.samples

    def _send_logprobs(self, batch: InputBatch, logprobs: LogprobsTensors, output: AsyncOutput) -> None:
        """Queue the copy of logprobs of every row of logits, if a request of the batch uses them."""
        if counts := self._sampler.num_logprobs(batch.rows_of_logits):
            output.send_logprobs(logprobs, list(counts), list(counts.values()))

    # --- what is queued on the device, eagerly or under capture -----------------------------------------------------

    def _run_model(
        self, batch: InputBatch, intermediate_tensors: IntermediateTensors | None, *, needs_all: bool
    ) -> StepTensors:
        """The forward pass. The last layer computes only the tokens that sampling or a drafter reads.

        Args:
            needs_all: the hidden states of all tokens are read.
        """
        assert self._model is not None
        rows = wanted = None
        if not (needs_all or self._drafting.reads_hidden or batch.shape.is_decode) and self._model.is_last:
            rows = logits_batch(batch, batch.shape.num_sampled)
            wanted = wanted_tokens(batch, rows, self._iota)
        hidden = self._model.forward(
            batch.input_ids, batch.metadata.positions, self._kv_caches, batch.metadata, intermediate_tensors, wanted
        )
        if isinstance(hidden, IntermediateTensors):  # the step ends here, as if every query were right
            self._post_update(batch, None)
        return StepTensors(hidden, rows)

    def _logits(self, batch: InputBatch, done: StepTensors) -> tuple[LogitsBatch, torch.Tensor]:
        """The rows of logits, and ``[num_logits, vocab_size]``."""
        assert self._model is not None and isinstance(done.hidden, torch.Tensor)
        hidden, rows = done.hidden, done.logits_batch
        if rows is None:
            rows = logits_batch(batch, batch.shape.num_sampled)
            if rows.indices is not None:  # a pure decode reads all hidden states, in order
                hidden = hidden.index_select(0, rows.indices)
        return rows, self._model.compute_logits(hidden[: batch.shape.num_logits])

    def _post_update(self, batch: InputBatch, new: DeviceSamples | None) -> None:
        """Advance every request by its query, and keep the newest tokens; None: no request sampled."""
        tables = self._state.tables
        nothing = tables.last_sampled[:0]
        sampled = (nothing.unsqueeze(1), nothing, nothing)
        if new is not None:
            sampled = (new.token_ids, new.num_sampled, new.num_rejected)
        self._loader.context.ops.post_update(batch.idx_mapping, batch.query_start_loc, tables, *sampled)

    def _capture(self, key: GraphKey) -> Capture:
        """A whole step of one shape as a graph."""
        return self.device.capture(self._step(key))

    def _step(self, key: GraphKey) -> Callable[[], StepTensors]:
        """A step of padding requests: preparation, forward, and mostly what comes after it."""
        is_decode = key.kind != "mixed"
        query_len = key.num_tokens // key.num_reqs if is_decode else key.num_tokens
        shape = BatchShape(
            num_reqs=key.num_reqs,
            num_tokens=key.num_tokens,
            num_decodes=key.num_reqs if is_decode else 0,
            num_sampled=key.num_reqs,
            max_query_len=query_len,
            padded_reqs=key.num_reqs,
            padded_tokens=key.num_tokens,
            num_drafts=query_len - 1 if is_decode else 0,
        )
        batch = self._buffers.batch(shape, [])
        self._state.staging.clear_on_device(self._buffers.query_start_loc(shape, [0] * key.num_reqs))

        def work() -> StepTensors:
            self._buffers.fill(batch)
            received = self._pipeline.buffers(key.num_tokens)
            done = self._run_model(batch, received, needs_all=key.sampling is None)
            if isinstance(done.hidden, IntermediateTensors) or key.sampling is None:
                return done
            rows, logits = self._logits(batch, done)
            sampled = self._sampler.sample(logits, rows, key.sampling)
            new = sampled.samples
            packed = new.packed()
            self._post_update(batch, new)
            self._drafting.propose(batch, done.hidden, new, key.drafting)
            return StepTensors(done.hidden, rows, packed, sampled.logprobs, self._token_sync.pack(batch, new))

        return work

    def shutdown(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self._connector.shutdown()
        self._model = self._pending = self._left = None
        self._kv_caches = []
