"""N-grams, draft models and EAGLE heads in runners: the tokens are those without drafts, most drafts are accepted, and
steps that verify and draft are graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import runner_lives
from tests.helpers.kernels import cpu_kernels
from tests.helpers.no_values import NoValues, StrictDevice, unwatched
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import DRAFT as SMALL
from tests.helpers.runner_lives import (
    NUM_DRAFTS,
    configured_drafting,
    in_one_runner,
    live,
    make_context,
    make_scheduler,
    queue_step,
    requests_of,
)

from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.graphs import GraphKey
from fleetfoot.sampling.shape import PLAIN, SamplingVariant
from fleetfoot.scheduler.drafting import ConstantDrafts
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.tokenizer.tokenizer import Tokenizer

STORY = embedded_model_path()
OPENINGS = ("Once there was a fox named", "One morning, the little bear", "Long ago, a rabbit and", "Pip the mouse")
SHARED = "Once upon a time, in a small green valley, there lived a young fox named Wren. "
DRAFTERS: dict[str, tuple[Path, dict[str, Any]]] = {
    "ngram": (STORY, {"method": "ngram", "prompt_lookup_max": 3}),
    "small": (STORY, {"model": str(SMALL)}),
    "self": (SMALL, {"model": str(SMALL)}),
    "eagle": (STORY, {"method": "eagle"}),
}
"""The target, and the ``speculative_config``."""
Expected = dict[tuple[Path, float], dict[str, list[int]]]


def make_runner(drafter: str, kind: str = "v2", *, device: RecordingDevice | None = None, num_blocks: int = 128) -> Any:
    target, speculative = DRAFTERS[drafter]
    settings = configured_drafting(target, make_context(device, max_model_len=160), runner=kind, **speculative)
    options: dict[str, Any] = {"ops": unwatched(cpu_kernels()), "num_blocks": num_blocks, "max_model_len": 160}
    return runner_lives.make_runner(kind, settings, device=device, folder=target, **options)


def run(
    runner: Any,
    prompts: list[list[int]],
    temperature: float,
    *,
    num_drafts: int = NUM_DRAFTS,
    depth: int = 0,
    **limits: Any,
) -> tuple[dict[str, list[int]], SchedulerStats]:
    params = [
        SamplingParams(max_tokens=40 + 3 * number, ignore_eos=True, temperature=temperature)
        for number in range(len(prompts))
    ]
    scheduler = make_scheduler(num_drafts, **{"num_blocks": 128, **limits})
    lives = live(in_one_runner(runner), params, scheduler=scheduler, depth=depth, prompts=prompts)
    return {name: life.token_ids for name, life in lives.items()}, scheduler.stats()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_path(STORY)
    return [tokenizer.encode(text) for text in (*OPENINGS, *(SHARED + opening for opening in OPENINGS))]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Expected:
    found = {}
    for target in (SMALL, STORY):
        runner = runner_lives.make_runner("v2", folder=target, num_blocks=128, max_model_len=160)
        for temperature in (0.0, 1.0):
            found[target, temperature] = run(runner, prompts, temperature, num_drafts=0)[0]
    return found


def assert_all_right(stats: SchedulerStats, num_requests: int) -> None:
    """No draft was wrong except those behind a request's last token."""
    assert stats.drafts.num_drafted - stats.drafts.num_accepted <= NUM_DRAFTS * num_requests


ROOMY = {"num_blocks": 128}
SITUATIONS = pytest.mark.parametrize(
    "limits",
    [ROOMY, ROOMY | {"depth": 1}, ROOMY | {"depth": 1, "budget": 26}, {"num_blocks": 24}],
    ids=["roomy", "overlapped", "chunked", "preempting"],
)


@SITUATIONS
@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(
    prompts: list[list[int]], expected: Expected, temperature: float, kind: str, limits: dict[str, int]
) -> None:
    num_blocks = limits["num_blocks"]
    got, stats = run(make_runner("self", kind, num_blocks=num_blocks), prompts, temperature, **limits)
    assert got == expected[SMALL, temperature]
    assert_all_right(stats, len(prompts))
    assert stats.drafts.num_drafted > 250
    if num_blocks == 128:  # as few steps as possible
        assert stats.drafts.num_rows == sum(-(-(40 + 3 * i - 1) // (1 + NUM_DRAFTS)) for i in range(len(prompts)))
    assert (stats.num_preemptions > 0) == (num_blocks < 128)


@SITUATIONS
@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 0.5), (1.0, 0.3)])
def test_the_embedded_head_changes_no_token(
    prompts: list[list[int]], expected: Expected, temperature: float, floor: float, limits: dict[str, int]
) -> None:
    num_blocks = limits["num_blocks"]
    got, stats = run(make_runner("eagle", num_blocks=num_blocks), prompts, temperature, **limits)
    assert got == expected[STORY, temperature]
    assert stats.drafts.num_drafted > 250
    assert floor < stats.drafts.acceptance_rate < 1
    assert (stats.num_preemptions > 0) == (num_blocks < 128)


@pytest.mark.parametrize("drafter", ["eagle", "small"])
def test_drafts_are_the_same_each_time(prompts: list[list[int]], expected: Expected, drafter: str) -> None:
    outcomes = []
    for _ in range(2):
        got, stats = run(make_runner(drafter), prompts[:3], 1.0)
        assert got == {name: expected[STORY, 1.0][name] for name in got}
        outcomes.append(stats.drafts)
    assert outcomes[0] == outcomes[1]
    assert 0.15 < outcomes[0].acceptance_rate < 1


