"""Draft verification: a draft is accepted while it equals the token that the target sampled at its position.

The target is sampled with the same random numbers as without drafts, so the output does not depend on them. Each decode
has ``1 + d`` rows of logits, which come first; every other request that samples has one. After an invalid sample (a
row of logits that is no distribution) nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.records.step import ModelRunnerOutput, PackedLogprobs

INVALID_MESSAGE = (
    "no token can be sampled: the model's logits are NaN or infinite (check the weights and the dtype), or the "
    "request's allowed_token_ids, bad_words, min_tokens, logit_bias and structured_outputs leave no token"
)
"""The entry of `ModelRunnerOutput.invalid` for a row that cannot be sampled."""


# --- Model Runner V1: on the host -------------------------------------------------------------------------------------


def verify_drafts(
    sampled: list[int],
    errors: Sequence[str],
    drafts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    logprobs: dict[int, PackedLogprobs],
) -> ModelRunnerOutput:
    """Accept drafts. ``sampled``, ``errors``: ``[num_logits]``, the target's samples, and why each is invalid, empty if
    it is valid; ``drafts``: ``[num_decodes][d]`` (-1: none), empty without drafts; ``max_new_tokens``:
    ``[num_sampled]``, tokens until each request reaches its length; ``logprobs``: row of the logits -> logprobs, if
    requested."""
    token_ids: list[list[int]] = []
    output = ModelRunnerOutput(token_ids)
    begin = 0
    for index, max_new in enumerate(max_new_tokens):
        proposed = drafts[index] if index < len(drafts) else ()
        end = begin + 1 + len(proposed)
        tokens, wrong = sampled[begin:end], errors[begin:end]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == tokens[accepted] and not wrong[accepted]:
            accepted += 1
        count = min(accepted + 1, max_new)
        token_ids.append(tokens[:count])
        if count and wrong[count - 1]:
            output.invalid[index] = wrong[count - 1]
        if count and begin in logprobs:
            output.logprobs[index] = [logprobs[row] for row in range(begin, begin + count)]
        begin = end
    output.num_drafted = [sum(draft >= 0 for draft in proposed) for proposed in drafts]
    return output


# --- Model Runner V2: on the device -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """The rows of logits of a step."""

    indices: torch.Tensor | None
    """``[L]`` int64: the batch's tokens that they belong to; None: the first L, in order."""
    rows: torch.Tensor
    """``[L]`` int32: rows of the runner's state; -1: padding."""
    seq_lens: torch.Tensor
    """``[L]``: length of the sequence up to the token, which is the position of the token to sample."""
    request_rows: torch.Tensor
    """``[n]`` int32: rows of the requests that sample; -1: padding."""
    num_decodes: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """The tokens of the ``n`` requests that sampled."""

    sampled: torch.Tensor
    """``[2, n, 1 + d]`` int64: token ids, of which the first ``num_sampled`` are valid, and 1 for invalid samples."""
    num_sampled: torch.Tensor
    """``[n]`` int32"""
    num_rejected: torch.Tensor
    """``[n]`` int32: query tokens that are not part of the sequence."""
    num_drafted: torch.Tensor | None
    """``[n]`` int32: number of drafts that were proposed; None: no drafts were verified."""

    @property
    def token_ids(self) -> torch.Tensor:
        """``[n, 1 + d]``"""
        return self.sampled[0]

    def packed(self) -> torch.Tensor:
        """The data that the host reads, in one tensor for one copy.

        ``[n, 2 * (1 + d) + 2]`` int64: tokens, flags, numbers of tokens and of drafts; without drafts ``[2, n]``:
        tokens and flags.
        """
        if self.num_drafted is None:
            return self.sampled.squeeze(2)
        return torch.cat((*self.sampled, torch.stack((self.num_sampled, self.num_drafted), 1)), 1)


class DraftVerification:
    """Accepts drafts on the device. ``rows``: the state of all rows; ``accept_drafts``: see `Kernels.accept_drafts`."""

    def __init__(
        self,
        rows: RowTables,
        accept_drafts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RowTables, torch.Tensor], None],
    ) -> None:
        self._rows = rows
        self._accept_drafts = accept_drafts
        # without drafts, every request that samples gets one token and rejects none
        self._ones = torch.ones_like(rows.limits)
        self._zeros = torch.zeros_like(rows.limits)

    def __call__(self, sampled: torch.Tensor, batch: LogitsBatch) -> DeviceSamples:
        """Accept the drafts of ``batch``. ``sampled``: ``[2, L]`` int64: token ids and invalid flags of the target's
        samples."""
        num_sampled, num_decodes = len(batch.request_rows), batch.num_decodes
        if not batch.num_drafts:
            counts, rejected = self._ones[:num_sampled], self._zeros[:num_sampled]
            if self._rows.draft_tokens.shape[1]:
                # a step with drafts that is still in flight may have ended the request
                rows = batch.request_rows.clamp(min=0)
                counts = (self._rows.limits[rows] - self._rows.num_computed[rows]).clamp(0, 1)
                rejected = 1 - counts
            return DeviceSamples(sampled.unsqueeze(2), counts, rejected, None)
        width = 1 + batch.num_drafts
        num_verified = num_decodes * width
        of_decodes = sampled[:, :num_verified].view(2, num_decodes, width)
        numbers = torch.empty((3, num_sampled), dtype=torch.int32, device=sampled.device)
        counts, rejected, drafted = numbers
        rows = batch.request_rows[:num_decodes]
        self._accept_drafts(rows, of_decodes[0], of_decodes[1], self._rows, numbers[:, :num_decodes])
        if num_decodes == num_sampled:
            return DeviceSamples(of_decodes, counts, rejected, drafted)
        counts[num_decodes:] = 1
        numbers[1:, num_decodes:] = 0
        others = sampled.new_zeros((2, num_sampled - num_decodes, width))
        others[:, :, 0] = sampled[:, num_verified:]
        return DeviceSamples(torch.cat((of_decodes, others), 1), counts, rejected, drafted)
