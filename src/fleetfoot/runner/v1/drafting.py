"""Drafting at the end of a step: drafts for the requests that sampled are kept in their rows, for the next step."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.ngram import prompt_lookup
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState, StepInputs
from fleetfoot.sampling.verification import HostSamples
from fleetfoot.speculative.drafter import DraftBatch, DraftSettings


class Drafting:
    """Runs the drafter, and keeps its drafts in ``HostState.drafts``.

    Args:
        max_model_len: maximum number of tokens of a request.
    """

    def __init__(self, draft_settings: DraftSettings, host: HostState, max_model_len: int) -> None:
        self._draft_settings = draft_settings
        self._host = host
        self._max_seq_len = max_model_len + draft_settings.num_drafts

    def propose(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, hidden_states: torch.Tensor, samples: HostSamples
    ) -> None:
        """Write drafts to the rows of the requests that sampled, after their new tokens.

        Args:
            hidden_states: ``[num_tokens, hidden_size]``, in batch order.
        """
        draft_settings, host = self._draft_settings, self._host
        if not draft_settings.is_on:
            return
        num_drafts = scheduler_output.num_to_propose
        rows = inputs.rows[: scheduler_output.num_sampled]
        host.drafts[rows] = -1  # drafts of an earlier step are not verified
        if draft_settings.drafter is not None:  # without drafts to propose, it only fills its KV cache
            batch = self._draft_batch(scheduler_output, inputs, hidden_states, samples)
            drafts = draft_settings.drafter.propose(batch, num_drafts)
            if drafts is not None:
                host.drafts[rows] = drafts.cpu().numpy()
        elif draft_settings.ngram is not None and num_drafts:
            longest, shortest = draft_settings.ngram.max_ngram, draft_settings.ngram.min_ngram
            for row in rows.tolist():
                known = host.token_ids[row, : host.num_tokens[row]]
                host.drafts[row] = prompt_lookup(known, num_drafts, longest, shortest)

    def _draft_batch(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, hidden_states: torch.Tensor, samples: HostSamples
    ) -> DraftBatch:
        host, num_sampled = self._host, len(samples.token_ids)
        rows = inputs.rows[:num_sampled]
        starts, ends = inputs.query_start_loc[:num_sampled], inputs.query_start_loc[1 : num_sampled + 1]
        last_index = np.maximum(ends - 1 - samples.num_rejected, starts)  # [num_sampled]
        # rows have their new tokens by now; entries behind them are undefined, but valid token ids
        next_position = (inputs.positions + 1).clip(max=host.token_ids.shape[1] - 1)  # [num_tokens]

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(hidden_states.device)

        return DraftBatch(
            input_ids=inputs.input_ids,
            metadata=inputs.metadata,
            hidden=hidden_states,
            next_ids=on_device(host.token_ids[inputs.token_rows, next_position]),
            last_index=on_device(last_index),
            newest=on_device(host.token_ids[rows, host.num_tokens[rows] - 1]),
            positions=on_device(inputs.positions[last_index] + 1),
            limits=on_device(host.limits[rows]),
            block_tables=on_device(host.block_table[rows]),
            rows=on_device(rows),
            temperatures=on_device(host.temperatures),
            seeds=on_device(host.seeds),
            is_decode=scheduler_output.num_decodes == len(inputs.rows),
            max_seq_len=self._max_seq_len,
        )
