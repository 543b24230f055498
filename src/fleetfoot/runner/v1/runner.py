"""Model Runner V1: plain and eager. It makes each step's inputs on the host and waits for each step's tokens.

It is the yardstick of V2, and what runs where V2 cannot: any device torch has, no Triton, every feature.
"""

from __future__ import annotations

import torch

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.intermediate import IntermediateTensors
from fleetfoot.runner.contract import ExecuteModelState
from fleetfoot.runner.load import ModelLoader
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.runner.v1.inputs import StepInputs, prepare_inputs
from fleetfoot.runner.v1.prompt_logprobs import collect_prompt_logprobs
from fleetfoot.runner.v1.sampling_batch import SamplingBatch, invalid_rows
from fleetfoot.sampling.sampler import Sampler
from fleetfoot.scheduler.output import ModelRunnerOutput, SchedulerOutput


class ModelRunnerV1:
    """Implements `ModelRunner`.

    Args:
        loader: builds the model when `load_model` is called.
        max_num_seqs: most requests in a step.
        max_model_len: most tokens of a request.
    """

    name = "v1"

    def __init__(self, loader: ModelLoader, *, max_num_seqs: int, max_model_len: int) -> None:
        self.device = loader.context.device
        self._loader = loader
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._model: CausalLM | None = None
        self._kv_caches: list[torch.Tensor] = []
        self._host: HostState | None = None
        self._sampling: SamplingBatch | None = None
        self._sampler = Sampler(loader.context.ops.choose_tokens)
        self._pending: ExecuteModelState | None = None

    def load_model(self) -> None:
        self._model = self._loader.load()

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        self._kv_caches = layout.allocate(self.device)
        self._host = HostState(self._max_num_seqs, self._max_model_len, layout.block_size)
        self._sampling = SamplingBatch(self._host, self.device)

    def warm_up(self) -> None:
        """Nothing to do: every operation runs as it is."""

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        if self._model is None or self._host is None:
            raise RuntimeError("execute_model was called before load_model and initialize_kv_cache")
        self._host.apply(scheduler_output)
        inputs = prepare_inputs(self._host, scheduler_output, self.device)
        self._host.num_computed[inputs.rows] += inputs.query_lens
        hidden = self._model.forward(
            inputs.input_ids, inputs.metadata.positions, self._kv_caches, inputs.metadata, intermediate_tensors
        )
        if isinstance(hidden, IntermediateTensors):
            return hidden
        self._pending = ExecuteModelState(scheduler_output, hidden, scheduler_output.finished_req_ids, inputs)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        if self._pending is None or self._model is None or self._host is None or self._sampling is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        pending, self._pending = self._pending, None
        scheduler_output, inputs = pending.scheduler_output, pending.extra
        assert isinstance(inputs, StepInputs)
        output = ModelRunnerOutput(sampled_token_ids=[])
        output.prompt_logprobs = collect_prompt_logprobs(self._model, self._host, pending.hidden_states, inputs)
        num_sampled = scheduler_output.num_sampled
        if not num_sampled:
            return output
        hidden = pending.hidden_states  # [num_tokens, hidden_size]
        if num_sampled != hidden.shape[0]:  # in a pure decode every token's hidden state is wanted as it lies
            last_tokens = torch.from_numpy(inputs.query_start_loc[1 : num_sampled + 1] - 1).to(self.device)
            hidden = hidden[last_tokens]  # [num_sampled, hidden_size]
        logits = self._model.compute_logits(hidden)  # [num_sampled, vocab_size]
        rows = inputs.rows[:num_sampled]
        metadata = self._sampling.metadata(rows)
        sampled = self._sampler(logits, metadata)
        output.logprobs = self._sampling.logprobs_of(sampled, metadata)
        output.invalid = invalid_rows(sampled)
        token_ids = sampled.token_ids.tolist()  # waits for the device
        self._host.append_tokens(rows, token_ids)
        output.sampled_token_ids = [[token] for token in token_ids]
        return output

    def shutdown(self) -> None:
        self._model = self._host = self._sampling = self._pending = None
        self._kv_caches = []
