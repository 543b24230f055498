"""Attention over the paged KV cache in torch: any device, any shape; the reference of the other backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fleetfoot.kernels.attention import MAX_GATHERED_ELEMENTS, MAX_MASK_ELEMENTS, AttentionBackend
from fleetfoot.records.forward_context import AttentionMetadata


class SDPABackend(AttentionBackend):
    """Gathers each request's K and V from its blocks, in the dtype of queries, and calls
    `F.scaled_dot_product_attention`.

    Prefills run one by one, so that no padding is computed; decodes run in padded groups of bounded size. Positions
    past the end of a request are zeroed after the gather: a block may hold any value there, and a mask does not remove
    NaN.
    """

    name = "sdpa"
    is_capturable = False

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. The output of tokens that belong to no request is zero."""
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        allocate = torch.empty if starts[-1] == query.shape[0] else torch.zeros
        output = allocate(query.shape, dtype=query.dtype, device=query.device)
        for first, last in _decode_groups(seq_lens[: metadata.num_decodes], kv_cache):
            # one token each; in a warm-up step all may start at 0
            tokens, rows = slice(starts[first], starts[first] + last - first), slice(first, last)
            tables, lens = metadata.block_tables[rows], metadata.seq_lens[rows]
            shape = max(seq_lens[rows]), scale, window, soft_cap, sinks, kv_scales
            output[tokens] = _decode(query[tokens], kv_cache, tables, lens, *shape)
        for row in range(metadata.num_decodes, len(seq_lens)):
            tokens = slice(starts[row], starts[row + 1])
            if seq_lens[row] == 0:
                output[tokens] = 0.0  # a request that pads the batch
            elif tokens.start < tokens.stop:
                of_request = metadata.block_tables[row], seq_lens[row], query.dtype, kv_scales
                keys, values = _gather_one(kv_cache, *of_request)
                _prefill(query[tokens], keys, values, output[tokens], scale, window, soft_cap, sinks)
        return output


def _decode_groups(seq_lens: list[int], kv_cache: torch.Tensor) -> list[tuple[int, int]]:
    """Split the decodes into ranges ``(first, last + 1)`` with at most `MAX_GATHERED_ELEMENTS` of padded K."""
    elements_per_token = kv_cache.shape[2] * kv_cache.shape[4]
    groups: list[tuple[int, int]] = []
    first, longest = 0, 0
    for row, seq_len in enumerate(seq_lens):
        longest = max(longest, seq_len)
        if row > first and (row - first + 1) * longest * elements_per_token > MAX_GATHERED_ELEMENTS:
            groups.append((first, row))
            first, longest = row, seq_len
    if seq_lens:
        groups.append((first, len(seq_lens)))
    return groups


