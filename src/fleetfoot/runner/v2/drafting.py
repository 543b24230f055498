"""Drafting at the end of a step: proposals for the requests that sampled, into their rows, for the next step."""

from __future__ import annotations

import torch

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.verification import DeviceSamples
from fleetfoot.speculative.drafter import DraftBatch, DraftSettings


class Drafting:
    """Asks whoever makes drafts, and keeps them in ``RequestState.draft_tokens``. Queues work and waits for nothing.

    Args:
        max_model_len: most tokens of a request.
    """

    def __init__(self, draft_settings: DraftSettings, state: DeviceState, max_model_len: int) -> None:
        self._draft_settings = draft_settings
        self._state = state
        self._max_seq_len = max_model_len + draft_settings.num_drafts

    @property
    def reads_hidden(self) -> bool:
        """Whether `propose` reads the hidden states of all tokens."""
        drafter = self._draft_settings.drafter
        return drafter is not None and drafter.reads_hidden

    def wanted(self, scheduler_output: SchedulerOutput) -> int | None:
        """How many drafts to propose at a step's end; 0: none, but a drafter fills its cache; None: nothing to do."""
        if scheduler_output.num_to_propose or self._draft_settings.drafter is not None:
            return scheduler_output.num_to_propose
        return None

    def propose(
        self, batch: InputBatch, hidden: torch.Tensor, new: DeviceSamples | None, num_to_propose: int | None
    ) -> torch.Tensor | None:
        """After the rows were updated.

        Args:
            hidden: ``[padded_tokens, hidden_size]``; anything where nobody `reads_hidden`.
            new: what the requests that sample have got; None: nobody samples in this step.
            num_to_propose: as `wanted` gives it.

        Returns ``[n, k]`` int32 drafts of the requests that sample, which are in their rows already; None: none.
        """
        if num_to_propose is None:
            return None
        draft_settings, requests = self._draft_settings, self._state.requests
        num_sampled = 0 if new is None else len(new.token_ids)
        rows = batch.idx_mapping[:num_sampled]
        if draft_settings.ngram is not None:
            if not num_to_propose or not num_sampled:
                return None
            from fleetfoot.speculative.ngram import propose_ngrams_paged

            safe_rows = rows.clamp(min=0).to(torch.int64)
            propose_ngrams_paged(
                rows,
                requests.num_computed.index_select(0, safe_rows) + 1,  # the newest token is not computed yet
                requests.last_sampled,
                requests.token_pages,
                self._state.block_tables.tensor,
                self._state.block_size,
                draft_settings.ngram.max_ngram,
                draft_settings.ngram.min_ngram,
                draft_tokens=requests.draft_tokens,
            )
            return requests.draft_tokens.index_select(0, safe_rows)
        if draft_settings.drafter is None:
            return None
        drafts = draft_settings.drafter.propose(self._draft_batch(batch, hidden, new), num_to_propose)
        if drafts is None or not num_sampled:
            return None
        scratch = requests.draft_tokens.shape[0] - 1  # what padding requests write
        target = torch.where(rows < 0, scratch, rows).to(torch.int64)
        requests.draft_tokens.index_copy_(0, target, drafts)
        return drafts

    def _draft_batch(self, batch: InputBatch, hidden: torch.Tensor, new: DeviceSamples | None) -> DraftBatch:
        state, requests, metadata = self._state, self._state.requests, batch.metadata
        num_sampled = 0 if new is None else len(new.token_ids)
        rows = batch.idx_mapping[:num_sampled]
        safe_rows = rows.clamp(min=0).to(torch.int64)  # padding may read anybody's
        starts, ends = batch.query_start_loc[:num_sampled], batch.query_start_loc[1 : num_sampled + 1]
        if new is None:
            last_index = newest = safe_rows
        else:
            last_index = torch.maximum(ends - 1 - new.num_rejected, starts).clamp(min=0).to(torch.int64)
            last = (new.num_sampled - 1).clamp(min=0).to(torch.int64)
            newest = new.token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        return DraftBatch(
            input_ids=batch.input_ids,
            metadata=metadata,
            hidden=hidden,
            next_ids=self._next_ids(batch, last_index, newest),
            last_index=last_index,
            newest=newest,
            positions=metadata.positions[last_index] + 1,
            limits=requests.limits[safe_rows].to(torch.int64),
            block_tables=state.block_tables.tensor.index_select(0, safe_rows),
            rows=rows,
            temperatures=state.sampling.temperature,
            seeds=state.sampling.seeds,
            is_decode=batch.shape.is_decode,
            max_seq_len=self._max_seq_len,
        )

    def _next_ids(self, batch: InputBatch, last_index: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64: the token behind each token of the batch; see `DraftBatch`."""
        state, requests, positions = self._state, self._state.requests, batch.metadata.positions
        following = torch.roll(batch.input_ids, -1)  # within a query; wrong at its end
        if not batch.shape.is_decode:  # the end of a chunk is followed by a prompt token, which is in the pages
            rows = batch.idx_mapping[batch.batch_index.clamp(min=0)].clamp(min=0).to(torch.int64)
            behind = positions + 1
            is_known = behind < requests.prefill_lens[rows]
            block = torch.where(is_known, behind // state.block_size, 0)
            slots = state.block_tables.tensor[rows, block].to(torch.int64) * state.block_size
            slots = torch.where(is_known, slots + behind % state.block_size, 0)
            following = torch.where(is_known, requests.token_pages[slots].to(torch.int64), following)
        return following.index_copy(0, last_index, newest) if len(newest) else following
