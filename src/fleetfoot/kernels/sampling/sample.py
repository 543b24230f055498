"""Sampling one token per row of logits: the argmax, or a draw by Gumbel-max (`fleetfoot.kernels.sampling.gumbel`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fleetfoot.kernels.sampling import rows_per_chunk
from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.gumbel import gumbel_argmax


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
