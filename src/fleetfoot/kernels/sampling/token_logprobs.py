"""Log-probabilities of sampled tokens and of the most probable tokens, from the model's logits."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv
from fleetfoot.kernels.sampling import rows_per_chunk

MAX_SELECTED = 256
"""Up to this many top tokens are selected one by one on a GPU; more are sorted."""


def token_logprobs_torch(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sampled token of each row, then the ``num`` most probable tokens; equal logits are in order of token ids.

    The entries of a row do not depend on ``num``, nor on other rows.

    Args:
        logits: ``[n, vocab]`` of any float dtype, contiguous within rows.
        token_ids: ``[n]`` int64, the sampled tokens.
        num: 0 to vocab; with ``sizes`` at most `MAX_SELECTED`, and no launch or copy depends on a value.
        sizes: ``[R]`` int32: 1 + number of top tokens of a row; 0: none. Entries beyond it are undefined. None: ``num``
            top tokens for every row.
        rows: ``[n]`` int32, required with ``sizes``: row ``i`` uses entry ``rows[i]``; -1: padding.

    Returns:
        ``[n, 2 * (num + 1) + 1]`` int32, one tensor for one copy: token ids, log-probabilities (the bits of float32),
        and the number of tokens with a logit at least that of the sampled token.
    """
    packed = logprobs_by_sorting(logits, token_ids, num)
    return packed if sizes is None or rows is None else torch.where((_sizes_of(sizes, rows) > 0)[:, None], packed, 0)


def token_logprobs_cpu(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`token_logprobs_torch` for CPU tensors: sorts only the rows with logprobs."""
    if sizes is None or rows is None:
        return logprobs_by_sorting(logits, token_ids, num)
    selected = torch.from_numpy(np.flatnonzero(_sizes_of(sizes, rows).numpy()))
    packed = torch.zeros((len(logits), 2 * num + 3), dtype=torch.int32)
    packed[selected] = logprobs_by_sorting(logits[selected], token_ids[selected], num)
    return packed


def _sizes_of(sizes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[n]``; 0 for padding."""
    return torch.where(rows >= 0, sizes[rows], 0)


def logprobs_by_sorting(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalizers: torch.Tensor | None = None
) -> torch.Tensor:
    """`token_logprobs_torch` for a few rows at a time, so that temporaries do not grow with ``n``.

    Args:
        normalizers: ``[n, 2]`` float32, subtracted from a row's logits one after the other; None: log_softmax.
    """
    packed = torch.empty((len(logits), 2 * num + 3), dtype=torch.int32, device=logits.device)
    step = rows_per_chunk(logits.shape[1], logits.device)
    for number in range(cdiv(len(logits), step)):
        chunk = slice(number * step, (number + 1) * step)
        values, sampled = logits[chunk].to(torch.float32), token_ids[chunk].unsqueeze(1)
        ids = torch.cat((sampled, _top_token_ids(values, num)), dim=1)  # [step, num + 1]
        if normalizers is None:
            logprobs = values.log_softmax(dim=-1).gather(1, ids)
        else:
            logprobs = values.gather(1, ids) - normalizers[chunk, :1] - normalizers[chunk, 1:]
        packed[chunk, : num + 1] = ids
        packed[chunk, num + 1 : -1] = logprobs.view(torch.int32)
        packed[chunk, -1] = (values >= values.gather(1, sampled)).sum(dim=-1)
    return packed


def _top_token_ids(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the ``num`` highest of ``values [n, vocab]`` float32, descending, the lower id first among equals.

    The order of equal values in topk is undefined. It runs on distinct integers instead: the value's bits, mapped to
    integers of the same order, above the complement of the id.
    """
    if num == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    values = values + 0.0  # -0.0 equals 0.0
    bits = values.contiguous().view(torch.int32)
    # The bits of negative floats have the reverse order: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    complement = torch.arange(last, -1, -1, device=values.device)
    keys = (ordered.to(torch.int64) << 32) | complement  # [n, vocab]
    return last - (keys.topk(num).values & 0xFFFFFFFF)
