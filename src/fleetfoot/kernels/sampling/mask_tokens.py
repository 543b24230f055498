"""Token masks: tokens that a grammar does not allow are excluded by adding -inf, as by the logits processors.

``logits``: ``[n, vocab]`` of any float dtype, contiguous within rows, changed in place; ``masks``: ``[m, ceil(vocab /
32)]`` int32: bit ``t % 32`` of word ``t // 32`` is set if token ``t`` is allowed; ``index``: ``[n]`` int32: the mask of
each row, -1: every token is allowed.

`mask_tokens_torch` is the reference; `mask_tokens_cpu` is faster on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.kernels.sampling import rows_per_chunk

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 4096


def mask_tokens_torch(logits: torch.Tensor, masks: torch.Tensor, index: torch.Tensor) -> None:
    """See the module. Does not synchronise with the host."""
    vocab_size = logits.shape[1]
    token = torch.arange(vocab_size, device=logits.device)
    step = rows_per_chunk(vocab_size, logits.device)
    for begin in range(0, len(logits), step):
        rows, numbers = logits[begin : begin + step], index[begin : begin + step]
        words = masks[numbers.clamp(min=0)][:, token // 32]  # [rows, vocab]
        is_allowed = ((words >> (token % 32)) & 1 > 0) | (numbers < 0).unsqueeze(1)
        rows += torch.where(is_allowed, 0.0, -torch.inf).to(rows.dtype)


def mask_tokens_cpu(logits: torch.Tensor, masks: torch.Tensor, index: torch.Tensor) -> None:
    """`mask_tokens_torch` for CPU tensors: reads rows with masks only."""
    bits = masks.numpy().view(np.uint8)
    for row, number in enumerate(index.tolist()):
        if number >= 0:
            is_allowed = np.unpackbits(bits[number], count=logits.shape[1], bitorder="little")
            logits[row] += torch.where(torch.from_numpy(is_allowed) > 0, 0.0, -torch.inf).to(logits.dtype)


def mask_tokens_triton(logits: torch.Tensor, masks: torch.Tensor, index: torch.Tensor) -> None:
    """See the module. One launch with a grid that depends on shapes alone."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    overlap = can_overlap(logits.device)
    _mask_tokens_kernel[(num_rows, cdiv(vocab_size, _TILE))](
        logits, masks, index, logits.stride(0), vocab_size, masks.stride(0),
        tile=_TILE, overlap=overlap, **launch_options(overlap),
    )  # fmt: skip


@triton_kernel(unspecialized=("index_ptr",))
def _mask_tokens_kernel(
    logits_ptr, masks_ptr, index_ptr, row_stride, vocab_size, mask_stride, tile: tl.constexpr, overlap: tl.constexpr
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(index_ptr + row).to(tl.int64)
    if number >= 0:
        token = tl.program_id(1) * tile + tl.arange(0, tile)
        is_token = token < vocab_size
        words = tl.load(masks_ptr + number * mask_stride + token // 32, mask=is_token, other=0)
        is_banned = ((words >> (token % 32)) & 1) == 0
        place = logits_ptr + row * row_stride + token
        logit = tl.load(place, mask=is_token & is_banned).to(tl.float32)
        tl.store(place, logit + float("-inf"), mask=is_token & is_banned)
