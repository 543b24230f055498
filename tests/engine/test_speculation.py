"""Runners of both kinds, alone and in pipelines: whatever is proposed, a request gets the tokens of Model Runner V1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.helpers.kernels import cpu_kernels
from tests.helpers.local_pipeline import LocalPipeline, local_pipeline
from tests.helpers.no_values import StrictDevice, unwatched
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import (
    DRAFT,
    MAX_MODEL_LEN,
    NUM_DRAFTS,
    Life,
    ScriptedDrafter,
    Whims,
    assert_same,
    in_one_runner,
    live,
    make_runner,
    make_scheduler,
    params_of,
    prompt_length,
)

from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings, NgramSettings

REQUESTS = [params_of(number) for number in range(10)]
PLAIN = [SamplingParams(max_tokens=12 + 5 * n, temperature=0.5 * (n % 3), ignore_eos=True) for n in range(9)]
"""All of their sampling is in graphs."""
QWEN = DRAFT.parent / "story-qwen3"
NGRAM = DraftSettings(NUM_DRAFTS, ngram=NgramSettings(3, 1))
ALONE = [("v1",), ("v2",)]
PAIRS = [("v1", "v1"), ("v2", "v2"), ("v1", "v2"), ("v2", "v1")]
KIND = pytest.mark.parametrize("kind", ["v1", "v2"])


def scripted(share_of_errors: float = 0.3) -> DraftSettings:
    return DraftSettings(NUM_DRAFTS, drafter=ScriptedDrafter(share_of_errors=share_of_errors))


class Ranks:
    """A runner of each kind: the ranks of a pipeline, or one alone. The drafter is on the last."""

    def __init__(
        self,
        kinds: tuple[str, ...],
        draft_settings: DraftSettings = NO_DRAFTING,
        *,
        make_device: Callable[[], RecordingDevice | None] = lambda: None,
        **options: Any,
    ) -> None:
        config = load_model_config(options.get("folder", DRAFT))
        self.draft_settings = draft_settings
        self.runners = []
        for rank, group in enumerate(local_pipeline(len(kinds), config.hidden_size if make_device() else None)):
            settings = draft_settings if group.is_last_rank else DraftSettings(draft_settings.num_drafts)
            layers = pipeline_layers(config, rank, len(kinds)) if len(kinds) > 1 else None
            options |= {"device": make_device(), "pipeline": group, "layers": layers}
            self.runners.append(make_runner(kinds[rank], settings, **options))
        self.pipeline = LocalPipeline(self.runners) if len(kinds) > 1 else None
        self.execute = in_one_runner(self.runners[0]) if self.pipeline is None else self.pipeline.execute

    def scheduler(self, **limits: Any) -> Scheduler:
        num_drafts = self.draft_settings.num_drafts
        lookahead = 0 if self.draft_settings.drafter is None else num_drafts
        return make_scheduler(num_drafts, num_lookahead=lookahead, num_stages=len(self.runners), **limits)

    def live(self, params: list[SamplingParams], scheduler: Scheduler | None = None, **options: Any) -> dict[str, Life]:
        drafter: Any = self.draft_settings.drafter
        return live(self.execute, params, scheduler=scheduler or self.scheduler(), drafter=drafter, **options)


@pytest.fixture(scope="module")
def expected() -> dict[str, Life]:
    return Ranks(("v1",)).live(REQUESTS)


def test_every_request_is_a_case_of_its_own(expected: dict[str, Life]) -> None:
    plain = Ranks(("v1",)).live([SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)] * 9)
    for number in range(1, 8):
        got, without = expected[f"r{number}"].token_ids, plain[f"r{number}"].token_ids
        length = min(len(got), len(without))
        assert got[:length] != without[:length], number
    assert prompt_length(8) + 13 <= len(expected["r8"].token_ids) < prompt_length(8) + 30
    assert len(expected["r9"].token_ids) == MAX_MODEL_LEN


@pytest.mark.parametrize("kinds", [("v2",), *PAIRS])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_are_those_of_one_runner(expected: dict[str, Life], kinds: tuple[str, ...], depth: int) -> None:
    ranks = Ranks(kinds)
    assert_same(ranks.live(REQUESTS, depth=depth), expected)
    assert ranks.pipeline is None or ranks.pipeline.max_behind == 1 + depth


@pytest.mark.parametrize(
    ("kinds", "depth", "budget"),
    [
        *((kinds, depth, budget) for kinds in ALONE for depth in (0, 1) for budget in (64, 24)),
        *((kinds, depth, 64) for kinds in PAIRS for depth in (0, 1, 2)),
    ],
)
@pytest.mark.parametrize("share_of_errors", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
def test_drafts_change_no_token(
    expected: dict[str, Life], kinds: tuple[str, ...], depth: int, budget: int, share_of_errors: float
) -> None:
    settings = scripted(share_of_errors)
    ranks = Ranks(kinds, settings)
    got = ranks.live(REQUESTS, ranks.scheduler(budget=budget), expected=expected, depth=depth)
    assert_same(got, expected)
    assert settings.drafter.num_proposals > 10  # type: ignore[union-attr]
    assert ranks.pipeline is None or ranks.pipeline.max_behind >= min(2, 1 + depth)


@pytest.mark.parametrize(
    ("kinds", "depth"),
    [*((kinds, depth) for kinds in ALONE for depth in (0, 1)), *((kinds, 2) for kinds in PAIRS[:2])],
)
def test_n_grams_change_no_token(expected: dict[str, Life], kinds: tuple[str, ...], depth: int) -> None:
    assert_same(Ranks(kinds, NGRAM).live(REQUESTS, depth=depth), expected)


@pytest.mark.parametrize(
    ("kinds", "seed", "depth"),
    [
        *((kinds, 0, depth) for kinds in ALONE for depth in (0, 1)),
        *((kinds, seed, 1 + seed % 2) for kinds in PAIRS for seed in range(6)),
    ],
)
def test_drafting_can_pause(expected: dict[str, Life], kinds: tuple[str, ...], seed: int, depth: int) -> None:
    """Then a step has requests with new drafts beside others without: all ranks have the same for them."""
    ranks = Ranks(kinds, scripted())
    scheduler = ranks.scheduler(controller=Whims(seed))
    assert_same(ranks.live(REQUESTS, scheduler, expected=expected, depth=depth), expected)
    assert scheduler.stats().drafts.num_accepted > 10


@KIND
def test_three_ranks(kind: str) -> None:
    expected = Ranks((kind,), folder=QWEN).live(REQUESTS)
    ranks = Ranks((kind,) * 3, scripted(), folder=QWEN)
    assert_same(ranks.live(REQUESTS, expected=expected, depth=3), expected)
    assert ranks.pipeline is not None and ranks.pipeline.max_behind >= 2


@pytest.mark.parametrize(
    "draft_settings", [NO_DRAFTING, scripted(0.0), scripted(0.5), NGRAM], ids=["none", "right", "wrong", "ngram"]
)
@pytest.mark.parametrize("requests", [REQUESTS, PLAIN], ids=["all", "plain"])
def test_graphs_on_every_rank_change_no_token(requests: list[SamplingParams], draft_settings: DraftSettings) -> None:
    """Each rank replays its part of a step, padding included; only the communication of ranks is not captured."""
    expected = Ranks(("v2",), folder=QWEN).live(requests)
    has_drafter, num_drafts = draft_settings.drafter is not None, draft_settings.num_drafts

    def make_device() -> RecordingDevice:
        return RecordingDevice(has_graphs=True) if has_drafter else StrictDevice()  # the drafter reads values

    ranks = Ranks(("v2",) * 3, draft_settings, make_device=make_device, folder=QWEN, ops=unwatched(cpu_kernels()))
    got = ranks.live(requests, expected=expected, depth=3)
    assert_same(got, expected, tolerance=1e-4)  # other shapes round differently
    for runner in ranks.runners:
        is_last = runner is ranks.runners[-1]
        assert runner.graphs.num_steps["uniform" if num_drafts else "decode"] > 10
        # with drafts, the steps that begin requests are not captured
        assert (runner.graphs.num_steps["eager"] > 0) == (is_last and num_drafts > 0)
        assert any(key.sampling for key in runner.graphs.captured) == is_last


@KIND
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_computed_beyond_the_end(kind: str, seed: int) -> None:
    """A request alone, as long as the model's sequences can be: it is in steps in flight when it has ended."""
    params = [SamplingParams(max_tokens=MAX_MODEL_LEN - prompt_length(0), ignore_eos=True, temperature=0.0)]
    expected = Ranks((kind,)).live(params)
    ranks = Ranks((kind, kind), scripted(0.0))
    scheduler = ranks.scheduler(max_num_seqs=1, controller=Whims(seed))
    assert_same(ranks.live(params, scheduler, expected=expected, depth=3), expected)


