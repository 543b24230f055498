"""Drafts in Model Runner V2 where graphs are replayed: verifying and drafting are parts of them, without waits."""

from __future__ import annotations

import pytest
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import (
    MAX_NUM_SEQS,
    NUM_DRAFTS,
    ScriptedDrafter,
    assert_same,
    in_one_runner,
    live,
    make_runner,
)

from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import DraftSettings


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
