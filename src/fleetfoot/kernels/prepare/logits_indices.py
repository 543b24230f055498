"""Which tokens of the batch need logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.kernels.runtime.upper_bound import search_steps, upper_bound

if TYPE_CHECKING:
    import triton.language as tl


def logits_indices(query_start_loc: torch.Tensor, cu_num_logits: torch.Tensor, *, out: torch.Tensor) -> None:
    """Each of the batch's first m requests wants the logits of the last tokens of its query.

    Args:
        query_start_loc: ``[n + 1]``, n >= m.
        cu_num_logits: ``[m + 1]``, ascending from 0, at most L: request ``i`` wants
            ``cu_num_logits[i + 1] - cu_num_logits[i]`` tokens.
        out: written, ``[L]`` int64: indices of tokens in batch order; 0 from ``cu_num_logits[m]`` on.
    """
    implementation = logits_indices_triton if out.is_cuda else logits_indices_cpu
    implementation(query_start_loc, cu_num_logits, out=out)


def logits_indices_cpu(query_start_loc: torch.Tensor, cu_num_logits: torch.Tensor, *, out: torch.Tensor) -> None:
    """The twin of the kernel, for CPU tensors."""
    bounds, indices = cu_num_logits.numpy(), out.numpy()
    num_logits = int(bounds[-1])
    # The last index of each request, less its place in `out`, is the distance of all its indices from theirs.
    distance = query_start_loc.numpy()[1 : len(bounds)] - bounds[1:]  # [m]
    np.add(np.arange(num_logits), distance.repeat(bounds[1:] - bounds[:-1]), out=indices[:num_logits])
    indices[num_logits:] = 0


def logits_indices_triton(query_start_loc: torch.Tensor, cu_num_logits: torch.Tensor, *, out: torch.Tensor) -> None:
    num_entries, num_bounds = out.shape[0], cu_num_logits.shape[0]
    tile = 256
    _logits_indices_kernel[(cdiv(num_entries, tile),)](
        query_start_loc, cu_num_logits, out, num_entries, num_bounds, search_steps(num_bounds), tile=tile
    )


@triton_kernel(specialize=False)
def _logits_indices_kernel(
    query_start_loc_ptr, cu_num_logits_ptr, out_ptr, num_entries, num_bounds, steps, tile: tl.constexpr
):
    entry = tl.program_id(0) * tile + tl.arange(0, tile)
    # The first bound behind an entry is its request's end.
    bound = upper_bound(cu_num_logits_ptr, num_bounds, steps, entry)
    is_logit = (entry < num_entries) & (bound < num_bounds)
    query_end = tl.load(query_start_loc_ptr + bound, mask=is_logit, other=0)
    logits_end = tl.load(cu_num_logits_ptr + bound, mask=is_logit, other=0)
    index = tl.where(is_logit, query_end - (logits_end - entry), 0)
    tl.store(out_ptr + entry, index.to(tl.int64), mask=entry < num_entries)