# --- what a step returns ----------------------------------------------------------------------------------------------


@KIND
def test_a_request_that_has_ended_gets_nothing(kind: str) -> None:
    """Only on the device it is known that the first step in flight has reached its length."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    expected = Ranks((kind,)).live([params])["r0"].token_ids
    ranks = Ranks(
        (kind,), DraftSettings(NUM_DRAFTS, drafter=ScriptedDrafter(share_of_errors=0.0, scripts={0: expected}))
    )
    scheduler = ranks.scheduler(max_num_seqs=1)
    scheduler.add_request(Request("r0", expected[:3], params, max_tokens=4, seed=0))  # type: ignore[arg-type]
    outputs = [scheduler.schedule() for _ in range(3)]
    results = [ranks.execute(output).get().sampled_token_ids for output in outputs if output is not None]
    assert results == [[expected[3:4]], [expected[4:]], [[]]]


@KIND
def test_the_output_of_a_step(kind: str) -> None:
    """A decode and a prefill that ends, with logprobs of each of their tokens."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1)
    expected = Ranks((kind,)).live([params, params])
    scripts = {number: expected[f"r{number}"].token_ids for number in range(2)}
    ranks = Ranks((kind,), DraftSettings(NUM_DRAFTS, drafter=ScriptedDrafter(share_of_errors=0.0, scripts=scripts)))
    scheduler = ranks.scheduler(max_num_seqs=2)
    for number, tokens in scripts.items():
        prompt: Any = tokens[: prompt_length(number)]
        scheduler.add_request(Request(f"r{number}", prompt, params, max_tokens=20, seed=number))
        output = scheduler.schedule()
        assert output is not None
        result = ranks.execute(output).get()
        scheduler.update(output, result)
    new = [expected["r0"].token_ids[4:8], expected["r1"].token_ids[12:13]]
    assert output is not None and output.num_decodes == 1
    assert result.sampled_token_ids == new
    assert result.num_drafted == [NUM_DRAFTS]
    logprobs = {index: [row.token_ids[0] for row in rows] for index, rows in result.logprobs.items()}
    assert logprobs == dict(enumerate(new))


@dataclass
class CuriousDrafter(ScriptedDrafter):
    """Records its input, without padding and what is behind a request's end."""

    inputs: list[dict[str, Any]] = field(default_factory=list)

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        starts, rows = batch.metadata.query_start_loc.tolist(), batch.rows.to(torch.int64)
        valid = [t for i, last in enumerate(batch.last_index.tolist()) for t in range(starts[i], last + 1)]
        valid += range(starts[len(rows)], starts[-1])  # chunks that do not reach their prompts' ends
        reach = torch.minimum(batch.positions + num_drafts, batch.limits)
        self.inputs.append(
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


def test_a_drafter_gets_the_same_input_from_both(expected: dict[str, Life]) -> None:
    inputs = []
    for kind in ("v1", "v2"):
        drafter = CuriousDrafter()
        ranks = Ranks((kind,), DraftSettings(NUM_DRAFTS, drafter=drafter))
        ranks.live(REQUESTS, ranks.scheduler(budget=24, controller=Whims(0)), expected=expected)
        inputs.append(drafter.inputs)
    first, second = inputs
    assert {batch["shape"][2] for batch in first} == {0, NUM_DRAFTS}
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours.pop("hidden"), theirs.pop("hidden"))
        assert ours == theirs
