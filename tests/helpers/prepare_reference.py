"""What the preparation ops must yield, in plain loops. Each function takes the name of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from tests.helpers.prepare_cases import get_batch, int32

Outputs = dict[str, torch.Tensor]

SENTINEL = -77
"""What outputs hold before an op runs."""


@dataclass(frozen=True)
class Token:
    request: int
    row: int
    position: int
    offset: int
    slot: int


@cache
def _tokens(name: str) -> list[Token | None]:
    """The batch's tokens; None: padding."""
    batch = get_batch(name)
    rows, starts = batch.idx_mapping.tolist(), batch.query_start_loc.tolist()
    computed, table = batch.num_computed.tolist(), batch.block_table.tolist()
    limits = batch.limits.tolist()
    tokens: list[Token | None] = [None] * batch.num_tokens
    for request, row in enumerate(rows):
        for index in range(starts[request], starts[request + 1]):
            if row >= 0:
                offset = index - starts[request]
                position = computed[row] + offset
                block, within = divmod(position, batch.block_size)
                slot = table[row][block] * batch.block_size + within
                if position >= limits[row]:
                    slot = -1
                tokens[index] = Token(request, row, position, offset, slot)
    return tokens


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def expected_positions(name: str) -> Outputs:
    batch, tokens = get_batch(name), _tokens(name)
    query_lens, computed = batch.query_start_loc.diff().tolist(), batch.num_computed.tolist()
    lengths = [computed[row] + query_lens[b] if row >= 0 else 0 for b, row in enumerate(batch.idx_mapping.tolist())]
    return {
        "positions": _int64([token.position if token else 0 for token in tokens]),
        "seq_lens": int32(lengths),
        "batch_index": int32([token.request if token else -1 for token in tokens]),
    }


def expected_slots(name: str) -> Outputs:
    return {"slots": _int64([token.slot if token else -1 for token in _tokens(name)])}


def expected_prefill_inputs(name: str) -> Outputs:
    batch, tokens = get_batch(name), _tokens(name)
    prefill_lens, pages = batch.prefill_lens.tolist(), batch.token_pages.tolist()
    input_ids = [SENTINEL] * len(tokens)
    for index, token in enumerate(tokens):
        if token is None:
            input_ids[index] = 0
        elif token.position < prefill_lens[token.row]:
            input_ids[index] = pages[token.slot]
    return {"input_ids": _int64(input_ids)}


def expected_sampled_and_drafts(name: str) -> Outputs:
    batch, tokens = get_batch(name), _tokens(name)
    prefill_lens, pages = batch.prefill_lens.tolist(), batch.token_pages.tolist()
    last, drafts = batch.last_sampled.tolist(), batch.draft_tokens.tolist()
    input_ids = [SENTINEL] * len(tokens)
    for index, token in enumerate(tokens):
        if token is not None and token.position >= prefill_lens[token.row]:
            token_id = last[token.row] if token.offset == 0 else drafts[token.row][token.offset - 1]
            input_ids[index] = max(token_id, 0)
            if token.slot >= 0:
                pages[token.slot] = max(token_id, 0)
    return {"token_pages": int32(pages), "input_ids": _int64(input_ids)}


def expected_tables(name: str) -> Outputs:
    batch, seq_lens = get_batch(name), expected_positions(name)["seq_lens"].tolist()
    tables = torch.zeros(batch.num_reqs, batch.table_width, dtype=torch.int32)
    for request, row in enumerate(batch.idx_mapping.tolist()):
        for block in range(-(-seq_lens[request] // batch.block_size)):
            tables[request, block] = batch.block_table[row, block]
    return {"tables": tables}


def expected_decode(name: str) -> Outputs:
    known, new = expected_prefill_inputs(name)["input_ids"], expected_sampled_and_drafts(name)
    input_ids = torch.where(known == SENTINEL, new["input_ids"], known)
    parts = expected_positions(name) | expected_slots(name) | expected_tables(name)
    return parts | {"token_pages": new["token_pages"], "input_ids": input_ids}


def expected_logits_indices(name: str) -> Outputs:
    batch = get_batch(name)
    ends, bounds = batch.query_start_loc.tolist()[1:], batch.cu_num_logits.tolist()
    indices: list[int] = []
    for request in range(len(bounds) - 1):
        wanted = bounds[request + 1] - bounds[request]
        indices.extend(range(ends[request] - wanted, ends[request]))
    return {"indices": _int64(indices + [0] * (batch.num_logits_entries - len(indices)))}


def expected_accepted(name: str) -> Outputs:
    batch = get_batch(name)
    computed, limits = batch.num_computed.tolist(), batch.limits.tolist()
    num_sampled, num_rejected, num_drafted = [], [], []
    for row, chosen, invalid in zip(
        batch.idx_mapping.tolist(), batch.chosen.tolist(), batch.invalid.tolist(), strict=True
    ):
        count = 0
        if row >= 0:
            drafts = batch.draft_tokens[row].tolist()
            while count < len(drafts) and chosen[count] == drafts[count] and not invalid[count]:
                count += 1
            count = min(count + 1, max(0, limits[row] - computed[row]))
        num_sampled.append(count)
        num_rejected.append(len(chosen) - count if row >= 0 else 0)
        num_drafted.append(sum(draft >= 0 for draft in batch.draft_tokens[row].tolist()) if row >= 0 else 0)
    values = {"num_sampled": num_sampled, "num_rejected": num_rejected, "num_drafted": num_drafted}
    return {name: int32(counts) for name, counts in values.items()}


def expected_post_update(name: str) -> Outputs:
    batch = get_batch(name)
    computed, last = batch.num_computed.tolist(), batch.last_sampled.tolist()
    query_lens, counts = batch.query_start_loc.diff().tolist(), batch.num_sampled.tolist()
    for request, row in enumerate(batch.idx_mapping.tolist()):
        if row < 0:
            continue
        computed[row] += query_lens[request]
        if request < len(counts):
            computed[row] -= int(batch.num_rejected[request])
            if counts[request] > 0:
                last[row] = int(batch.sampled[request, counts[request] - 1])
    return {"num_computed": int32(computed), "last_sampled": int32(last)}


def expected_writes(name: str) -> Outputs:
    batch = get_batch(name)
    target, staged = batch.target.tolist(), batch.staged.tolist()
    pairs = staged[batch.front_size :]
    for write in range(batch.num_writes):
        target[pairs[2 * write]] = pairs[2 * write + 1]
    return {"front": int32(staged[: batch.front_size]), "target": int32(target)}
