"""Sampling one token per row of logits: the argmax, or a draw by Gumbel-max (`fleetfoot.kernels.sampling.gumbel`).

The filters of a draw work in place on scores ``[n, vocab]`` (float32, after temperature, each row's maximum shifted to
0) and set the tokens that they remove to -inf. Rows are independent, and a row is not modified if its parameter is off.
Among equal scores, min-p and top-k keep all that equal the threshold. top-p keeps as few as its sum needs, the lowest
ids first. The outcome is a function of the scores and does not depend on the order of a sort.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fleetfoot.kernels.sampling import rows_per_chunk
from fleetfoot.kernels.sampling.gumbel import gumbel_argmax

_MASS_SCALE = 2.0**40
_NUM_SORTED = 1024  # most top-p sets are smaller; a larger one takes a sort of the row
MAX_TOP_K = 1024
"""The largest top-k for which a GPU draws from candidates of each row, which are a few more."""


@dataclass(frozen=True, slots=True)
class RowFilters:
    """Filters of ``m`` rows, each ``[m]``."""

    log_min_p: torch.Tensor
    """float32, -inf where off."""
    top_k: torch.Tensor
    """int32, 0 where off."""
    top_p: torch.Tensor
    """float32, 1 where off."""
    top_k_only: bool = False
    """Every row with a filter has a ``top_k`` of 1 to `MAX_TOP_K`: what other rows need can be omitted."""

    def are_on(self) -> torch.Tensor:
        """``[m]`` bool: whether any of the three is on."""
        return (self.log_min_p > -torch.inf) | (self.top_k > 0) | (self.top_p < 1)

    def at(self, rows: torch.Tensor | slice) -> RowFilters:
        """The filters of some rows."""
        return RowFilters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows], self.top_k_only)

    def apply(self, scores: torch.Tensor, *, on_host: bool = False) -> None:
        """Filter ``scores [m, vocab]``: min-p first, then top-k, then top-p.

        Args:
            on_host: read values of CPU tensors, where that takes less work; False: no host synchronisation.
        """
        if not on_host or (self.log_min_p > -torch.inf).any():
            # the most probable token has score 0, so the ratio of probabilities is exp(score)
            scores.masked_fill_(scores < self.log_min_p.unsqueeze(1), -torch.inf)
        max_top_k = int(self.top_k.clamp(max=scores.shape[1]).max()) if on_host else scores.shape[1]
        if max_top_k > 0:
            apply_top_k(scores, self.top_k.clamp(0, max_top_k), max_top_k)
        if not on_host or (self.top_p < 1).any():
            apply_top_p(scores, self.top_p, on_host=on_host)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Parameters of ``n`` rows of logits, some of which draw.

    The first, second and last are ``[n]``; with ``rows`` they may be longer, and row ``i`` uses entry ``rows[i]``.
    """

    temperatures: torch.Tensor
    """float32. Rows above 0 draw from ``softmax(logits / temperature)``; 0: the argmax."""
    seeds: torch.Tensor
    """int64, 64-bit patterns."""
    positions: torch.Tensor
    """``[n]`` int32 or int64: index in the sequence of the token to sample."""
    filters: RowFilters | None = None
    """min-p, top-k and top-p of random rows, in this order; None: off."""
    rows: torch.Tensor | None = None
    """``[n]``; -1: padding, which gets an undefined token."""

    def gathered(self) -> RandomRows:
        """The same parameters in the order of the logits, without ``rows``."""
        if self.rows is None:
            return self
        filters = None if self.filters is None else self.filters.at(self.rows)
        return RandomRows(self.temperatures[self.rows], self.seeds[self.rows], self.positions, filters)

    def at(self, index: torch.Tensor | slice) -> RandomRows:
        """Some of the rows; without ``rows`` only."""
        filters = None if self.filters is None else self.filters.at(index)
        return RandomRows(self.temperatures[index], self.seeds[index], self.positions[index], filters)


