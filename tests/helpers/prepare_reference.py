"""What the preparation operations must yield, in plain loops. Each function takes the name of a batch."""

from __future__ import annotations

import torch

from tests.helpers.prepare_cases import get_batch, int32

Outputs = dict[str, torch.Tensor]


def expected_inputs(name: str) -> Outputs:
    batch = get_batch(name)
    starts, computed, limits = batch.query_start_loc.tolist(), batch.num_computed.tolist(), batch.limits.tolist()
    prefill_lens, pages = batch.prefill_lens.tolist(), batch.token_pages.tolist()
    last, drafts = batch.last_sampled.tolist(), batch.draft_tokens.tolist()
    positions, input_ids, seq_lens = [0] * batch.num_tokens, [0] * batch.num_tokens, [0] * batch.num_reqs
    batch_index, slots = [-1] * batch.num_tokens, [-1] * batch.num_tokens
    tables = torch.zeros(batch.num_reqs, batch.table_width, dtype=torch.int32)
    for request, row in enumerate(batch.idx_mapping.tolist()):
        if row < 0:
            continue
        seq_lens[request] = computed[row] + starts[request + 1] - starts[request]
        for block in range(-(-seq_lens[request] // batch.block_size)):
            tables[request, block] = batch.block_table[row, block]
        for offset, token in enumerate(range(starts[request], starts[request + 1])):
            positions[token], batch_index[token] = computed[row] + offset, request
            block, within = divmod(positions[token], batch.block_size)
            slot = int(batch.block_table[row, block]) * batch.block_size + within
            if positions[token] < limits[row]:
                slots[token] = slot
            if positions[token] < prefill_lens[row]:
                input_ids[token] = pages[slot]
                continue
            input_ids[token] = max(0, last[row] if offset == 0 else drafts[row][offset - 1])
            if slots[token] >= 0:
                pages[slot] = input_ids[token]
    return {
        "positions": torch.tensor(positions, dtype=torch.int64),
        "seq_lens": int32(seq_lens),
        "batch_index": int32(batch_index),
        "slots": torch.tensor(slots, dtype=torch.int64),
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "block_tables": tables,
        "token_pages": int32(pages),
    }


def expected_accepted(name: str) -> Outputs:
    batch = get_batch(name)
    computed, limits = batch.num_computed.tolist(), batch.limits.tolist()
    counts = []
    for row, sampled, invalid in zip(
        batch.idx_mapping.tolist(), batch.target_tokens.tolist(), batch.invalid.tolist(), strict=True
    ):
        count = 0
        if row < 0:
            counts.append((0, 0, 0))
            continue
        drafts = batch.draft_tokens[row].tolist()
        while count < len(drafts) and sampled[count] == drafts[count] and not invalid[count]:
            count += 1
        count = min(count + 1, max(0, limits[row] - computed[row]))
        counts.append((count, len(sampled) - count, sum(draft >= 0 for draft in drafts)))
    return {"counts": int32(counts).t()}


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
