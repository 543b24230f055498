"""The short steps of a drafter: where their tokens stand, where their KV goes, and what is drawn."""

from __future__ import annotations

import torch

from fleetfoot.kernels.sampling.gumbel import gumbel_noise
from fleetfoot.kernels.sampling.sample import sample_torch
from fleetfoot.records.forward_context import AttentionMetadata
from fleetfoot.speculative.drafter import DraftBatch, DraftSteps, as_drafts

BLOCK_SIZE = 4


def make_batch(positions: list[int], limits: list[int], rows: list[int]) -> DraftBatch:
    num_reqs = len(rows)
    nothing = torch.zeros(0, dtype=torch.int64)
    tables = torch.arange(1, 1 + num_reqs * 4, dtype=torch.int32).view(num_reqs, 4)  # request i: blocks 4i+1 .. 4i+4
    metadata = AttentionMetadata(nothing, nothing, tables, nothing, nothing, 0, 1, 16)
    return DraftBatch(
        input_ids=nothing,
        metadata=metadata,
        hidden=torch.zeros(0, 8),
        next_ids=nothing,
        last_index=nothing,
        newest=nothing,
        positions=torch.tensor(positions),
        limits=torch.tensor(limits),
        block_tables=tables,
        rows=torch.tensor(rows, dtype=torch.int32),
        temperatures=torch.tensor([0.0, 0.7, 1.3]),
        seeds=torch.tensor([5, -6, 7]),
        is_decode=True,
        max_seq_len=16,
    )


def test_slots_follow_the_block_tables_up_to_the_limit() -> None:
    batch = make_batch([5, 7, 9, 3], limits=[14, 8, 9, 14], rows=[2, 0, 1, -1])
    steps = DraftSteps(batch, BLOCK_SIZE, sample_torch)
    first, second = steps.singles(0, 2)
    assert first.slot_mapping.tolist() == [2 * 4 + 1, 6 * 4 + 3, -1, -1]
    assert first.positions.tolist() == [5, 7, 9, 3]
    assert first.seq_lens.tolist() == [6, 8, 10, 4]
    assert first.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert (first.num_decodes, first.max_query_len, first.max_seq_len) == (4, 1, 16)
    assert second.slot_mapping.tolist() == [2 * 4 + 2, -1, -1, -1]
    assert second.positions.tolist() == [6, 8, 9, 4]  # dead ones stay at the limit
    assert all(tensor.is_contiguous() for tensor in (second.positions, second.slot_mapping, second.seq_lens))
    assert steps.singles(3, 0) == []
    assert all(tensor.dtype == torch.int32 for tensor in (first.query_start_loc, first.seq_lens))
    assert first.slot_mapping.dtype == first.positions.dtype == torch.int64


def test_a_step_of_two_tokens_ends_at_the_position() -> None:
    batch = make_batch([5, 8, 14, 0], limits=[14, 8, 8, 0], rows=[0, 1, 2, -1])
    pairs = DraftSteps(batch, BLOCK_SIZE, sample_torch).pairs()
    # the second request has room for its last token alone; the third has long ended; the last one is padding
    assert pairs.slot_mapping.view(4, 2).tolist() == [[2 * 4, 2 * 4 + 1], [6 * 4 + 3, -1], [-1, -1], [-1, -1]]
    assert pairs.positions.view(4, 2).tolist() == [[4, 5], [7, 8], [8, 8], [0, 0]]
    assert pairs.query_start_loc.tolist() == [0, 2, 4, 6, 8]
    assert pairs.seq_lens.tolist() == [6, 9, 9, 2]
    assert (pairs.num_decodes, pairs.max_query_len) == (0, 2)


def test_draws_have_the_noise_of_the_position_that_they_are_for() -> None:
    batch = make_batch([5, 7, 9], limits=[14, 14, 14], rows=[2, 0, 1])
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([6, 8, 10])
    drawn = DraftSteps(batch, BLOCK_SIZE, sample_torch).draw(logits, positions)
    noise = gumbel_noise(batch.seeds[[2, 0, 1]], positions, 50)
    assert drawn.tolist() == [
        int((logits[0] / 1.3 + noise[0]).argmax()),
        int(logits[1].argmax()),
        int((logits[2] / 0.7 + noise[2]).argmax()),
    ]
    drafts = as_drafts([drawn, drawn + 1])
    assert drafts.dtype == torch.int32
    assert drafts.tolist() == [[token, token + 1] for token in drawn.tolist()]
