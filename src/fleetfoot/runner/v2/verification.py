"""From logits to new tokens: one for each request that samples, or a run of accepted drafts and one more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fleetfoot.kernels.prepare.accept_drafts import accept_drafts
from fleetfoot.kernels.prepare.post_update import post_update
from fleetfoot.records.attention import WantedTokens
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.runner.v2.state import DeviceState


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Whose the rows of logits are."""

    indices: torch.Tensor | None
    """``[L]`` int64: the tokens of the batch that they belong to; None: the batch's first L, in order."""
    rows: torch.Tensor
    """``[L]`` int32: rows of the state; -1: padding."""
    seq_lens: torch.Tensor
    """``[L]``: length of the sequence up to the token, which is the position of the token to choose."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What the requests that sample have got, on the device."""

    chosen: torch.Tensor
    """``[2, n, 1 + d]`` int64: tokens, of which those behind ``num_sampled`` mean nothing, and 1 for choices that mean
    nothing."""
    num_sampled: torch.Tensor
    """``[n]`` int32"""
    num_rejected: torch.Tensor
    """``[n]`` int32: tokens of the query that are not part of the sequence."""
    num_drafted: torch.Tensor | None
    """``[n]`` int32: drafts that were proposed at all; None: no drafts were verified."""

    @property
    def token_ids(self) -> torch.Tensor:
        """``[n, 1 + d]``"""
        return self.chosen[0]

    def packed(self) -> torch.Tensor:
        """Everything that the host wants, in one tensor for one copy.

        ``[n, 2 * (1 + d) + 2]`` int64: tokens, flags, counts of tokens and of drafts; without drafts ``[2, n]``, tokens
        and flags.
        """
        if self.num_drafted is None:
            return self.chosen.squeeze(2)
        counts = torch.stack((self.num_sampled, self.num_drafted), 1)
        return torch.cat((*self.chosen, counts), 1)


class Verifier:
    """Knows which tokens need logits, which choices hold, and how rows go on.

    Args:
        max_num_seqs: most requests in a step.
    """

    def __init__(self, state: DeviceState, max_num_seqs: int) -> None:
        device = state.arena.flat.device
        self._requests = state.requests
        # where there is no speculative decoding, every request that samples yields one token and rejects none
        self._ones = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._ones)
        self._iota = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def logits_rows(self, batch: InputBatch, num_sampled: int) -> LogitsRows:
        """Of a batch whose first ``num_sampled`` requests sample (the padding of a graph among them)."""
        shape = batch.shape
        if not shape.num_drafts:
            rows, seq_lens = batch.idx_mapping[:num_sampled], batch.seq_lens[:num_sampled]
            if shape.is_decode:
                return LogitsRows(None, rows, seq_lens)
            last_tokens = (batch.query_start_loc[1 : num_sampled + 1] - 1).clamp_(min=0)
            return LogitsRows(last_tokens, rows, seq_lens)
        if shape.is_decode:
            # padding is of request -1, whose row is that of the last request: padding too, if there is any
            return LogitsRows(None, batch.idx_mapping[batch.batch_index], batch.metadata.positions + 1)
        # Decodes come first and need logits of all their tokens; of the prefills behind them, the last one's.
        of_decodes = torch.arange(shape.num_decodes * (1 + shape.num_drafts), device=batch.idx_mapping.device)
        last_tokens = batch.query_start_loc[shape.num_decodes + 1 : num_sampled + 1] - 1
        indices = torch.cat((of_decodes, last_tokens))
        return LogitsRows(indices, batch.idx_mapping[batch.batch_index[indices]], batch.metadata.positions[indices] + 1)

    def wanted_tokens(self, batch: InputBatch, whose: LogitsRows) -> WantedTokens | None:
        """The tokens that need logits, where those are not all of the batch's."""
        if whose.indices is None:
            return None
        shape = batch.shape
        num_reqs = len(whose.indices) - shape.num_decodes * shape.num_drafts
        starts = self._iota[: num_reqs + 1]
        if shape.num_drafts:  # those of decodes lie further apart
            starts = starts + starts.clamp(max=shape.num_decodes) * shape.num_drafts
        metadata = replace(
            batch.metadata,
            query_start_loc=starts,
            seq_lens=batch.seq_lens[:num_reqs],
            block_tables=batch.metadata.block_tables[:num_reqs],
            slot_mapping=batch.metadata.slot_mapping[:0],
            positions=batch.metadata.positions[:0],
            num_decodes=0 if shape.num_drafts else num_reqs,
            max_query_len=1 + shape.num_drafts,
        )
        return WantedTokens(whose.indices, metadata)

    def accept(self, batch: InputBatch, chosen: torch.Tensor, num_sampled: int) -> NewTokens:
        """Args:
        chosen: ``[2, L]``, what the target chose for each row of logits: see `Sampled`.
        """
        shape = batch.shape
        if not shape.num_drafts:
            taken, rejected = self._ones[:num_sampled], self._zeros[:num_sampled]
            if self._requests.draft_tokens.shape[1]:
                # steps with drafts that are still in flight may have ended a request: it must not go on beyond its end
                rows = batch.idx_mapping[:num_sampled].clamp(min=0)
                taken = (self._requests.limits[rows] - self._requests.num_computed[rows]).clamp(0, 1)
                rejected = 1 - taken
            return NewTokens(chosen.unsqueeze(2), taken, rejected, None)
        width = 1 + shape.num_drafts
        num_decodes = num_sampled if shape.is_decode else shape.num_decodes
        verified = num_decodes * width
        of_decodes = chosen[:, :verified].view(2, num_decodes, width)
        counts = torch.empty((3, num_sampled), dtype=torch.int32, device=chosen.device)
        taken, rejected, drafted = counts
        accept_drafts(
            batch.idx_mapping[:num_decodes],
            of_decodes[0],
            of_decodes[1],
            self._requests.draft_tokens,
            self._requests.num_computed,
            self._requests.limits,
            num_sampled=taken[:num_decodes],
            num_rejected=rejected[:num_decodes],
            num_drafted=drafted[:num_decodes],
        )
        if num_decodes == num_sampled:
            return NewTokens(of_decodes, taken, rejected, drafted)
        taken[num_decodes:] = 1
        counts[1:, num_decodes:] = 0
        ending = chosen.new_zeros((2, num_sampled - num_decodes, width))
        ending[:, :, 0] = chosen[:, verified:]
        return NewTokens(torch.cat((of_decodes, ending), 1), taken, rejected, drafted)

    def update_rows(self, batch: InputBatch, new: NewTokens | None) -> None:
        """Advance every request by its query, and keep the newest tokens for the next step. None: nobody sampled."""
        if new is None:
            nothing = self._zeros[:0]
            token_ids, num_sampled, num_rejected = nothing.unsqueeze(1), nothing, nothing
        else:
            token_ids, num_sampled, num_rejected = new.token_ids, new.num_sampled, new.num_rejected
        post_update(
            batch.idx_mapping,
            batch.query_start_loc,
            token_ids,
            num_sampled,
            num_rejected,
            num_computed=self._requests.num_computed,
            last_sampled=self._requests.last_sampled,
        )
