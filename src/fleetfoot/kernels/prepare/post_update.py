"""What a step leaves in the rows: more computed tokens, and the token that the next step begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.native.library import load_kernels, native_available

if TYPE_CHECKING:
    import triton.language as tl


def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    """Advance each request by its query, less the drafts that were rejected. The batch's first m requests sampled.

    Args:
        idx_mapping: ``[n]``: each request's row, no row twice; -1: padding, whose values are not read.
        query_start_loc: ``[n + 1]``
        sampled: ``[m, k + 1]``, int32 or int64, m <= n: new tokens.
        num_sampled: ``[m]``: how many of them count; 0 leaves ``last_sampled`` alone.
        num_rejected: ``[m]``: tokens of the query that are not part of the sequence.
        num_computed: ``[R]``, updated.
        last_sampled: ``[R]``, updated.
    """
    if num_computed.is_cuda:
        implementation = post_update_triton
    else:
        implementation = post_update_native if native_available()[0] else post_update_cpu
    implementation(
        idx_mapping,
        query_start_loc,
        sampled,
        num_sampled,
        num_rejected,
        num_computed=num_computed,
        last_sampled=last_sampled,
    )


def post_update_cpu(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    rows, starts, counts = idx_mapping.numpy(), query_start_loc.numpy(), num_sampled.numpy()
    num_sampling = len(counts)
    is_request = rows >= 0  # [n]
    advance = starts[1:] - starts[:-1]  # [n]
    advance[:num_sampling] -= num_rejected.numpy()
    num_computed.numpy()[rows[is_request]] += advance[is_request]
    requests = (is_request[:num_sampling] & (counts > 0)).nonzero()[0]
    last_sampled.numpy()[rows[requests]] = sampled.numpy()[requests, counts[requests] - 1]


def post_update_native(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    """The kernel in C, for CPU tensors whose last dimension is contiguous."""
    sampled = sampled.to(torch.int64)
    load_kernels().post_update(
        idx_mapping.data_ptr(),
        idx_mapping.shape[0],
        query_start_loc.data_ptr(),
        sampled.data_ptr(),
        sampled.stride(0),
        num_sampled.data_ptr(),
        num_rejected.data_ptr(),
        num_sampled.shape[0],
        num_computed.data_ptr(),
        last_sampled.data_ptr(),
    )


def post_update_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    *,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    num_reqs = idx_mapping.shape[0]
    tile = 128
    _post_update_kernel[(cdiv(num_reqs, tile),)](
        idx_mapping,
        query_start_loc,
        sampled,
        num_sampled,
        num_rejected,
        num_computed,
        last_sampled,
        num_reqs,
        num_sampled.shape[0],
        sampled.stride(0),
        tile=tile,
    )


@triton_kernel(specialize=False)
def _post_update_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    num_computed_ptr,
    last_sampled_ptr,
    num_reqs,
    num_sampling,
    sampled_stride,
    tile: tl.constexpr,
):
    request = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.load(idx_mapping_ptr + request, mask=request < num_reqs, other=-1)
    is_request = row >= 0
    begin = tl.load(query_start_loc_ptr + request, mask=is_request, other=0)
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
    is_sampling = is_request & (request < num_sampling)
    rejected = tl.load(num_rejected_ptr + request, mask=is_sampling, other=0)
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    tl.store(num_computed_ptr + row, computed + end - begin - rejected, mask=is_request)

    count = tl.load(num_sampled_ptr + request, mask=is_sampling, other=0)
    last_ptr = sampled_ptr + request.to(tl.int64) * sampled_stride + count - 1
    token_id = tl.load(last_ptr, mask=count > 0, other=0)
    tl.store(last_sampled_ptr + row, token_id.to(tl.int32), mask=count > 0)