def sample_torch(
    logits: torch.Tensor,
    random: RandomRows | None = None,
    *,
    invalid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token for each row of ``logits [n, vocab]``, which are not modified.

    Args:
        random: None: the argmax of every row, the lowest index among equals.
        invalid: written, ``[n]`` bool or int64: whether the sampled token's logit is NaN or infinite.
        out: ``[n]`` int64, written and returned; None: a new tensor.

    Returns:
        ``[n]`` int64. In a row that contains NaN the sampled token's logit is NaN, and in a row that contains +inf it
        is +inf, so ``invalid`` reports every row without a valid distribution.
    """
    token_ids = torch.argmax(logits, dim=-1, out=out)
    if random is not None:
        random = random.gathered()
        highest = logits.gather(1, token_ids.unsqueeze(1)).float()  # [n, 1]
        is_random = (random.temperatures > 0) & highest.isfinite().squeeze(1)
        step = rows_per_chunk(logits.shape[1], logits.device)
        for begin in range(0, len(logits), step):
            rows = slice(begin, begin + step)
            drawn = _draw(logits[rows], highest[rows], random.at(rows), on_host=False)
            token_ids[rows] = torch.where(is_random[rows], drawn, token_ids[rows])
    if invalid is not None:
        mark_invalid(logits, token_ids, invalid)
    return token_ids


def sample_cpu(
    logits: torch.Tensor,
    random: RandomRows | None = None,
    *,
    invalid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample_torch` for CPU tensors: draws only for the random rows, and filters only rows with filters."""
    token_ids = torch.argmax(logits, dim=-1, out=out)
    if random is not None:
        random = random.gathered()
        draw_filtered(token_ids, logits, random)
        is_plain = random.temperatures > 0
        if random.filters is not None:
            is_plain = is_plain & ~random.filters.are_on()
        _draw_selected(token_ids, logits, is_plain, replace(random, filters=None))
    if invalid is not None:
        mark_invalid(logits, token_ids, invalid)
    return token_ids


def draw_filtered(token_ids: torch.Tensor, logits: torch.Tensor, random: RandomRows) -> None:
    """Replace ``token_ids [n]`` of random rows with filters; CPU tensors only.

    Args:
        random: gathered.
    """
    if random.filters is not None:
        selected = (random.temperatures > 0) & random.filters.are_on()
        token_ids[selected] = logits[selected].argmax(dim=-1)
        _draw_selected(token_ids, logits, selected, random)


def mark_invalid(logits: torch.Tensor, token_ids: torch.Tensor, invalid: torch.Tensor) -> None:
    """Write to ``invalid [n]`` whether the logit of each row's token is NaN or infinite."""
    torch.logical_not(logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).isfinite(), out=invalid)


def _draw_selected(token_ids: torch.Tensor, logits: torch.Tensor, selected: torch.Tensor, random: RandomRows) -> None:
    """Replace the argmaxes ``token_ids [n]`` of ``selected`` rows (``[n]`` bool), a few rows at a time."""
    highest = logits.gather(1, token_ids.unsqueeze(1)).float()  # [n, 1]
    indices = (selected & highest.isfinite().squeeze(1)).nonzero().squeeze(1)
    step = rows_per_chunk(logits.shape[1], logits.device)
    for begin in range(0, len(indices), step):
        rows = indices[begin : begin + step]
        token_ids[rows] = _draw(logits[rows], highest[rows], random.at(rows), on_host=True)


def _draw(logits: torch.Tensor, highest: torch.Tensor, random: RandomRows, *, on_host: bool) -> torch.Tensor:
    """Draw from every row; ``highest [n, 1]`` float32 are the maxima. Returns ``[n]`` int64."""
    # subtracting the maximum first keeps the quotient from overflowing at small temperatures
    scores = logits.sub(highest).div_(random.temperatures.unsqueeze(1))  # [n, vocab] float32
    if random.filters is not None:
        random.filters.apply(scores, on_host=on_host)
    return gumbel_argmax(scores, random.seeds, random.positions.to(torch.int64), on_host=on_host)


def apply_top_k(scores: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> None:
    """Remove tokens below the k-th highest score; ``top_k [n]`` integers, 0 where off, none above ``max_top_k``."""
    vocab_size = scores.shape[1]
    highest = scores.topk(min(max_top_k, vocab_size)).values  # [n, max_top_k], descending
    index = top_k.clamp(1, highest.shape[1]).to(torch.int64).sub_(1)
    threshold = highest.gather(1, index.unsqueeze(1))  # [n, 1]
    threshold.masked_fill_((top_k == 0).unsqueeze(1), -torch.inf)
    scores.masked_fill_(scores < threshold, -torch.inf)


def apply_top_p(scores: torch.Tensor, top_p: torch.Tensor, *, on_host: bool = False) -> None:
    """Keep the smallest set of most probable tokens with probabilities that reach ``top_p [n]``; 1 where off.

    Probabilities are summed as integers (exp(score) in units of 2**-40), so the sums do not depend on the order of
    addition: the set is the same alone, in a batch, and on every device that rounds exp alike.
    """
    vocab_size = scores.shape[1]
    off = top_p >= 1
    target = _mass(scores).sum(dim=-1).to(torch.float64).mul_(top_p).masked_fill_(off, 0.0)  # [n]
    # In most rows few tokens reach top_p, and finding them costs less than a sort. Which rows need more must be read.
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