def _decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """One query token per request: ``query [num_reqs, num_heads, head_dim]`` -> the same shape."""
    num_reqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    if max_seq_len == 0:
        return torch.zeros_like(query)
    num_blocks = -(-max_seq_len // block_size)
    has_block = torch.arange(num_blocks, device=query.device) * block_size < seq_lens[:, None]  # [num_reqs, num_blocks]
    blocks = block_tables[:, :num_blocks].to(torch.int64).masked_fill(~has_block, 0)
    position = torch.arange(num_blocks * block_size, device=query.device)
    hidden = past_end = position >= seq_lens[:, None]  # [num_reqs, positions]
    gathered = (_gather(kv_cache, blocks, kind, query.dtype, kv_scales) for kind in (0, 1))
    keys, values = (each.masked_fill_(past_end[:, None, :, None], 0) for each in gathered)
    if window is not None:
        hidden = past_end | (position < seq_lens[:, None] - window)
    # The query heads of a KV head are the rows of one matrix, so that K and V are read once for all of them.
    rows = query.reshape(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = ~hidden[:, None, None, :]  # [num_reqs, 1, 1, positions]
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    attended = _attend(rows, keys, values, mask, scale, soft_cap, sinks)
    # For a padding request of length 0 the softmax is over no positions, which is NaN.
    return attended.reshape(query.shape).masked_fill_((seq_lens == 0)[:, None, None], 0)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, kind: int, dtype: torch.dtype, kv_scales: torch.Tensor | None
) -> torch.Tensor:
    """K (0) or V (1) of ``blocks [..., num_blocks]``: ``[..., num_kv_heads, positions, head_dim]``."""
    heads = torch.arange(kv_cache.shape[2], device=kv_cache.device)
    found = kv_cache[blocks[..., None, :], kind, heads[:, None]].flatten(-3, -2)
    return found if kv_scales is None else (found.float() * kv_scales[kind]).to(dtype)


def _gather_one(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, dtype: torch.dtype, kv_scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one request, each ``[num_kv_heads, seq_len, head_dim]``; a view if the request has a single block, not
    in FP8."""
    num_blocks = -(-seq_len // kv_cache.shape[3])
    if num_blocks == 1 and kv_scales is None:
        keys, values = kv_cache[int(block_table[0])]
    else:
        blocks = block_table[:num_blocks].to(torch.int64)
        keys, values = (_gather(kv_cache, blocks, kind, dtype, kv_scales) for kind in (0, 1))
    return keys[:, :seq_len], values[:, :seq_len]


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """The last ``num_tokens`` of one request, written to ``output [num_tokens, num_heads, head_dim]``.

    Processes chunks of rows, each against the positions that its rows attend to: this bounds the mask, and skips the
    upper triangle and the positions before the window.
    """
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads, seq_len = keys.shape[0], keys.shape[1]
    context = seq_len - num_tokens
    step = max(16, MAX_MASK_ELEMENTS // seq_len)
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        first = 0 if window is None else max(0, context + begin + 1 - window)
        last = context + end
        mask = None
        is_causal = begin == 0 and context == 0 and (window is None or window >= end)
        is_causal &= soft_cap is None and sinks is None
        if not is_causal:
            row = torch.arange(context + begin, last, device=query.device)[:, None]
            position = torch.arange(first, last, device=query.device)
            mask = position <= row  # [rows, positions]
            if window is not None:
                mask &= position > row - window
        rows = query[begin:end].transpose(0, 1)[None]  # [1, num_heads, rows, head_dim]
        kv = keys[None, :, first:last], values[None, :, first:last]  # [1, num_kv_heads, positions, head_dim]
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": num_heads != num_kv_heads}
        of_heads = None if sinks is None else sinks.view(num_heads, 1, 1)
        attended = _attend(rows, *kv, mask, scale, soft_cap, of_heads, **options)
        output[begin:end] = attended.squeeze(0).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    **options: bool,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`, and with a soft cap or sinks the same in float32, for which there must be a
    mask. Sinks are broadcast to ``[n, heads, rows, 1]``."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, **options)
    assert mask is not None
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1).float() for tensor in (keys, values))
    scores = query.float() @ keys.transpose(-1, -2)  # [n, heads, rows, positions]
    if soft_cap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(-1)[..., : values.shape[-2]] @ values).to(query.dtype)


class BidirectionalBackend(AttentionBackend):
    """Attention of every token to all tokens of its request, which are in one step; with a window, to those that are no
    farther away than it, in both directions. For embeddings."""

    name = "bidirectional"
    is_capturable = False

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. Raises ValueError: with a soft cap, or sinks."""
        if soft_cap is not None or sinks is not None:
            raise ValueError(f"soft_cap is {soft_cap}, sinks are {sinks}; bidirectional attention has none")
        output, starts = torch.empty_like(query), metadata.query_start_loc.tolist()
        for row, seq_len in enumerate(metadata.seq_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            keys, values = _gather_one(kv_cache, metadata.block_tables[row], seq_len, query.dtype, kv_scales)
            heads = (query[tokens].transpose(0, 1)[None], keys[None], values[None])
            mask = None
            if window is not None and window < seq_len - 1:
                position = torch.arange(seq_len, device=query.device)
                mask = (position[:, None] - position).abs() <= window  # [seq_len, seq_len]
            attended = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
            output[tokens] = attended[0].transpose(0, 1)
        return output
