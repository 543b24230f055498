"""Log-probabilities of chosen tokens and of the most probable ones, from the logits as the model gives them."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv
from fleetfoot.kernels.sampling.gumbel import rows_per_chunk

MAX_SELECTED = 256
"""Up to so many most probable tokens are found one by one on a GPU; for more of them, it sorts."""


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token of each row, then the ``num`` most probable ones; tokens whose logits tie stand in order of their ids.

    A row's entries do not depend on ``num``, which is how many there are, nor on other rows.

    Args:
        logits: ``[n, vocab]`` of any float dtype, contiguous within rows.
        token_ids: ``[n]`` int64, the chosen tokens.
        num: 0 to vocab; to `MAX_SELECTED` with ``sizes``, where no grid and no copy depends on a value.
        sizes: ``[R]`` int32: 1 + how many most probable tokens a row wants, 0: nothing; what lies behind, and a row
            that wants nothing, is not computed. None: each wants ``num``.
        rows: ``[n]`` int32, wanted with ``sizes``: entry ``rows[i]`` is that of row ``i``; -1: padding.

    Returns:
        ``[n, 2 * (num + 1) + 1]`` int32, one tensor for one copy: token ids, log-probabilities (the bits of float32),
        and how many tokens' logits are at least the chosen one's.
    """
    if not logits.is_cuda:
        return token_logprobs_torch(logits, token_ids, num, sizes=sizes, rows=rows)
    from fleetfoot.kernels.sampling.token_logprobs_triton import token_logprobs_triton

    if num <= MAX_SELECTED:
        return token_logprobs_triton(logits, token_ids, num, sizes=sizes, rows=rows)[0]
    normalizers = token_logprobs_triton(logits, token_ids, 0)[1]
    return _by_sorting(logits, token_ids, num, normalizers)


def token_logprobs_torch(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of the kernels; with ``sizes`` for CPU tensors."""
    if sizes is None or rows is None:
        return _by_sorting(logits, token_ids, num, None)
    on_host = rows.numpy()
    wanted = torch.from_numpy(np.flatnonzero((on_host >= 0) & (sizes.numpy()[on_host] > 0)))
    packed = torch.zeros((len(logits), 2 * num + 3), dtype=torch.int32, device=logits.device)
    packed[wanted] = _by_sorting(logits[wanted], token_ids[wanted], num, None)
    return packed


def _by_sorting(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalizers: torch.Tensor | None
) -> torch.Tensor:
    """A few rows at a time, so that temporaries do not grow with ``n``.

    Args:
        normalizers: ``[n, 2]`` float32: what to subtract from a row's logits, one after the other; None: log_softmax's.
    """
    packed = torch.empty((len(logits), 2 * num + 3), dtype=torch.int32, device=logits.device)
    step = rows_per_chunk(logits.shape[1], logits.device)
    for number in range(cdiv(len(logits), step)):
        chunk = slice(number * step, (number + 1) * step)
        values, chosen = logits[chunk].to(torch.float32), token_ids[chunk].unsqueeze(1)
        ids = torch.cat((chosen, _top_token_ids(values, num)), dim=1)  # [step, num + 1]
        if normalizers is None:
            logprobs = values.log_softmax(dim=-1).gather(1, ids)
        else:
            logprobs = values.gather(1, ids) - normalizers[chunk, :1] - normalizers[chunk, 1:]
        packed[chunk, : num + 1] = ids
        packed[chunk, num + 1 : -1] = logprobs.view(torch.int32)
        packed[chunk, -1] = (values >= values.gather(1, chosen)).sum(dim=-1)
    return packed


def _top_token_ids(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the ``num`` highest of ``values [n, vocab]`` float32, descending, the lower id first among equals.

    topk promises no order among equals. So it runs on integers that are all different: the value's bits, made to order
    like the value itself, above the complement of the id.
    """
    if num == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    values = values + 0.0  # -0.0 equals 0.0
    bits = values.contiguous().view(torch.int32)
    # Negative floats order backwards by their bits: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    complement = torch.arange(last, -1, -1, device=values.device)
    keys = (ordered.to(torch.int64) << 32) | complement  # [n, vocab]
    return last - (keys.topk(num).values & 0xFFFFFFFF)
