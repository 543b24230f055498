"""min-p, top-k and top-p: which tokens of a row can be drawn.

Each works in place on scores ``[n, vocab]`` (float32, after temperature, each row's maximum shifted to 0) and sets the
tokens that it removes to -inf. Rows are independent, and a row whose parameter is off is not modified.

Among equal scores, min-p and top-k keep all that equal the threshold. top-p keeps as few as its sum needs, the lowest
ids first. The outcome is a function of the scores and does not depend on the order of a sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MASS_SCALE = 2.0**40
_NUM_SORTED = 1024  # most top-p sets are smaller; a larger one takes a sort of the row


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Filters of ``m`` rows, each ``[m]``."""

    log_min_p: torch.Tensor
    """float32, -inf where off."""
    top_k: torch.Tensor
    """int32, 0 where off."""
    top_p: torch.Tensor
    """float32, 1 where off."""

    def are_on(self) -> torch.Tensor:
        """``[m]`` bool: whether any of the three is on."""
        return (self.log_min_p > -torch.inf) | (self.top_k > 0) | (self.top_p < 1)

    def at(self, rows: torch.Tensor | slice) -> RowFilters:
        """The filters of some rows."""
        return RowFilters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])

    def apply(self, scores: torch.Tensor, *, on_host: bool = False) -> None:
        """Filter ``scores [m, vocab]``: min-p first, then top-k, then top-p.

        Args:
            on_host: read values of CPU tensors, where that takes less work; False: no host synchronisation.
        """
        if not on_host or (self.log_min_p > -torch.inf).any():
            apply_min_p(scores, self.log_min_p)
        max_top_k = int(self.top_k.clamp(max=scores.shape[1]).max()) if on_host else scores.shape[1]
        if max_top_k > 0:
            apply_top_k(scores, self.top_k.clamp(0, max_top_k), max_top_k)
        if not on_host or (self.top_p < 1).any():
            apply_top_p(scores, self.top_p, on_host=on_host)


def apply_min_p(scores: torch.Tensor, log_min_p: torch.Tensor) -> None:
    """Remove tokens less probable than ``min_p`` times the most probable one; ``log_min_p [n]``, -inf where off.

    The most probable token has score 0, so the ratio of probabilities is exp(score) and no softmax is needed.
    """
    scores.masked_fill_(scores < log_min_p.unsqueeze(1), -torch.inf)


def apply_top_k(scores: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> None:
    """Remove tokens below the k-th highest score; ``top_k [n]`` integers, 0 where off, none above ``max_top_k``."""
    vocab_size = scores.shape[1]
    highest = scores.topk(min(max_top_k, vocab_size)).values  # [n, max_top_k], descending
    index = top_k.clamp(1, highest.shape[1]).to(torch.int64).sub_(1)
    threshold = highest.gather(1, index.unsqueeze(1))  # [n, 1]
    threshold.masked_fill_((top_k == 0).unsqueeze(1), -torch.inf)
    scores.masked_fill_(scores < threshold, -torch.inf)


def apply_top_p(scores: torch.Tensor, top_p: torch.Tensor, *, on_host: bool = False) -> None:
    """Keep the smallest set of most probable tokens whose probabilities reach ``top_p [n]``; 1 where off.

    Probabilities are summed as integers (exp(score) in units of 2**-40), whose sums do not depend on the order of
    addition: the set is the same alone, in a batch, and on every device that rounds exp alike.
    """
    vocab_size = scores.shape[1]
    off = top_p >= 1
    target = _mass(scores).sum(dim=-1).to(torch.float64).mul_(top_p).masked_fill_(off, 0.0)  # [n]
    # In most rows few tokens reach top_p, and finding them costs less than sorting the row. Which rows need more
    # must be read.
    num_sorted = min(_NUM_SORTED, vocab_size) if on_host else vocab_size
    threshold, num_tied, num_kept = _top_p_cut(_highest(scores, num_sorted), target)
    if num_sorted < vocab_size:
        longer = (num_kept == num_sorted).nonzero().squeeze(1)
        if len(longer):
            whole = _highest(scores[longer], vocab_size)
            threshold[longer], num_tied[longer], _ = _top_p_cut(whole, target[longer])
    threshold.masked_fill_(off, -torch.inf)
    scores.masked_fill_(scores < threshold.unsqueeze(1), -torch.inf)
    tied = scores == threshold.unsqueeze(1)
    if on_host and not (tied.count_nonzero(dim=-1) > num_tied).logical_and_(threshold > -torch.inf).any():
        return
    scores.masked_fill_(tied.logical_and_(tied.cumsum(dim=-1) > num_tied.unsqueeze(1)), -torch.inf)


def _mass(scores: torch.Tensor) -> torch.Tensor:
    """exp(score) in units of 2**-40, as int64: at most 2**40 each, so that sums over any vocabulary are exact."""
    return scores.exp().mul_(_MASS_SCALE).to(torch.int64)


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` highest scores of each row, descending: ``[n, count]``."""
    if count < scores.shape[1]:
        return scores.topk(count).values
    return scores.sort(dim=-1, descending=True).values


def _top_p_cut(highest: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the sum of the highest scores ``[n, count]`` (descending) reaches the mass ``target [n]``.

    Returns, ``[n]`` each: the lowest score to keep, the number of tokens to keep of that score, and in all (``count``,
    if the sum is smaller).
    """
    mass = _mass(highest)
    mass_before = mass.cumsum(dim=-1).sub_(mass)  # exclusive prefix sum
    num_kept = (mass_before < target.unsqueeze(1)).sum(dim=-1).clamp_(min=1)
    threshold = highest.gather(1, num_kept.unsqueeze(1) - 1)  # [n, 1]
    num_tied = num_kept - (highest > threshold).sum(dim=-1)
    return threshold.squeeze(1), num_tied, num_kept
