"""Model Runner V1: eager, with inputs prepared on the host, which waits for the tokens of each step.

It is the reference of V2, and runs where V2 cannot: on every torch device, without Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fleetfoot.kernels.prepare.ngram import prompt_lookup
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import Agreement, ModelRunnerOutput, SchedulerOutput, TokenMasks
from fleetfoot.runner.base import ModelRunner, SampledTokenSync
from fleetfoot.runner.v1.host_state import HostState, StepInputs, draft_batch, logits_indices, prepare_inputs
from fleetfoot.runner.v1.padding import run_padding
from fleetfoot.sampling.custom_processors import EngineProcessor
from fleetfoot.sampling.sampler_v1 import Sampler
from fleetfoot.weights.loading import ModelLoader


class ModelRunnerV1(ModelRunner):
    """Implements `ModelRunner`, with its arguments and: ``compiles_layers``: run ``torch.compile`` over the decoder
    layers; ``logits_processors``: those of the settings."""

    name = "v1"

    def __init__(
        self,
        loader: ModelLoader,
        *,
        compiles_layers: bool = False,
        logits_processors: Sequence[EngineProcessor] = (),
        **common: Any,
    ) -> None:
        super().__init__(loader, **common)
        self._compiles_layers, self._logits_processors = compiles_layers, logits_processors

    def _load(self) -> CausalLM:
        model = super()._load()
        if self._compiles_layers:
            from fleetfoot.runner.v1.compiled import compile_layers  # imports torch's compiler, which takes a second

            compile_layers(model)
        return model

    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        self._device, num_drafts = self._loader.context.device, self._draft_settings.num_drafts
        groups = layout.groups, layout.group_of_layers[: len(model.layers)]
        self._host = host = HostState(self._max_num_seqs, self._max_model_len, layout.block_size, num_drafts, *groups)
        ops, vocab_size = self._loader.context.ops, model.config.vocab_size
        self._sampler = Sampler(ops, model.compute_logits, vocab_size, self._logits_processors)
        self._token_sync = SampledTokenSync(self._pipeline, num_drafts, self._device, host.apply_sampled_tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the layers, if they are to be compiled."""
        if self._compiles_layers and self._model is not None:
            from fleetfoot.runner.v1.compiled import warm_up_layers

            warm_up_layers(self._model, self._kv_caches)

    def _free_rows(self, scheduler_output: SchedulerOutput) -> None:
        for _, row in scheduler_output.finished:
            self._host.requests[row] = None
            self._sampler.remove(row)

    @torch.inference_mode()
    def _forward(self, scheduler_output: SchedulerOutput) -> None:
        """Update the rows, prepare the inputs, and run this rank's layers."""
        assert self._model is not None
        host = self._host
        self._token_sync.receive(scheduler_output.awaited_step)
        self._free_rows(scheduler_output)
        host.update(scheduler_output)
        for request in scheduler_output.new_requests:
            self._sampler.add(request)
        inputs = prepare_inputs(host, scheduler_output, self._device)
        host.num_computed[inputs.rows] += inputs.query_lens
        received = self._pipeline.receive(len(inputs.positions))
        of_layers = inputs.metadata_of_layers
        ctx = ForwardContext(
            inputs.metadata,
            self._kv_caches,
            attention_of_layers=of_layers,
            states=inputs.states,
            rows_of_ranks=scheduler_output.agreement.num_tokens,
        )
        hidden_states = self._model(inputs.input_ids, ctx, received)
        if isinstance(hidden_states, IntermediateTensors):
            sampled_rows = inputs.rows[: scheduler_output.num_sampled]
            self._send_to_next_stage(hidden_states, scheduler_output, sampled_rows)
        else:
            self._execute_state = scheduler_output, (hidden_states, inputs)

    @torch.inference_mode()
    def _forward_padding(self, agreement: Agreement) -> torch.Tensor | IntermediateTensors:
        assert self._model is not None
        return run_padding(self._model, self._kv_caches, 1, self._pipeline.receive(1), agreement.num_tokens)

    @torch.inference_mode()
    def _sample(self, masks: TokenMasks | None) -> ModelRunnerOutput:
        """Sample, verify drafts, append the tokens to the rows, and propose new drafts."""
        assert self._execute_state is not None
        (scheduler_output, (hidden_states, inputs)), self._execute_state = self._execute_state, None
        host, rows = self._host, inputs.rows[: scheduler_output.num_sampled]
        if not len(rows):
            output, num_rejected = ModelRunnerOutput(sampled_token_ids=[]), np.zeros(0, dtype=np.int64)
        else:
            output = self._sample_logits(scheduler_output, hidden_states, inputs, masks)
            num_rejected = 1 - host.append_tokens(rows, output.sampled_token_ids)  # [num_sampled]
            num_rejected[: scheduler_output.num_decodes] += scheduler_output.num_drafts
            host.num_computed[rows] -= num_rejected
        for index, position, tensors in self._sampler.prompt_logprobs.collect(hidden_states, scheduler_output):
            output.prompt_logprobs[index] = (position, tensors.to_rows())
        if self._draft_settings.num_drafts:
            self._propose(scheduler_output, inputs, hidden_states, num_rejected)
            if scheduler_output.structured:
                output.draft_token_ids = host.drafts[rows].tolist()
        if len(rows) and self._pipeline.size > 1:
            message = host.sampled_token_message(rows, output.sampled_token_ids, num_rejected)
            self._token_sync.send(message.to(self._device))
        return output

    def _sample_logits(
        self,
        scheduler_output: SchedulerOutput,
        hidden_states: torch.Tensor,
        inputs: StepInputs,
        masks: TokenMasks | None,
    ) -> ModelRunnerOutput:
        assert self._model is not None
        host, num_drafts = self._host, scheduler_output.num_drafts
        indices = logits_indices(inputs, scheduler_output)
        if len(indices) != len(hidden_states):  # a pure decode reads all hidden states, in order
            hidden_states = hidden_states[torch.from_numpy(indices).to(self._device)]
        logits = self._model.compute_logits(hidden_states)  # [num_logits, vocab_size]
        rows = inputs.rows[: scheduler_output.num_sampled]
        drafts = host.drafts[rows[: scheduler_output.num_decodes], :num_drafts].tolist() if num_drafts else []
        max_new_tokens = (host.limits[rows] + 1 - host.num_tokens[rows]).tolist()
        return self._sampler(logits, rows.tolist(), drafts, max_new_tokens, masks)

    def _propose(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden_states: torch.Tensor,
        num_rejected: np.ndarray,
    ) -> None:
        """Write drafts to the rows of the requests that sampled, after their new tokens."""
        host, num_drafts = self._host, scheduler_output.num_to_propose
        drafter, ngram = self._draft_settings.drafter, self._draft_settings.ngram
        rows = inputs.rows[: scheduler_output.num_sampled]
        host.drafts[rows] = -1  # drafts of an earlier step are not verified
        if drafter is not None:  # without drafts to propose, it only fills its KV cache
            max_seq_len = self._max_model_len + self._draft_settings.num_drafts
            drafts = drafter.propose(draft_batch(host, inputs, hidden_states, num_rejected, max_seq_len), num_drafts)
            if drafts is not None:
                host.drafts[rows] = drafts.cpu().numpy()
        elif ngram is not None and num_drafts:
            for row in rows.tolist():
                known = host.token_ids[row, : host.num_tokens[row]]
                host.drafts[row] = prompt_lookup(known, num_drafts, *ngram)
