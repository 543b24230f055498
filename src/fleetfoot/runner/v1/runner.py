"""Model Runner V1: eager, with inputs prepared on the host, which waits for the tokens of each step.

It is the reference of V2, and runs where V2 cannot: on every torch device, without Triton. A step:

    execute_model   update the rows; prepare the inputs; forward
    sample_tokens   logits; sample and verify drafts; append the tokens to the rows; propose drafts; the KV connector
"""

from __future__ import annotations

import torch

from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, PipelineGroup
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.runner.contract import ExecuteModelState, allocate_kv_cache
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.runner.v1.drafting import Drafting
from fleetfoot.runner.v1.host_state import HostState, StepInputs, logits_indices, prepare_inputs
from fleetfoot.runner.v1.pipeline import SampledTokenSync
from fleetfoot.sampling.sampler_v1 import Sampler
from fleetfoot.sampling.verification import NO_SAMPLES, HostSamples
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings
from fleetfoot.weights.loading import ModelLoader


class ModelRunnerV1:
    """Implements `ModelRunner`.

    Args:
        loader: builds the model, or a pipeline stage of it, when `load_model` is called.
        max_num_seqs: maximum number of requests in a step.
        max_model_len: maximum number of tokens of a request.
        draft_settings: the number of drafts, and on the last rank of a pipeline the drafter.
        connector: moves KV; None: there is none.
        pipeline: the pipeline-parallel ranks.
    """

    name = "v1"

    def __init__(
        self,
        loader: ModelLoader,
        *,
        max_num_seqs: int,
        max_model_len: int,
        draft_settings: DraftSettings = NO_DRAFTING,
        connector: StepConnector | None = None,
        pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP,
    ) -> None:
        self.device = loader.context.device
        self._loader = loader
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._draft_settings = draft_settings
        self._connector = connector or NoConnector()
        self._pipeline = pipeline
        self._model: CausalLM | None = None
        self._kv_caches: list[torch.Tensor] = []
        self._execute_state: ExecuteModelState | None = None
        """The step between `execute_model` and `sample_tokens`."""
        self._ready_output: ModelRunnerOutput | None = None
        """The output of a step that was complete after `execute_model`."""

    # --- start ------------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._model = self._loader.load()
        self.fused_layers = self._model.model.layers.fused_layers
        if self._draft_settings.drafter is not None:
            self._draft_settings.drafter.load_model(self._model)

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        if self._model is None:
            raise RuntimeError("initialize_kv_cache was called before load_model")
        kv_caches = allocate_kv_cache(layout, self.device)
        num_layers = len(self._model.layers)
        self._kv_caches = kv_caches[:num_layers]
        if self._draft_settings.drafter is not None:
            self._draft_settings.drafter.bind_kv_caches(kv_caches[num_layers:])
        self._connector.register_kv_caches(kv_caches, layout)
        num_drafts = self._draft_settings.num_drafts
        self._host = HostState(self._max_num_seqs, self._max_model_len, layout.block_size, num_drafts)
        model = self._model
        self._sampler = Sampler(self._loader.context.ops, model.compute_logits, model.config.vocab_size)
        self._drafting = Drafting(self._draft_settings, self._host, self._max_model_len)
        self._token_sync = SampledTokenSync(self._pipeline, self._host, self.device)

    def warm_up(self) -> None:
        """Nothing to do: no operation is compiled or captured."""

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        if self._model is None or not self._kv_caches:
            raise RuntimeError("execute_model was called before load_model and initialize_kv_cache")
        if scheduler_output.is_idle:
            self._update_rows(scheduler_output)
            self._ready_output = ModelRunnerOutput([], kv_connector_output=self._connector.no_forward(scheduler_output))
            return None
        try:
            self._connector.pre_forward(scheduler_output)
            next_stage_input = self._forward(self._model, scheduler_output, intermediate_tensors)
            if self._execute_state is None:  # a rank that does not sample: its last write of KV is done
                kv_output = self._connector.post_forward(scheduler_output.finished_req_ids)
                self._ready_output = ModelRunnerOutput([], kv_connector_output=kv_output)
        except BaseException:
            self._connector.abandon()
            raise
        return next_stage_input

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        if self._ready_output is not None:
            output, self._ready_output = self._ready_output, None
            return output
        if self._execute_state is None or self._model is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        state, self._execute_state = self._execute_state, None
        try:
            output = self._sample(self._model, state)
            output.kv_connector_output = self._connector.post_forward(state.finished_req_ids)
        except BaseException:
            self._connector.abandon()
            raise
        return output

    def shutdown(self) -> None:
        self._connector.shutdown()
        self._model = self._execute_state = self._ready_output = None
        self._kv_caches = []

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        self._host.update(scheduler_output)
        for _, row in scheduler_output.finished:
            self._sampler.remove(row)
        for request in scheduler_output.new_requests:
            self._sampler.add(request)

    # --- its two halves ---------------------------------------------------------------------------------------------

    def _forward(
        self, model: CausalLM, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None
    ) -> IntermediateTensors | None:
        """Run this rank's layers; returns the input of the next pipeline stage if the caller sends it."""
        self._token_sync.receive_for(scheduler_output)
        self._update_rows(scheduler_output)
        inputs = prepare_inputs(self._host, scheduler_output, self.device)
        self._host.num_computed[inputs.rows] += inputs.query_lens
        received = intermediate_tensors or self._pipeline.receive(len(inputs.positions))
        hidden_states = model(inputs.input_ids, ForwardContext(inputs.metadata, self._kv_caches), received)
        if isinstance(hidden_states, torch.Tensor):
            finished = scheduler_output.finished_req_ids
            self._execute_state = ExecuteModelState(scheduler_output, hidden_states, finished, inputs)
            return None
        self._token_sync.expect(inputs, scheduler_output)
        if self._pipeline.size == 1:
            return hidden_states
        self._pipeline.send(hidden_states)
        return None

    def _sample(self, model: CausalLM, state: ExecuteModelState) -> ModelRunnerOutput:
        """Sample, verify drafts, and propose new ones."""
        scheduler_output, hidden_states, inputs = state.scheduler_output, state.hidden_states, state.extra
        assert isinstance(inputs, StepInputs)
        output = ModelRunnerOutput(sampled_token_ids=[])
        for index, position, tensors in self._sampler.prompt_logprobs.collect(hidden_states, scheduler_output):
            output.prompt_logprobs[index] = (position, tensors.to_rows())
        samples = NO_SAMPLES
        if scheduler_output.num_sampled:
            samples = self._sample_logits(model, scheduler_output, hidden_states, inputs)
            rows = inputs.rows[: scheduler_output.num_sampled]
            self._host.append_tokens(rows, samples.token_ids)
            self._host.num_computed[rows] -= samples.num_rejected
        self._drafting.propose(scheduler_output, inputs, hidden_states, samples)
        self._token_sync.send(inputs, samples)
        output.sampled_token_ids, output.num_drafted = samples.token_ids, samples.num_drafted
        output.invalid, output.logprobs = samples.invalid, samples.logprobs
        return output

    def _sample_logits(
        self, model: CausalLM, scheduler_output: SchedulerOutput, hidden_states: torch.Tensor, inputs: StepInputs
    ) -> HostSamples:
        host, num_drafts = self._host, scheduler_output.num_drafts
        indices = logits_indices(inputs, scheduler_output)
        if len(indices) != len(hidden_states):  # a pure decode reads all hidden states, in order
            hidden_states = hidden_states[torch.from_numpy(indices).to(self.device)]
        logits = model.compute_logits(hidden_states)  # [num_logits, vocab_size]
        rows = inputs.rows[: scheduler_output.num_sampled]
        drafts = host.drafts[rows[: scheduler_output.num_decodes], :num_drafts].tolist() if num_drafts else []
        max_new_tokens = (host.limits[rows] + 1 - host.num_tokens[rows]).tolist()
        return self._sampler(logits, rows.tolist(), drafts, max_new_tokens)
