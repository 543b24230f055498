"""Choosing one token per row of logits: the argmax, or a draw by Gumbel-max with the noise of `fleetfoot.sampling`."""

from __future__ import annotations

import torch

from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.gumbel import gumbel_argmax, rows_per_chunk


def choose_tokens_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
    invalid: torch.Tensor | None = None,
    filters: RowFilters | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each row of ``logits [n, vocab]``, which stay as they are.

    Args:
        temperatures: ``[n]`` float32. Rows above 0 draw from ``softmax(logits / temperature)``; None or 0: the argmax,
            the lowest index among equals.
        seeds: ``[n]`` int64, 64-bit patterns; wanted if there are temperatures, as is ``positions [n]`` int32 or int64.
        rows: ``[n]``: entry ``rows[i]`` of ``temperatures``, ``seeds`` and ``filters``, which may be longer, is that of
            row ``i``. -1: the row is padding, and its token means nothing.
        invalid: written, ``[n]`` bool or int64: whether the chosen logit is NaN or infinite.
        filters: for rows above 0; min-p first, then top-k, then top-p (`fleetfoot.kernels.sampling.filters`).
        out: ``[n]`` int64, written and returned; None: a new tensor.

    Returns:
        ``[n]`` int64. In a row that holds NaN the token's own logit is NaN, and in a row that holds +inf it is +inf: a
        caller who looks at the chosen logits finds every row that means nothing.
    """
    if rows is not None and temperatures is not None and seeds is not None:
        temperatures, seeds = temperatures[rows], seeds[rows]
        filters = None if filters is None else filters.at(rows)
    token_ids = torch.argmax(logits, dim=-1, out=out)
    if temperatures is not None and seeds is not None and positions is not None:
        is_random = temperatures > 0
        if filters is not None:
            is_filtered = filters.are_on()
            _draw(token_ids, logits, is_random & is_filtered, temperatures, seeds, positions, filters)
            is_random = is_random & ~is_filtered
        _draw(token_ids, logits, is_random, temperatures, seeds, positions, None)
    if invalid is not None:
        mark_invalid(logits, token_ids, invalid)
    return token_ids


def draw_filtered(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: RowFilters,
) -> None:
    """Replace ``token_ids [n]`` of random rows whose filters are on. All else is as for `choose_tokens_torch`."""
    wanted = (temperatures > 0) & filters.are_on()
    token_ids[wanted] = logits[wanted].argmax(dim=-1)
    _draw(token_ids, logits, wanted, temperatures, seeds, positions, filters)


def mark_invalid(logits: torch.Tensor, token_ids: torch.Tensor, invalid: torch.Tensor) -> None:
    """Write to ``invalid [n]`` whether the logit of each row's token is NaN or infinite."""
    torch.logical_not(logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).isfinite(), out=invalid)


def _draw(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    wanted: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filters: RowFilters | None,
) -> None:
    """Replace the argmaxes ``token_ids [n]`` of ``wanted`` rows (``[n]`` bool), a few rows at a time."""
    highest = logits.gather(1, token_ids.unsqueeze(1)).float()  # [n, 1]
    chosen = (wanted & highest.isfinite().squeeze(1)).nonzero().squeeze(1)
    step = rows_per_chunk(logits.shape[1], logits.device)
    for begin in range(0, len(chosen), step):
        rows = chosen[begin : begin + step]
        # shifting first keeps the quotient from overflowing, however small the temperature
        scores = logits[rows].float().sub_(highest[rows]).div_(temperatures[rows].unsqueeze(1))
        if filters is not None:
            filters.at(rows).apply(scores)
        token_ids[rows] = gumbel_argmax(scores, seeds[rows], positions[rows].to(torch.int64))
