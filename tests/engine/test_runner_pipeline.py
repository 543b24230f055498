"""Runners in a pipeline give the tokens of one runner, with several steps in flight, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.test_speculative_graphs import unwatched
from tests.helpers.kernels import cpu_kernels
from tests.helpers.local_pipeline import LocalPipeline, local_pipeline
from tests.helpers.no_values import NoValues
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import (
    DRAFT,
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

from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings, NgramSettings

REQUESTS = [wishes(number) for number in range(10)]
PLAIN = [SamplingParams(max_tokens=12 + 5 * n, temperature=0.5 * (n % 3), ignore_eos=True) for n in range(9)]
"""What a graph samples by itself."""
KINDS = ["v1", "v2"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Life]:
    return live(in_one_runner(make_runner("v1")), REQUESTS)


def make_pipeline(kinds: tuple[str, str], draft_settings: DraftSettings = NO_DRAFTING) -> LocalPipeline:
    """Of two ranks, a layer each; the drafter is on the last."""
    first, last = local_pipeline(2)
    only_their_number = DraftSettings(draft_settings.num_drafts)
    runners: list[ModelRunner] = [
        make_runner(kinds[0], only_their_number, pipeline=first, layers=range(1)),
        make_runner(kinds[1], draft_settings, pipeline=last, layers=range(1, 2)),
    ]
    return LocalPipeline(runners)


@pytest.mark.parametrize("kinds", [("v1", "v1"), ("v2", "v2"), ("v1", "v2"), ("v2", "v1")], ids="-".join)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_are_those_of_one_runner(expected: dict[str, Life], kinds: tuple[str, str], depth: int) -> None:
    pipeline = make_pipeline(kinds)
    assert_same(live(pipeline.execute, REQUESTS, depth=depth, num_stages=2), expected)
    assert pipeline.max_behind == 1 + depth


@pytest.mark.parametrize("kinds", [("v1", "v1"), ("v2", "v2"), ("v1", "v2"), ("v2", "v1")], ids="-".join)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("share_of_errors", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
def test_drafts_change_no_token(
    expected: dict[str, Life], kinds: tuple[str, str], depth: int, share_of_errors: float
) -> None:
    drafter = ScriptedDrafter(share_of_errors=share_of_errors)
    pipeline = make_pipeline(kinds, DraftSettings(NUM_DRAFTS, drafter=drafter))
    got = live(
        pipeline.execute,
        REQUESTS,
        num_drafts=NUM_DRAFTS,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        depth=depth,
        num_stages=2,
    )
    assert_same(got, expected)
    assert pipeline.max_behind >= min(2, 1 + depth)


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks(kind: str) -> None:
    folder = DRAFT.parent / "story-qwen3"
    expected = live(in_one_runner(make_runner(kind, folder=folder)), REQUESTS)
    drafter = ScriptedDrafter()
    speculations = [DraftSettings(NUM_DRAFTS)] * 2 + [DraftSettings(NUM_DRAFTS, drafter=drafter)]
    config = load_model_config(folder)
    pipeline = LocalPipeline(
        [
            make_runner(kind, draft_settings, pipeline=group, layers=pipeline_layers(config, rank, 3), folder=folder)
            for rank, (draft_settings, group) in enumerate(zip(speculations, local_pipeline(3), strict=True))
        ]
    )
    got = live(
        pipeline.execute,
        REQUESTS,
        num_drafts=NUM_DRAFTS,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        depth=3,
        num_stages=3,
    )
    assert_same(got, expected)
    assert pipeline.max_behind >= 2


class StrictDevice(RecordingDevice):
    """Its graphs hold nothing that depends on a value."""

    def capture(self, work: Callable[[], Any]) -> Any:
        def watched() -> Any:
            with NoValues():
                return work()

        return super().capture(watched)


@pytest.mark.parametrize("drafts", ["none", "right", "wrong", "ngram"])
@pytest.mark.parametrize("requests", [REQUESTS, PLAIN], ids=["all", "plain"])
def test_graphs_on_every_rank_change_no_token(requests: list[SamplingParams], drafts: str) -> None:
    """Each rank replays its part of a step, padding and all; only what ranks send each other is not captured."""
    folder = DRAFT.parent / "story-qwen3"
    config = load_model_config(folder)
    expected = live(in_one_runner(make_runner("v2", folder=folder)), requests)
    drafter = ScriptedDrafter(share_of_errors=0.0 if drafts == "right" else 0.5)
    draft_settings = {"none": NO_DRAFTING, "ngram": DraftSettings(NUM_DRAFTS, ngram=NgramSettings(3, 1))}.get(
        drafts, DraftSettings(NUM_DRAFTS, drafter=drafter)
    )
    num_drafts = draft_settings.num_drafts
    device = StrictDevice if draft_settings.drafter is None else RecordingDevice  # the drafter looks at everything
    runners = [
        make_runner(
            "v2",
            draft_settings if group.is_last_rank else DraftSettings(num_drafts),
            pipeline=group,
            layers=pipeline_layers(config, rank, 3),
            folder=folder,
            device=device(has_graphs=True),
            ops=unwatched(cpu_kernels()),
        )
        for rank, group in enumerate(local_pipeline(3, config.hidden_size))
    ]
    got = live(
        LocalPipeline(runners).execute,
        requests,
        num_drafts=num_drafts,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        depth=3,
        num_stages=3,
    )
    assert_same(got, expected, tolerance=1e-4)  # other shapes round otherwise
    for runner in runners:
        assert isinstance(runner, ModelRunnerV2)
        assert runner.graphs.num_steps["uniform" if num_drafts else "decode"] > 10
        # where something drafts, the steps that begin requests are not captured
        assert (runner.graphs.num_steps["eager"] > 0) == (runner is runners[-1] and drafts != "none")
        assert any(key.sampling for key in runner.graphs.captured) == (runner is runners[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_n_grams_change_no_token(expected: dict[str, Life], kind: str) -> None:
    pipeline = make_pipeline((kind, kind), DraftSettings(NUM_DRAFTS, ngram=NgramSettings(3, 1)))
    assert_same(live(pipeline.execute, REQUESTS, num_drafts=NUM_DRAFTS, depth=2, num_stages=2), expected)


@pytest.mark.parametrize("kinds", [("v1", "v1"), ("v2", "v2"), ("v1", "v2"), ("v2", "v1")], ids="-".join)
@pytest.mark.parametrize("seed", range(6))
def test_drafting_may_pause(expected: dict[str, Life], kinds: tuple[str, str], seed: int) -> None:
    """Then a step has requests with new drafts beside others that got none: all ranks hold the same for them."""
    drafter = ScriptedDrafter(share_of_errors=0.3)
    config = SchedulerConfig(64, 8, MAX_NUM_SEQS, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS, num_stages=2)
    scheduler = Scheduler(config, controller=Whims(seed))
    got = live(
        make_pipeline(kinds, DraftSettings(NUM_DRAFTS, drafter=drafter)).execute,
        REQUESTS,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        depth=1 + seed % 2,
        scheduler=scheduler,
    )
    assert_same(got, expected)
    assert scheduler.stats().drafts.num_accepted > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_nobody_goes_on_beyond_the_end(kind: str, seed: int) -> None:
    """A request alone, as long as the model's sequences may be: steps in flight go on with it when it has ended."""
    params = [SamplingParams(max_tokens=MAX_MODEL_LEN - prompt_length(0), ignore_eos=True, temperature=0.0)]
    expected = live(in_one_runner(make_runner(kind)), params)
    drafter = ScriptedDrafter(share_of_errors=0.0)
    config = SchedulerConfig(64, 8, 1, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS, num_stages=2)
    got = live(
        make_pipeline((kind, kind), DraftSettings(NUM_DRAFTS, drafter=drafter)).execute,
        params,
        scripts={name: life.token_ids for name, life in expected.items()},
        drafter=drafter,
        depth=3,
        scheduler=Scheduler(config, controller=Whims(seed)),
    )
    assert_same(got, expected)
