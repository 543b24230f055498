"""Model Runner V2: state on the device, inputs made on the device, and a host that only queues.

A step, from top to bottom:

    execute_model   note what changed in the staging buffer; one copy; scatter it; gather inputs; forward
    sample_tokens   logits; sample; write the results back into the rows; queue the copy of the tokens to the host

From the scatter to the rows a step can be one graph, which then has sampled before `sample_tokens` is called.

Nothing here waits for the device. The tokens of a step reach the next one through the rows, on the device, and the
host by way of `AsyncOutput`, whenever it asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.intermediate import IntermediateTensors
from fleetfoot.ops.prepare.post_update import post_update
from fleetfoot.runner.capture_table import CaptureTable, GraphKey
from fleetfoot.runner.contract import ExecuteModelState
from fleetfoot.runner.load import ModelLoader
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Capture, Device, open_device
from fleetfoot.runner.v2.graphs import GraphManager
from fleetfoot.runner.v2.input_batch import BatchShape, InputBatch, InputBuffers
from fleetfoot.runner.v2.prompt_logprobs import PromptLogprobs
from fleetfoot.runner.v2.sampling import RowSampler
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.warm_up import warm_up_steps
from fleetfoot.scheduler.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step has left on the device."""

    hidden: torch.Tensor
    """``[padded_tokens, hidden_size]``"""
    chosen: torch.Tensor | None = None
    """``[2, padded_reqs]`` int64, if sampling was part of it: tokens, and whether each means nothing."""


