"""Draft verification in Model Runner V1, against the operation of V2; and the tokens that need logits."""

import random
from array import array

import numpy as np
import pytest
import torch

from fleetfoot.kernels.prepare.reference import accept_drafts_torch
from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest, RowLogprobs, SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState, StepInputs, logits_indices, prepare_inputs
from fleetfoot.sampling.verification import verify_drafts

NUM_ROWS = 6
NUM_DRAFTS = 3


def make_step(rng: random.Random, num_decodes: int, num_ending: int) -> tuple[HostState, SchedulerOutput, StepInputs]:
    """Decodes that verify drafts, prefills that end, and one that goes on; drafts are of three tokens and none."""
    host = HostState(NUM_ROWS, max_model_len=40, block_size=4, num_drafts=NUM_DRAFTS)
    rows = rng.sample(range(NUM_ROWS), num_decodes + num_ending + 1)
    requests = []
    for index, row in enumerate(rows):
        is_decode, length = index < num_decodes, rng.randint(5, 30)
        tokens, blocks = array("i", [rng.randint(1, 3) for _ in range(length)]), list(range(row * 11, row * 11 + 11))
        most = length + (rng.randint(0, 5) if is_decode else 9)
        of_request = (str(row), row, tokens, 2, length - 1 if is_decode else 0, blocks, SamplingParams(), 0)
        requests.append(NewRequest(*of_request, frozenset(), [], max_total_tokens=most))
    counts = [1 + NUM_DRAFTS] * num_decodes + [len(request.token_ids) for request in requests[num_decodes:]]
    counts[-1] -= 2
    num_drafts = NUM_DRAFTS if num_decodes else 0
    sizes = (num_decodes, num_decodes + num_ending, sum(counts))
    output = SchedulerOutput(0, rows, counts, *sizes, new_requests=requests, num_drafts=num_drafts)
    host.update(output)
    for row in rows[:num_decodes]:
        host.drafts[row] = [rng.choice((-1, 1, 2, 3)) for _ in range(NUM_DRAFTS)]
    return host, output, prepare_inputs(host, output, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_accepted_as_on_the_device(seed: int) -> None:
    rng = random.Random(seed)
    num_decodes, num_ending = rng.randint(1, 3), rng.randint(0, 2)
    host, output, inputs = make_step(rng, num_decodes, num_ending)
    indices = logits_indices(inputs, output)
    num_logits = num_decodes * (1 + NUM_DRAFTS) + num_ending
    assert len(indices) == num_logits
    # every token of a decode, and the last of a prefill that ends
    places = [(int(inputs.token_rows[t]), int(inputs.positions[t])) for t in indices]
    expected = [(row, int(host.num_computed[row]) + j) for row in output.rows[:num_decodes] for j in range(4)]
    expected += [(row, int(host.num_tokens[row]) - 1) for row in output.rows[num_decodes : num_decodes + num_ending]]
    assert places == expected

    chosen = [rng.randint(1, 3) for _ in range(num_logits)]
    flags = [rng.random() < 0.1 for _ in range(num_logits)]
    rows = output.rows[: num_decodes + num_ending]
    room = (host.limits[rows] + 1 - host.num_tokens[rows]).tolist()
    new = verify_drafts(chosen, flags, host.drafts[rows[:num_decodes]].tolist(), room, {})

    verified, width = num_decodes * (1 + NUM_DRAFTS), 1 + NUM_DRAFTS
    unused = torch.zeros(0, dtype=torch.int32)
    num_computed, limits, draft_tokens = map(torch.from_numpy, (host.num_computed, host.limits, host.drafts))
    tables = RowTables(num_computed, unused, limits, unused, draft_tokens, unused, unused, host.block_size)
    counts = torch.zeros((3, num_decodes), dtype=torch.int32)
    decodes, *of_decodes = (torch.tensor(values) for values in (output.rows[:num_decodes], chosen, flags))
    accept_drafts_torch(decodes, *(t[:verified].view(num_decodes, width) for t in of_decodes), tables, counts)
    taken, rejected, drafted = counts
    assert [len(tokens) for tokens in new.sampled_token_ids] == taken.tolist() + [1] * num_ending
    assert [width - len(tokens) for tokens in new.sampled_token_ids[:num_decodes]] == rejected.tolist()
    assert new.num_drafted == drafted.tolist()
    starts = [width * index for index in range(num_decodes)] + [verified + index for index in range(num_ending)]
    for index, (tokens, begin) in enumerate(zip(new.sampled_token_ids, starts, strict=True)):
        assert tokens == chosen[begin : begin + len(tokens)]
        assert (index in new.invalid) == (bool(tokens) and flags[begin + len(tokens) - 1])


def test_a_query_beyond_the_end_has_no_slots() -> None:
    host, output, inputs = make_step(random.Random(3), 2, 1)
    slots = inputs.metadata.slot_mapping.numpy()
    is_dead = inputs.positions >= host.limits[inputs.token_rows]
    assert is_dead.any() and not is_dead.all()
    assert (slots[is_dead] == -1).all()
    rows, positions = inputs.token_rows[~is_dead], inputs.positions[~is_dead]
    np.testing.assert_array_equal(slots[~is_dead], host.block_table[rows, positions // 4] * 4 + positions % 4)
    assert inputs.metadata.num_decodes == 0  # of one token each
    drafts = [max(int(draft), 0) for row in output.rows[:2] for draft in host.drafts[row]]
    ids = inputs.input_ids.tolist()
    assert [*ids[1:4], *ids[5:8]] == drafts


def test_logprobs_are_those_of_the_accepted_tokens() -> None:
    rows = [RowLogprobs([token], [-0.5], 1) for token in range(9)]
    logprobs = dict(enumerate(rows[:4])) | {8: rows[8]}
    for room, expected in ((9, {0: rows[:2], 2: [rows[8]]}), (0, {2: [rows[8]]})):
        new = verify_drafts(list(range(9)), [False] * 9, [[0, 7, 7], [7, 7, 7]], [room, 9, 9], logprobs)
        assert new.sampled_token_ids == [[0, 1] if room else [], [4], [8]]
        assert new.logprobs == expected
