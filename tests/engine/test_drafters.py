"""Draft models and EAGLE heads in an engine: the tokens are those without drafts, and most drafts are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.helpers import runner_lives
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import BLOCK_SIZE, MAX_NUM_SEQS, NUM_DRAFTS, in_one_runner
from tests.helpers.runner_lives import DRAFT as SMALL
from tests.helpers.steps import finish, run_steps

from fleetfoot import LLM, SamplingParams
from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.fusion import plan_fusion
from fleetfoot.layers.context import ModelContext
from fleetfoot.records.request import Request
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.drafting import ConstantDrafts
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.speculative.draft_model import DraftModel
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings, NgramSettings
from fleetfoot.speculative.eagle import EagleDrafter
from fleetfoot.speculative.find import find_drafter
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.weights.loading import ModelLoader

STORY = embedded_model_path()
MAX_MODEL_LEN = 160
OPENINGS = ("Once there was a fox named", "One morning, the little bear", "Long ago, a rabbit and", "Pip the mouse")
SHARED = "Once upon a time, in a small green valley, there lived a young fox named Wren. "


class EveryOtherStep(ConstantDrafts):
    """Steps that propose, and steps in which a drafter only fills its cache."""

    def choose(self, num_decodes: int) -> int:
        self.num_drafts = NUM_DRAFTS - self.num_drafts
        return self.num_drafts


@dataclass(frozen=True)
class Kind:
    """Who drafts for whom."""

    target: Path
    drafter: str
    """``self``, ``small``, ``eagle`` or ``ngram``; empty: nobody."""


def make_runner(kind: Kind, *, num_blocks: int = 128, device: RecordingDevice | None = None) -> ModelRunnerV2:
    draft_settings = make_speculation(
        kind, load_model_config(kind.target), runner_lives.make_context(device, max_model_len=MAX_MODEL_LEN)
    )
    runner = runner_lives.make_runner(
        "v2", draft_settings, device=device, folder=kind.target, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN
    )
    assert isinstance(runner, ModelRunnerV2)
    return runner


def make_speculation(kind: Kind, target: ModelConfig, context: ModelContext) -> DraftSettings:
    if not kind.drafter:
        return NO_DRAFTING
    if kind.drafter == "ngram":
        return DraftSettings(NUM_DRAFTS, ngram=NgramSettings(3, 1))
    if kind.drafter == "eagle":
        wish = {"method": "eagle", "num_speculative_tokens": NUM_DRAFTS}
        found = find_drafter(EngineConfig(speculative_config=wish), target)  # type: ignore[arg-type]
        assert found is not None
        return DraftSettings(
            NUM_DRAFTS, drafter=EagleDrafter(found, context, NUM_DRAFTS, fusion=plan_fusion(found.config, "v2"))
        )
    folder = kind.target if kind.drafter == "self" else SMALL
    loader = ModelLoader(load_model_config(folder), context, folder)
    return DraftSettings(NUM_DRAFTS, drafter=DraftModel(loader, NUM_DRAFTS, plan_fusion(loader.config, "v2")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_path(STORY)
    texts = [*OPENINGS, *(SHARED + opening for opening in OPENINGS)]
    return [tokenizer.encode(text) for text in texts]


def live(
    runner: ModelRunnerV2,
    prompts: list[list[int]],
    temperature: float,
    *,
    num_drafts: int = NUM_DRAFTS,
    num_blocks: int = 128,
    budget: int = 64,
    depth: int = 0,
    controller: ConstantDrafts | None = None,
) -> tuple[dict[str, list[int]], SchedulerStats]:
    """Run requests to their end, in lockstep or with ``depth`` steps queued ahead."""
    config = SchedulerConfig(
        num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, budget, num_drafts=num_drafts, num_lookahead=num_drafts
    )
    scheduler = Scheduler(config, controller=controller) if controller else Scheduler(config)
    lives: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        max_tokens = 40 + 3 * number
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature)
        scheduler.add_request(Request(f"r{number}", prompt, params, max_tokens=max_tokens, seed=number))
    for step in run_steps(scheduler, in_one_runner(runner), depth=depth):
        for result in step.results:
            lives[result.request.request_id] = list(result.request.token_ids)
    scheduler.check_idle()
    return lives, scheduler.stats()


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[tuple[Path, float], dict[str, list[int]]]:
    found = {}
    for target in (SMALL, STORY):
        runner = make_runner(Kind(target, ""))
        for temperature in (0.0, 1.0):
            found[target, temperature] = live(runner, prompts, temperature, num_drafts=0)[0]
    return found


Expected = dict[tuple[Path, float], dict[str, list[int]]]


def assert_all_right(stats: SchedulerStats, num_requests: int) -> None:
    """No draft was wrong but those behind a request's last token."""
    wrong = stats.drafts.num_drafted - stats.drafts.num_accepted
    assert wrong <= NUM_DRAFTS * num_requests


SITUATIONS = pytest.mark.parametrize(
    ("num_blocks", "budget", "depth"),
    [(128, 64, 0), (128, 64, 1), (128, 26, 1), (24, 64, 0)],
    ids=["roomy", "overlapped", "chunked", "preempting"],
)


