"""Choosing one token per row of logits: the argmax, or a draw by Gumbel-max with the noise of `fleetfoot.sampling`."""

from __future__ import annotations

import torch

from fleetfoot.sampling.gumbel import gumbel_argmax


def choose_tokens_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each row of ``logits [n, vocab]``, which stay as they are.

    Args:
        temperatures: ``[n]`` float32. Rows above 0 draw from ``softmax(logits / temperature)``; None or 0: the argmax,
            the lowest index among equals.
        seeds: ``[n]`` int64, 64-bit patterns; wanted if there are temperatures, as is ``positions [n]`` int64.

    Returns:
        ``[n]`` int64. In a row that holds NaN the token's own logit is NaN, and in a row that holds +inf it is +inf: a
        caller who looks at the chosen logits finds every row that means nothing.
    """
    token_ids = logits.argmax(dim=-1)
    if temperatures is None or seeds is None or positions is None:
        return token_ids
    highest = logits.gather(1, token_ids.unsqueeze(1)).float()  # [n, 1]
    random = ((temperatures > 0) & highest.isfinite().squeeze(1)).nonzero().squeeze(1)
    if len(random) > 0:
        scores = logits[random].float().sub_(highest[random]).div_(temperatures[random].unsqueeze(1))
        token_ids[random] = gumbel_argmax(scores, seeds[random], positions[random])
    return token_ids
