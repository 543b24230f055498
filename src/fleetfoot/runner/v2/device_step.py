"""The part of a step that is on the device alone: eager or captured, it is the same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.model_state import ModelState
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.runner.v2.drafting import Drafting
from fleetfoot.runner.v2.grammar_masks import GrammarMasks
from fleetfoot.runner.v2.input_batch import InputBatch, InputBuffers, logits_batch, logits_metadata, split_decodes
from fleetfoot.runner.v2.sampled_tokens import DeviceTokenSync
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.sampler_v2 import Sampler
from fleetfoot.sampling.shape import SamplingVariant
from fleetfoot.sampling.verification import DeviceSamples, LogitsBatch

Receive = Callable[[int], IntermediateTensors | None]
"""`PipelineGroup.receive`, or for a capture `PipelineGroup.buffers`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tensors that a step returns, eagerly or from a graph."""

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


@dataclass
class DeviceStep:
    """Queues the work of a step: `forward`, then `logits`, sampling and `finish`, which `sample` does in one. Nothing
    waits for the device, and what outlives a step has a fixed address."""

    model: CausalLM
    kv_caches: Sequence[torch.Tensor]
    kernels: Kernels
    state: DeviceState
    buffers: InputBuffers
    sampler: Sampler
    masks: GrammarMasks
    drafting: Drafting
    token_sync: DeviceTokenSync
    family: ModelState
    iota: torch.Tensor
    """``[max_num_seqs + 1]`` int32: 0, 1, ..."""

    def forward(
        self,
        batch: InputBatch,
        receive: Receive,
        *,
        reads_all: bool = False,
        splits_decodes: bool = False,
        rows_of_ranks: int = 0,
    ) -> StepOutput:
        """Prepare the inputs and run the layers. The last layer computes only the tokens that sampling or a drafter
        reads. ``reads_all``: the hidden states of all tokens are read; ``rows_of_ranks``: as of `ForwardContext`."""
        self.buffers.fill(batch)
        if splits_decodes:
            split_decodes(batch, self.iota)
        rows = metadata = None
        # other ranks wait in the last layer's experts
        reads_all = reads_all or bool(rows_of_ranks and not batch.shape.num_sampled)
        if not (reads_all or self.drafting.reads_hidden or batch.shape.is_decode) and self.model.is_last:
            rows = logits_batch(batch, batch.shape.num_sampled)
            metadata = logits_metadata(batch, rows, self.iota)
        inputs = self.family.prepare_inputs(batch)
        first = self.family.embed(batch, receive(batch.shape.padded_tokens))
        of_layers, states = batch.metadata_of_layers, batch.states
        ctx = ForwardContext(batch.metadata, self.kv_caches, metadata, of_layers, states, inputs, rows_of_ranks)
        hidden_states = self.model(batch.input_ids, ctx, first)
        if isinstance(hidden_states, IntermediateTensors):  # the step ends here, with every draft taken as accepted
            self._post_update(batch, None)
        return StepOutput(hidden_states, rows)

    def logits(self, batch: InputBatch, step_output: StepOutput) -> tuple[LogitsBatch, torch.Tensor]:
        """The rows of logits, and ``[num_logits, vocab_size]``."""
        hidden_states, rows = step_output.hidden_states, step_output.logits_batch
        assert isinstance(hidden_states, torch.Tensor)
        if rows is None:
            rows = logits_batch(batch, batch.shape.num_sampled)
            if rows.indices is not None:  # a pure decode reads all hidden states, in order
                hidden_states = hidden_states.index_select(0, rows.indices)
        return rows, self.model.compute_logits(hidden_states[: batch.shape.num_logits])

    def sample(
        self, batch: InputBatch, step_output: StepOutput, variant: SamplingVariant, num_to_propose: int | None
    ) -> StepOutput:
        """From the hidden states to the drafts."""
        rows, logits = self.logits(batch, step_output)
        masks = self.masks.of_rows(len(logits)) if variant.masks else None
        sampled = self.sampler.sample(logits, rows, variant, masks)
        packed = sampled.samples.packed()
        message = self.finish(batch, step_output, sampled.samples, num_to_propose)
        drafts = None if masks is None else self.drafting.proposed(batch, len(sampled.samples.token_ids))
        return StepOutput(step_output.hidden_states, rows, packed, sampled.logprobs, message, drafts)

    def finish(
        self, batch: InputBatch, step_output: StepOutput, samples: DeviceSamples | None, num_to_propose: int | None
    ) -> torch.Tensor | None:
        """Advance the rows, and propose drafts for the next step. Returns the message for the other ranks of a
        pipeline; None: there is none. ``samples``: None: no request samples."""
        self._post_update(batch, samples)
        self.drafting.propose(batch, cast("torch.Tensor", step_output.hidden_states), samples, num_to_propose)
        return None if samples is None else self.token_sync.message(batch, samples)

    def _post_update(self, batch: InputBatch, samples: DeviceSamples | None) -> None:
        """Advance every request by its query, and keep the newest tokens; None: no request sampled."""
        tables = self.state.tables
        if samples is None:
            nothing = tables.last_sampled[:0]
            sampled = (nothing.unsqueeze(1), nothing, nothing)
        else:
            sampled = (samples.token_ids, samples.num_sampled, samples.num_rejected)
        self.kernels.post_update(batch.idx_mapping, batch.query_start_loc, tables, *sampled)
        self.family.post_update(batch)
        if samples is not None:
            self.family.reject(batch.idx_mapping[: len(samples.num_rejected)], samples.num_rejected)
