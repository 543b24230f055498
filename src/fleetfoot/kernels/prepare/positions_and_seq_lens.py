"""Where each token of the batch stands in its sequence, and how long the sequences are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.kernels.runtime.upper_bound import search_steps, upper_bound

if TYPE_CHECKING:
    import triton.language as tl


def positions_and_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
) -> None:
    """A query continues its sequence behind the tokens that are computed.

    Args:
        idx_mapping: ``[n]``: each request's row of state; -1: padding.
        query_start_loc: ``[n + 1]``, ascending from 0, at most T: where each request's tokens begin.
        num_computed: ``[R]``: tokens whose KV is written.
        positions: written, ``[T]`` int64: num_computed + offset in the query; 0 for padding.
        seq_lens: written, ``[n]``: num_computed + query length; 0 for padding.
        batch_index: written, ``[T]``: each token's request; -1 for tokens past ``query_start_loc[n]`` and for tokens of
            requests that are padding.
    """
    implementation = positions_and_seq_lens_triton if positions.is_cuda else positions_and_seq_lens_cpu
    implementation(
        idx_mapping, query_start_loc, num_computed, positions=positions, seq_lens=seq_lens, batch_index=batch_index
    )


def positions_and_seq_lens_cpu(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    rows, starts = idx_mapping.numpy(), query_start_loc.numpy()
    request_of, position_of, lengths = batch_index.numpy(), positions.numpy(), seq_lens.numpy()
    num_reqs, num_tokens = len(rows), int(starts[-1])
    computed = num_computed.numpy().take(rows, mode="clip")  # [n]; padding reads row 0
    query_lens = starts[1:] - starts[:-1]  # [n]
    np.add(computed, query_lens, out=lengths)
    request_of[:num_tokens] = np.arange(num_reqs).repeat(query_lens)
    request_of[num_tokens:] = -1
    np.add(np.arange(num_tokens), (computed - starts[:-1]).repeat(query_lens), out=position_of[:num_tokens])
    position_of[num_tokens:] = 0
    is_padding = rows < 0
    if is_padding.any():
        lengths[is_padding] = 0
        of_padding = is_padding.repeat(query_lens)  # [num_tokens]
        request_of[:num_tokens][of_padding] = -1
        position_of[:num_tokens][of_padding] = 0


def positions_and_seq_lens_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
) -> None:
    num_reqs, num_tokens = idx_mapping.shape[0], positions.shape[0]
    tile = 256
    _positions_and_seq_lens_kernel[(cdiv(max(num_reqs, num_tokens), tile),)](
        idx_mapping,
        query_start_loc,
        num_computed,
        positions,
        seq_lens,
        batch_index,
        num_reqs,
        num_tokens,
        search_steps(num_reqs + 1),
        tile=tile,
    )


@triton_kernel(specialize=False)
def _positions_and_seq_lens_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    positions_ptr,
    seq_lens_ptr,
    batch_index_ptr,
    num_reqs,
    num_tokens,
    steps,
    tile: tl.constexpr,
):
    # Each element of the tile stands for one token, and for one request.
    index = tl.program_id(0) * tile + tl.arange(0, tile)

    is_request = index < num_reqs
    row = tl.load(idx_mapping_ptr + index, mask=is_request, other=-1)
    begin = tl.load(query_start_loc_ptr + index, mask=is_request, other=0)
    end = tl.load(query_start_loc_ptr + index + 1, mask=is_request, other=0)
    computed = tl.load(num_computed_ptr + row, mask=row >= 0, other=0)
    tl.store(seq_lens_ptr + index, tl.where(row >= 0, computed + end - begin, 0), mask=is_request)

    # Of several requests that begin at the same token, all but the last are empty.
    request = upper_bound(query_start_loc_ptr, num_reqs + 1, steps, index) - 1
    is_token = (index < num_tokens) & (request < num_reqs)
    row = tl.load(idx_mapping_ptr + request, mask=is_token, other=-1)
    is_token = row >= 0
    begin = tl.load(query_start_loc_ptr + request, mask=is_token, other=0)
    computed = tl.load(num_computed_ptr + row, mask=is_token, other=0)
    position = tl.where(is_token, computed + index - begin, 0)
    tl.store(positions_ptr + index, position.to(tl.int64), mask=index < num_tokens)
    tl.store(batch_index_ptr + index, tl.where(is_token, request, -1), mask=index < num_tokens)