class ModelRunnerV2:
    """Implements `ModelRunner`.

    Args:
        loader: builds the model when `load_model` is called.
        max_num_seqs: most requests in a step. max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request.
        capture_table: the shapes to capture as graphs, from the plan.
        device: copies and events; None: those of the loader's device.
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
    ) -> None:
        self.device = device or open_device(loader.context.device)
        can_capture = self.device.has_graphs and loader.context.attention.is_capturable
        self.graphs = GraphManager(capture_table or CaptureTable(), self._capture if can_capture else None)
        self._loader = loader
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._model: CausalLM | None = None
        self._kv_caches: list[torch.Tensor] = []
        self._pending: ExecuteModelState | None = None

    # --- starting ---------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._model = self._loader.load()

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        if self._model is None:
            raise RuntimeError("initialize_kv_cache was called before load_model")
        self._kv_caches = layout.allocate(self.device.torch_device)
        state = DeviceState(
            self.device,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
        self._state = state
        self._buffers = InputBuffers(state, self._max_num_seqs, self._max_num_batched_tokens, self._max_model_len)
        self._sampler = RowSampler(state, self._loader.context.ops, self._max_num_seqs)
        self._prompt_logprobs = PromptLogprobs(state, self._model)
        # without drafts, every request that samples yields one token and rejects none
        self._ones = torch.ones(self._max_num_seqs, dtype=torch.int32, device=self.device.torch_device)
        self._zeros = torch.zeros_like(self._ones)

    def warm_up(self) -> None:
        steps = warm_up_steps(self._max_num_batched_tokens, self._max_model_len, self._state.block_size)
        for scheduler_output in steps:
            self._forward(scheduler_output)
            self._sample().get()
        self._sampler.remove(0)
        with torch.inference_mode():
            self.graphs.capture_first()
        self.graphs.num_steps.clear()

    # --- a step -----------------------------------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        return self._forward(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: object | None) -> AsyncOutput:
        return self._sample()

    @torch.inference_mode()
    def _forward(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        if self._model is None or not self._kv_caches:
            raise RuntimeError("execute_model was called before load_model and initialize_kv_cache")
        self._note(scheduler_output)
        samples = self._sampler.is_simple and not self._prompt_logprobs.is_wanted
        shape, key = self.graphs.dispatch(scheduler_output, samples=samples)
        graph = None if key is None else self.graphs.get(key)  # captured, if need be, before this step is sent
        starts = self._buffers.query_start_loc(shape, scheduler_output.num_scheduled_tokens)
        self._state.staging.send(scheduler_output.rows, starts, shape.num_sampled, shape.padded_reqs)
        batch = self._buffers.batch(shape, scheduler_output.rows)
        if graph is None:
            self._buffers.fill(batch)
            hidden = self._run_model(batch, intermediate_tensors)
            if isinstance(hidden, IntermediateTensors):
                return hidden
            done = StepTensors(hidden)
        else:
            graph.replay()
            done = graph.output
        self._pending = ExecuteModelState(
            scheduler_output, done.hidden, scheduler_output.finished_req_ids, (batch, done)
        )
        return None

    def _note(self, scheduler_output: SchedulerOutput) -> None:
        """Put what changed into the staging buffer, and into the few things that the host keeps about rows."""
        state, staging = self._state, self._state.staging
        staging.begin()
        for _, row in scheduler_output.finished:
            self._sampler.remove(row)
            self._prompt_logprobs.remove(row)
        for request in scheduler_output.new_requests:
            state.stage_request(request)
            self._sampler.add(request)
            self._prompt_logprobs.add(request)
        if scheduler_output.new_block_ids:
            state.block_tables.stage_appended(scheduler_output.new_block_ids, staging)

    @torch.inference_mode()
    def _sample(self) -> AsyncOutput:
        if self._pending is None or self._model is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        pending, self._pending = self._pending, None
        batch, done = pending.extra
        num_sampled = batch.shape.num_sampled
        output = AsyncOutput(self.device)
        if done.chosen is not None:  # the graph has sampled; its memory is written over by the next replay
            output.send_tokens(done.chosen[:, :num_sampled].clone())
            return output
        for index, position, tensors in self._prompt_logprobs.collect(done.hidden, pending.scheduler_output):
            output.send_prompt_logprobs(index, position, tensors)
        token_ids = self._zeros[:0]
        if num_sampled:
            logits = self._logits(batch, done.hidden, num_sampled)  # [num_sampled, vocab_size]
            sampled, logprob_rows = self._sampler(logits, batch)
            output.send_tokens(torch.stack((sampled.token_ids, sampled.invalid)))
            if sampled.logprobs is not None and logprob_rows is not None:
                output.send_logprobs(sampled.logprobs, logprob_rows.indices, logprob_rows.counts)
            token_ids = sampled.token_ids
        self._update_rows(batch, token_ids)
        return output

    # --- what is queued on the device, eagerly or under capture -----------------------------------------------------

    def _run_model(
        self, batch: InputBatch, intermediate_tensors: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        assert self._model is not None
        return self._model.forward(
            batch.input_ids, batch.metadata.positions, self._kv_caches, batch.metadata, intermediate_tensors
        )

    def _logits(self, batch: InputBatch, hidden: torch.Tensor, num_sampled: int) -> torch.Tensor:
        """Of the first requests' last tokens: ``[padded_tokens, hidden_size]`` -> ``[num_sampled, vocab_size]``."""
        assert self._model is not None
        if not batch.shape.is_decode:  # in a pure decode the hidden states lie as they are wanted
            last_tokens = (batch.query_start_loc[1 : num_sampled + 1] - 1).clamp_(min=0)
            hidden = hidden.index_select(0, last_tokens)
        return self._model.compute_logits(hidden[:num_sampled])

    def _update_rows(self, batch: InputBatch, token_ids: torch.Tensor) -> None:
        """Advance every request by its query, and keep the new tokens ``[num_sampled]`` for the next step."""
        num_sampled = len(token_ids)
        post_update(
            batch.idx_mapping,
            batch.query_start_loc,
            token_ids.unsqueeze(1),
            self._ones[:num_sampled],
            self._zeros[:num_sampled],
            num_computed=self._state.requests.num_computed,
            last_sampled=self._state.requests.last_sampled,
        )

    def _capture(self, key: GraphKey) -> Capture:
        """A whole step of one shape as a graph: preparation, forward, and for a simple batch what comes after it."""
        is_decode = key.kind == "decode"
        shape = BatchShape(
            num_reqs=key.num_reqs,
            num_tokens=key.num_tokens,
            num_decodes=key.num_reqs if is_decode else 0,
            num_sampled=key.num_reqs,
            max_query_len=1 if is_decode else key.num_tokens,
            padded_reqs=key.num_reqs,
            padded_tokens=key.num_tokens,
        )
        batch = self._buffers.batch(shape, [])
        self._state.staging.clear_on_device(self._buffers.query_start_loc(shape, [0] * key.num_reqs))

        def work() -> StepTensors:
            self._buffers.fill(batch)
            hidden = self._run_model(batch)
            assert isinstance(hidden, torch.Tensor)
            if not key.samples:
                return StepTensors(hidden)
            sampled = self._sampler.sample_simple(self._logits(batch, hidden, key.num_reqs), batch)
            self._update_rows(batch, sampled.token_ids)
            return StepTensors(hidden, torch.stack((sampled.token_ids, sampled.invalid)))

        return self.device.capture(work)

    def shutdown(self) -> None:
        self._model = self._pending = None
        self._kv_caches = []