@SITUATIONS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(
    prompts: list[list[int]], expected: Expected, temperature: float, num_blocks: int, budget: int, depth: int
) -> None:
    runner = make_runner(Kind(SMALL, "self"), num_blocks=num_blocks)
    got, stats = live(runner, prompts, temperature, num_blocks=num_blocks, budget=budget, depth=depth)
    assert got == expected[SMALL, temperature]
    assert_all_right(stats, len(prompts))
    assert stats.drafts.num_drafted > 250
    if num_blocks == 128:  # as few steps as there can be
        assert stats.drafts.num_rows == sum(-(-(40 + 3 * i - 1) // (1 + NUM_DRAFTS)) for i in range(len(prompts)))
    assert (stats.num_preemptions > 0) == (num_blocks < 128)


@SITUATIONS
@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 0.5), (1.0, 0.3)])
def test_the_embedded_head_changes_no_token(
    prompts: list[list[int]],
    expected: Expected,
    temperature: float,
    floor: float,
    num_blocks: int,
    budget: int,
    depth: int,
) -> None:
    runner = make_runner(Kind(STORY, "eagle"), num_blocks=num_blocks)
    got, stats = live(runner, prompts, temperature, num_blocks=num_blocks, budget=budget, depth=depth)
    assert got == expected[STORY, temperature]
    assert stats.drafts.num_drafted > 250
    assert floor < stats.drafts.acceptance_rate < 1
    assert (stats.num_preemptions > 0) == (num_blocks < 128)


@pytest.mark.parametrize("kind", [Kind(STORY, "eagle"), Kind(STORY, "small")], ids=["eagle", "small"])
def test_drafts_are_the_same_each_time(prompts: list[list[int]], expected: Expected, kind: Kind) -> None:
    outcomes = []
    for _ in range(2):
        got, stats = live(make_runner(kind), prompts[:3], 1.0)
        assert got == {name: expected[STORY, 1.0][name] for name in got}
        outcomes.append(stats.drafts)
    assert outcomes[0] == outcomes[1]
    assert 0.15 < outcomes[0].acceptance_rate < 1


def test_a_prefix_of_earlier_requests_has_the_drafters_kv_too(prompts: list[list[int]], expected: Expected) -> None:
    """Blocks that were computed for one request serve the draft model of another."""
    runner = make_runner(Kind(SMALL, "self"))
    scheduled = {name: tokens for name, tokens in expected[SMALL, 0.0].items() if name in ("r0", "r1")}
    first, _ = live(runner, prompts[:2], 0.0)
    assert first == scheduled
    again = [prompts[4], prompts[4]]
    config = SchedulerConfig(128, BLOCK_SIZE, MAX_NUM_SEQS, 64, num_drafts=NUM_DRAFTS, num_lookahead=NUM_DRAFTS)
    scheduler = Scheduler(config)
    texts = []
    for number, prompt in enumerate(again):  # one after the other
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
        request = Request(f"r{number}", prompt, params, max_tokens=30, seed=1)
        scheduler.add_request(request)
        finish(scheduler, in_one_runner(runner))
        texts.append(list(request.token_ids))
    stats = scheduler.stats()
    assert texts[0] == texts[1] == expected[SMALL, 0.0]["r4"][: len(texts[0])]
    assert stats.prefix_cache_hits > 0
    assert_all_right(stats, 2)
    assert stats.drafts.num_accepted > 30


def test_steps_that_propose_nothing_leave_no_gap_in_the_drafters_kv(
    prompts: list[list[int]], expected: Expected
) -> None:
    runner = make_runner(Kind(SMALL, "self"))
    got, stats = live(runner, prompts, 1.0, controller=EveryOtherStep(0))
    assert got == expected[SMALL, 1.0]
    assert_all_right(stats, len(prompts))
    assert stats.drafts.num_accepted > 100


@pytest.mark.parametrize(
    ("kind", "floor"), [(Kind(SMALL, "self"), 0.9), (Kind(STORY, "eagle"), 0.3)], ids=["self", "eagle"]
)
def test_captured_steps_draft(prompts: list[list[int]], expected: Expected, kind: Kind, floor: float) -> None:
    runner = make_runner(kind, device=RecordingDevice(has_graphs=True))
    got, stats = live(runner, prompts[:5], 1.0, depth=1)
    assert got == {name: expected[kind.target, 1.0][name] for name in got}
    assert runner.graphs.num_steps["uniform"] > 5
    assert stats.drafts.acceptance_rate >= floor


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "wish",
    [{"method": "eagle"}, {"method": "eagle", "model": "story-llama-eagle"}, {"model": str(SMALL)}],
    ids=["eagle", "named", "small"],
)
def test_from_a_speculative_config(wish: dict[str, str], runner: str) -> None:
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=5) for temperature in (0.0, 0.8)]
    texts = []
    for config in (None, {**wish, "num_speculative_tokens": 2}):
        settings = {"device": "cpu", "runner": runner, "max_model_len": 128, "num_gpu_blocks_override": 32}
        with LLM(**settings, speculative_config=config) as llm:
            texts.append([output.outputs[0].text for output in llm.generate([SHARED] * 2, params, use_tqdm=False)])
            accepted = llm.stats().scheduler.drafts.num_accepted
    assert texts[0] == texts[1]
    assert accepted > 5


def test_the_head_ships_without_the_targets_matrices() -> None:
    assert (embedded_eagle_path() / "model.safetensors").stat().st_size < 1_200_000
