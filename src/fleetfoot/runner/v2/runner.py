"""Model Runner V2: state on the device, inputs made on the device, and a host that only queues.

A step, from top to bottom:

    execute_model   note what changed in the staging buffer; one copy; scatter it; gather inputs; forward
    sample_tokens   logits; sample; write the results back into the rows; queue the copy of the tokens to the host

Nothing here waits for the device. The tokens of a step reach the next one through the rows, on the device, and the
host by way of `AsyncOutput`, whenever it asks.
"""

from __future__ import annotations

import torch

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.intermediate import IntermediateTensors
from fleetfoot.ops.prepare.post_update import post_update
from fleetfoot.plan.graphs import CaptureTable
from fleetfoot.runner.contract import ExecuteModelState
from fleetfoot.runner.load import ModelLoader
from fleetfoot.runner.v2.async_output import AsyncOutput
from fleetfoot.runner.v2.device import Device, open_device
from fleetfoot.runner.v2.graphs import GraphManager
from fleetfoot.runner.v2.input_batch import InputBatch, InputBuffers
from fleetfoot.runner.v2.prompt_logprobs import PromptLogprobs
from fleetfoot.runner.v2.sampling import RowSampler
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.warm_up import warm_up_steps
from fleetfoot.scheduler.output import SchedulerOutput


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
        self.graphs = GraphManager(capture_table or CaptureTable())
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
        for scheduler_output in warm_up_steps(
            self._max_num_batched_tokens, self._max_model_len, self._state.block_size
        ):
            self._forward(scheduler_output)
            self._sample().get()
        self._sampler.remove(0)
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
        batch = self._prepare(scheduler_output)
        hidden = self._model.forward(
            batch.input_ids, batch.metadata.positions, self._kv_caches, batch.metadata, intermediate_tensors
        )
        if isinstance(hidden, IntermediateTensors):
            return hidden
        self._pending = ExecuteModelState(scheduler_output, hidden, scheduler_output.finished_req_ids, batch)
        return None

    def _prepare(self, scheduler_output: SchedulerOutput) -> InputBatch:
        """Say to the device, in one copy, what changed and what to compute; queue the making of its inputs."""
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
        shape, _ = self.graphs.dispatch(scheduler_output)
        starts = self._buffers.query_start_loc(shape, scheduler_output.num_scheduled_tokens)
        staging.send(scheduler_output.rows, starts, shape.num_sampled, shape.padded_reqs)
        return self._buffers.fill(shape, scheduler_output.rows)

    @torch.inference_mode()
    def _sample(self) -> AsyncOutput:
        if self._pending is None or self._model is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        pending, self._pending = self._pending, None
        batch, hidden = pending.extra, pending.hidden_states  # [padded_tokens, hidden_size]
        assert isinstance(batch, InputBatch)
        num_sampled = batch.shape.num_sampled
        output = AsyncOutput(self.device, num_sampled)
        for index, position, tensors in self._prompt_logprobs.collect(hidden, pending.scheduler_output):
            output.send_prompt_logprobs(index, position, tensors)
        if num_sampled:
            if not batch.shape.is_decode:  # in a pure decode the hidden states lie as they are wanted
                last_tokens = batch.query_start_loc[1 : num_sampled + 1] - 1
                hidden = hidden.index_select(0, last_tokens)
            logits = self._model.compute_logits(hidden[:num_sampled])  # [num_sampled, vocab_size]
            sampled, logprob_rows = self._sampler(logits, batch)
            output.send_tokens(sampled.token_ids, sampled.invalid)
            if sampled.logprobs is not None and logprob_rows is not None:
                output.send_logprobs(sampled.logprobs, logprob_rows.indices, logprob_rows.counts)
            new_tokens = sampled.token_ids.unsqueeze(1)  # [num_sampled, 1]
        else:
            new_tokens = self._zeros[:0].unsqueeze(1)
        post_update(
            batch.idx_mapping,
            batch.query_start_loc,
            new_tokens,
            self._ones[:num_sampled],
            self._zeros[:num_sampled],
            num_computed=self._state.requests.num_computed,
            last_sampled=self._state.requests.last_sampled,
        )
        return output

    def shutdown(self) -> None:
        self._model = self._pending = None
        self._kv_caches = []
