"""Both model runners with drafts: whatever is proposed, a request gets the tokens that it gets without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_DRAFTS,
    Life,
    ScriptedDrafter,
    Whims,
    assert_same,
    in_one_runner,
    live,
    make_runner,
    prompt_length,
    wishes,
)

from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import DraftBatch, DraftSettings, NgramSettings

REQUESTS = [wishes(number) for number in range(10)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Life]:
    return live(in_one_runner(make_runner("v1")), REQUESTS)


def test_the_wishes_mean_something(expected: dict[str, Life]) -> None:
    plain = live(in_one_runner(make_runner("v1")), [SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)] * 9)
    for number in range(1, 8):
        got, without = expected[f"r{number}"].token_ids, plain[f"r{number}"].token_ids
        length = min(len(got), len(without))
        assert got[:length] != without[:length], number
    assert prompt_length(8) + 13 <= len(expected["r8"].token_ids) < prompt_length(8) + 30
    assert len(expected["r9"].token_ids) == MAX_MODEL_LEN


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("depth", [0, 1], ids=["lockstep", "overlapped"])
@pytest.mark.parametrize("share_of_errors", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("budget", [64, 24], ids=["roomy", "tight"])
def test_drafts_change_no_token(
    expected: dict[str, Life], kind: str, share_of_errors: float, depth: int, budget: int
) -> None:
    drafter = ScriptedDrafter(share_of_errors=share_of_errors)
    runner = make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafter))
    got = live(
        in_one_runner(runner),
        REQUESTS,
        num_drafts=NUM_DRAFTS,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        budget=budget,
        depth=depth,
    )
    assert drafter.num_proposals > 10
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("depth", [0, 1], ids=["lockstep", "overlapped"])
def test_n_grams_change_no_token(expected: dict[str, Life], kind: str, depth: int) -> None:
    runner = make_runner(kind, DraftSettings(NUM_DRAFTS, ngram=NgramSettings(3, 1)))
    got = live(in_one_runner(runner), REQUESTS, num_drafts=NUM_DRAFTS, depth=depth)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_right_drafts_save_steps(kind: str) -> None:
    params = [SamplingParams(max_tokens=41, ignore_eos=True, temperature=0.0)]
    expected = live(in_one_runner(make_runner(kind)), params)
    drafter = ScriptedDrafter(share_of_errors=0.0)
    steps = []
    execute = in_one_runner(make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafter)))

    def counted(output: SchedulerOutput) -> ModelRunnerOutput:
        steps.append(execute(output).get())
        return steps[-1]

    scripts = {name: life.token_ids for name, life in expected.items()}
    assert_same(live(counted, params, num_drafts=NUM_DRAFTS, scripts=scripts, drafter=drafter), expected)
    assert len(steps) == 1 + 40 // (1 + NUM_DRAFTS)
    assert [step.num_drafted for step in steps] == [[]] + [[NUM_DRAFTS]] * (len(steps) - 1)


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("depth", [0, 1], ids=["lockstep", "overlapped"])
def test_drafting_may_pause(expected: dict[str, Life], kind: str, depth: int) -> None:
    drafter = ScriptedDrafter()
    config = SchedulerConfig(64, 8, MAX_NUM_SEQS, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
    scheduler = Scheduler(config, controller=Whims(0))
    got = live(
        in_one_runner(make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafter))),
        REQUESTS,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        scheduler=scheduler,
        depth=depth,
    )
    assert_same(got, expected)
    assert scheduler.stats().drafts.num_accepted > 10


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_request_that_has_ended_gets_nothing(kind: str) -> None:
    """Only the device knows that the first step in flight has brought all that there was to come."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    expected = live(in_one_runner(make_runner(kind)), [params])["r0"].token_ids
    drafter = ScriptedDrafter(share_of_errors=0.0, scripts={0: expected})
    execute = in_one_runner(make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafter)))
    scheduler = Scheduler(SchedulerConfig(64, 8, 1, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS))
    request = Request("r0", expected[:3], params, max_tokens=4, seed=0)
    scheduler.add_request(request)
    outputs = [scheduler.schedule() for _ in range(3)]
    results = [execute(output).get().sampled_token_ids for output in outputs if output is not None]
    assert results == [[expected[3:4]], [expected[4:]], [[]]]


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_what_is_told_of_a_step(kind: str) -> None:
    """A decode and a prefill that ends, with logprobs, of which there are as many as tokens."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1)
    expected = live(in_one_runner(make_runner(kind)), [params, params])
    drafter = ScriptedDrafter(share_of_errors=0.0)
    execute = in_one_runner(make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafter)))
    scheduler = Scheduler(SchedulerConfig(64, 8, 2, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS))
    for number in range(2):
        tokens = expected[f"r{number}"].token_ids
        drafter.scripts[number] = tokens
        prompt = tokens[: prompt_length(number)]
        scheduler.add_request(Request(f"r{number}", prompt, params, max_tokens=20, seed=number))
        output = scheduler.schedule()
        assert output is not None
        result = execute(output).get()
        scheduler.update(output, result)
    new = [expected["r0"].token_ids[4:8], expected["r1"].token_ids[12:13]]
    assert output is not None and output.num_decodes == 1
    assert result.sampled_token_ids == new
    assert result.num_drafted == [NUM_DRAFTS]
    assert {index: [row.token_ids[0] for row in rows] for index, rows in result.logprobs.items()} == dict(
        enumerate(new)
    )


@dataclass
class CuriousDrafter(ScriptedDrafter):
    """Keeps what it was told and what that means; padding and what lies behind a request's end is left out."""

    told: list[dict[str, Any]] = field(default_factory=list)

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        starts, rows = batch.metadata.query_start_loc.tolist(), batch.rows.to(torch.int64)
        valid = [t for i, last in enumerate(batch.last_index.tolist()) for t in range(starts[i], last + 1)]
        valid += range(starts[len(rows)], starts[-1])  # chunks that do not reach their prompts' ends
        reach = torch.minimum(batch.positions + num_drafts, batch.limits)
        self.told.append(
            {
                "input_ids": batch.input_ids[valid].tolist(),
                "slots": batch.metadata.slot_mapping.tolist(),
                "positions": batch.metadata.positions.tolist(),
                "seq_lens": batch.metadata.seq_lens.tolist(),
                "starts": starts,
                "hidden": batch.hidden[valid].sum(1),
                "next_ids": batch.next_ids[valid].tolist(),
                "last_index": batch.last_index.tolist(),
                "newest": (batch.newest.tolist(), batch.positions.tolist(), batch.limits.tolist()),
                "blocks": [
                    table[: -(-end // 8)]
                    for table, end in zip(batch.block_tables.tolist(), reach.tolist(), strict=True)
                ],
                "noise": (batch.temperatures[rows].tolist(), batch.seeds[rows].tolist()),
                "shape": (batch.is_decode, batch.max_seq_len, num_drafts),
            }
        )
        return super().propose(batch, num_drafts)


def test_a_drafter_is_told_the_same_by_both(expected: dict[str, Life]) -> None:
    drafters = []
    for kind in ("v1", "v2"):
        drafters.append(CuriousDrafter())
        config = SchedulerConfig(64, 8, MAX_NUM_SEQS, 24, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
        live(
            in_one_runner(make_runner(kind, DraftSettings(NUM_DRAFTS, drafter=drafters[-1]))),
            REQUESTS,
            scripts={name: life.token_ids for name, life in expected.items()},
            drafter=drafters[-1],
            scheduler=Scheduler(config, controller=Whims(0)),
        )
    first, second = drafters
    assert {told["shape"][2] for told in first.told} == {0, NUM_DRAFTS}
    assert len(first.told) == len(second.told)
    for ours, theirs in zip(first.told, second.told, strict=True):
        torch.testing.assert_close(ours.pop("hidden"), theirs.pop("hidden"))
        assert ours == theirs


# --- graphs of Model Runner V2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False])
def test_captured_steps_verify_and_draft(greedy: bool) -> None:
    params = [
        SamplingParams(max_tokens=20 + number, ignore_eos=True, temperature=0.0 if greedy else 0.8)
        for number in range(5)
    ]
    expected = live(in_one_runner(make_runner("v2")), params)
    drafter = ScriptedDrafter()
    runner = make_runner("v2", DraftSettings(NUM_DRAFTS, drafter=drafter), device=RecordingDevice(has_graphs=True))
    scripts = {name: life.token_ids for name, life in expected.items()}
    got = live(in_one_runner(runner), params, num_drafts=NUM_DRAFTS, scripts=scripts, drafter=drafter, depth=1)
    assert_same(got, expected)
    assert isinstance(runner, ModelRunnerV2)
    assert runner.graphs.num_steps["uniform"] > 5


def test_a_steady_step_with_drafts_is_one_copy_in_one_copy_out_and_no_wait() -> None:
    device = RecordingDevice(has_graphs=True)
    drafter = ScriptedDrafter(share_of_errors=1.0)
    runner = make_runner("v2", DraftSettings(NUM_DRAFTS, drafter=drafter), device=device)
    config = SchedulerConfig(64, 8, MAX_NUM_SEQS, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
    scheduler = Scheduler(config)
    for number in range(3):
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
        scheduler.add_request(Request(f"r{number}", [30 + number] * 5, params, max_tokens=60, seed=1))
    for step in range(12):
        output = scheduler.schedule()
        assert output is not None
        device.counts.clear()
        runner.execute_model(output)
        pending = runner.sample_tokens(None)
        if step > 2:
            assert output.num_drafts == NUM_DRAFTS
            assert device.counts == {"copy_in": 1, "replay": 1, "copy_out": 1}
        scheduler.update(output, pending.get())
