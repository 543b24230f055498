"""Drafting at the end of a step: drafts for the requests that sampled are written to their rows, for the next step."""

from __future__ import annotations

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.verification import DeviceSamples
from fleetfoot.speculative.drafter import DraftBatch, DraftSettings


class Drafting:
    """Runs the drafter, and keeps its drafts in ``RowTables.draft_tokens``. Queues device work without synchronisation.
    ``max_model_len``: the longest request."""

    def __init__(self, draft_settings: DraftSettings, state: DeviceState, kernels: Kernels, max_model_len: int) -> None:
        self._draft_settings = draft_settings
        self._state = state
        self._propose_ngrams = kernels.propose_ngrams
        self._max_seq_len = max_model_len + draft_settings.num_drafts

    @property
    def reads_hidden(self) -> bool:
        """Whether `propose` reads the hidden states of all tokens."""
        drafter = self._draft_settings.drafter
        return drafter is not None and drafter.reads_hidden

    def number(self, num_to_propose: int) -> int | None:
        """`SchedulerOutput.num_to_propose` for `propose`; 0: a drafter only fills its KV cache; None: no drafting."""
        return num_to_propose if num_to_propose or self._draft_settings.drafter is not None else None

    def propose(
        self, batch: InputBatch, hidden_states: torch.Tensor, samples: DeviceSamples | None, num_to_propose: int | None
    ) -> None:
        """Write drafts to the rows of the requests that sampled, after the post-update. ``hidden_states``:
        ``[padded_tokens, hidden_size]``, undefined unless `reads_hidden`; ``samples``: None: no request samples."""
        if num_to_propose is None:
            return
        drafter, ngram, tables = self._draft_settings.drafter, self._draft_settings.ngram, self._state.tables
        rows = batch.idx_mapping[: 0 if samples is None else len(samples.token_ids)]
        if drafter is not None:
            drafts = drafter.propose(self._draft_batch(batch, rows, hidden_states, samples), num_to_propose)
            if drafts is not None and len(rows):
                last_row = tables.draft_tokens.shape[0] - 1  # of padding requests
                target = torch.where(rows < 0, last_row, rows).to(torch.int64)
                tables.draft_tokens.index_copy_(0, target, drafts)
        elif ngram is not None and len(rows):
            num_computed = tables.num_computed.index_select(0, rows.clamp(min=0).to(torch.int64))
            # the newest token is not computed yet
            self._propose_ngrams(rows, num_computed + 1, tables, *ngram)

    def proposed(self, batch: InputBatch, num_sampled: int) -> torch.Tensor | None:
        """``[num_sampled, k]``: the drafts in the rows of the requests that sampled; None: no speculative decoding."""
        drafts = self._state.tables.draft_tokens
        if not drafts.shape[1]:
            return None
        rows = batch.idx_mapping[:num_sampled].to(torch.int64)
        return drafts.index_select(0, torch.where(rows < 0, len(drafts) - 1, rows))

    def _draft_batch(
        self, batch: InputBatch, rows: torch.Tensor, hidden_states: torch.Tensor, samples: DeviceSamples | None
    ) -> DraftBatch:
        tables, metadata, num_sampled = self._state.tables, batch.metadata, len(rows)
        safe_rows = rows.clamp(min=0).to(torch.int64)  # padding reads row 0
        if samples is None:
            last_index = newest = safe_rows
        else:
            starts, ends = batch.query_start_loc[:num_sampled], batch.query_start_loc[1 : num_sampled + 1]
            last_index = torch.maximum(ends - 1 - samples.num_rejected, starts).clamp(min=0).to(torch.int64)
            newest = newest_tokens(samples)
        return DraftBatch(
            input_ids=batch.input_ids,
            metadata=metadata,
            hidden=hidden_states,
            next_ids=self._next_ids(batch, last_index, newest),
            last_index=last_index,
            newest=newest,
            positions=metadata.positions[last_index] + 1,
            limits=tables.limits[safe_rows].to(torch.int64),
            block_tables=tables.block_table.index_select(0, safe_rows),
            rows=rows,
            temperatures=self._state.sampling.temperature,
            seeds=self._state.sampling.seeds,
            is_decode=batch.shape.is_decode,
            max_seq_len=min(metadata.max_seq_len + self._draft_settings.num_drafts, self._max_seq_len),
        )

    def _next_ids(self, batch: InputBatch, last_index: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64: the token after each token of the batch; see `DraftBatch`."""
        tables, positions = self._state.tables, batch.metadata.positions
        following = torch.roll(batch.input_ids, -1)  # within a query; wrong at its end
        if not batch.shape.is_decode:  # the end of a chunk is followed by a prompt token, which is in the pages
            rows = batch.idx_mapping[batch.batch_index.clamp(min=0)].clamp(min=0).to(torch.int64)
            next_position = positions + 1
            is_known = next_position < tables.prefill_lens[rows]
            block = torch.where(is_known, next_position // tables.block_size, 0)
            slots = tables.block_table[rows, block].to(torch.int64) * tables.block_size
            slots = torch.where(is_known, slots + next_position % tables.block_size, 0)
            following = torch.where(is_known, tables.token_pages[slots].to(torch.int64), following)
        return following.index_copy(0, last_index, newest) if len(newest) else following


def newest_tokens(samples: DeviceSamples) -> torch.Tensor:
    """``[n]`` int64: the last token of each request that sampled."""
    last = (samples.num_sampled - 1).clamp(min=0).to(torch.int64)
    return samples.token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