def test_a_prefix_of_earlier_requests_has_the_drafters_kv_too(prompts: list[list[int]], expected: Expected) -> None:
    """Blocks that were computed for one request serve the draft model of another."""
    runner, scheduler = make_runner("self"), make_scheduler(NUM_DRAFTS, num_blocks=128)
    assert run(runner, prompts[:2], 0.0)[0] == {name: expected[SMALL, 0.0][name] for name in ("r0", "r1")}
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    for _ in range(2):  # one after the other
        (got,) = live(in_one_runner(runner), [params], scheduler=scheduler, prompts=[prompts[4]]).values()
        assert got.token_ids == expected[SMALL, 0.0]["r4"][: len(prompts[4]) + 30]
    stats = scheduler.stats()
    assert stats.prefix_cache_hits > 0
    assert_all_right(stats, 2)
    assert stats.drafts.num_accepted > 30


class EveryOtherStep(ConstantDrafts):
    """Steps that propose, and steps in which a drafter only fills its cache."""

    def choose(self, num_decodes: int) -> int:
        self.num_drafts = NUM_DRAFTS - self.num_drafts
        return self.num_drafts


def test_steps_without_proposals_leave_no_gap_in_the_kv(prompts: list[list[int]], expected: Expected) -> None:
    got, stats = run(make_runner("self"), prompts, 1.0, controller=EveryOtherStep(0))
    assert got == expected[SMALL, 1.0]
    assert_all_right(stats, len(prompts))
    assert stats.drafts.num_accepted > 100


@pytest.mark.parametrize(("drafter", "floor"), [("self", 0.9), ("eagle", 0.3)])
def test_captured_steps_draft(prompts: list[list[int]], expected: Expected, drafter: str, floor: float) -> None:
    runner = make_runner(drafter, device=RecordingDevice(has_graphs=True))
    got, stats = run(runner, prompts[:5], 1.0, depth=1)
    assert got == {name: expected[DRAFTERS[drafter][0], 1.0][name] for name in got}
    assert runner.graphs.num_steps["uniform"] > 5
    assert stats.drafts.acceptance_rate >= floor


def test_the_head_ships_without_the_targets_matrices() -> None:
    assert (embedded_eagle_path() / "model.safetensors").stat().st_size < 1_200_000


# --- graphs -----------------------------------------------------------------------------------------------------------

ONE_STEP = {"copy_in": 1, "replay": 1, "copy_out": 1}
WITH_LOGPROBS = {**ONE_STEP, "copy_out": 2}
EDITED = {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {30: 1.0}, "logprobs": 2}


@pytest.mark.parametrize(
    ("features", "num_drafts", "counts", "sampling"),
    [
        ({"temperature": 0.0}, NUM_DRAFTS, ONE_STEP, PLAIN),
        ({"temperature": 1.0}, NUM_DRAFTS, ONE_STEP, PLAIN),
        (EDITED, NUM_DRAFTS, WITH_LOGPROBS, SamplingVariant(logits_processors=True, logprobs=32)),
        # the forward pass is a graph; sampling, verification and drafting are queued behind it
        ({**EDITED, "logprobs": -1}, NUM_DRAFTS, WITH_LOGPROBS, None),
        # with drafting off, a drafter still fills its KV cache, in the same graph
        ({"temperature": 0.0}, 0, ONE_STEP, PLAIN),
    ],
    ids=["greedy", "random", "edited", "all logprobs", "off"],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_steady_step_is_one_copy_in_one_replay_and_one_copy_out(
    drafter: str,
    features: dict[str, Any],
    num_drafts: int,
    counts: dict[str, int],
    sampling: SamplingVariant | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the graph depends on a value, and the host waits for nothing."""
    monkeypatch.setattr(NoValues, "num_operations", 0)
    device = StrictDevice()
    runner = make_runner(drafter, device=device)
    is_captured_at_start = sampling is PLAIN and num_drafts > 0
    if is_captured_at_start:
        runner.warm_up()
    scheduler = make_scheduler(NUM_DRAFTS, num_blocks=128, controller=ConstantDrafts(num_drafts))
    prompt = Tokenizer.from_path(STORY).encode("Pip the mouse, Pip the mouse, Pip")
    params = SamplingParams(**{"max_tokens": 100, "ignore_eos": True, **features})
    for request in requests_of([params] * 3, [prompt] * 3):
        scheduler.add_request(request)
    for step in range(12):
        device.counts.clear()
        output, pending = queue_step(scheduler, in_one_runner(runner))
        assert output.num_drafts == (num_drafts if step > 0 else 0)
        if step > (0 if is_captured_at_start else 2):
            assert device.counts == counts
        scheduler.update(output, pending.get())
    assert NoValues.num_operations > 100
    if num_drafts:
        assert runner.graphs.num_steps == {"eager": 1, "uniform": 11}
        assert {key.sampling for key in runner.graphs.captured if key.kind == "uniform"} == {sampling}
    else:
        assert GraphKey("decode", 4, 4, drafting=None if drafter == "ngram" else 0) in runner.graphs.captured


def test_what_no_graph_can_hold_is_refused() -> None:
    numbers = torch.arange(4)
    for ask in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], lambda: torch.equal(numbers, numbers)):
        with pytest.raises(AssertionError, match="aten"), NoValues():
            ask()
