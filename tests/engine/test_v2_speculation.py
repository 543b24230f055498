"""Model Runner V2 with drafts: whatever is proposed, a request gets the tokens that it gets without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.helpers.recording_device import RecordingDevice

from fleetfoot.attention.kv_layout import KVLayout, LayerGroup
from fleetfoot.attention.sdpa import SDPABackend
from fleetfoot.attention.select import select_attention
from fleetfoot.config.model import load_model_config
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.ops.select import select_ops
from fleetfoot.runner.capture_table import CaptureTable
from fleetfoot.runner.load import ModelLoader
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.logprob import RowLogprobs
from fleetfoot.sampling.params import SamplingParams
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.request import Request
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.speculation import NgramSettings, Speculation
from fleetfoot.speculative.speculator import DraftBatch

DRAFT = Path(__file__).parent.parent / "assets" / "story-draft"
NUM_DRAFTS = 3
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 96


@dataclass
class ScriptedDrafter:
    """Knows how every request will go on, and proposes that with some errors. Checks what it is told."""

    num_drafts: int = NUM_DRAFTS
    share_of_errors: float = 0.3
    kv_groups: tuple[LayerGroup, ...] = ()
    scripts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> all tokens of its request, as they come without drafts."""
    num_proposals: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def load_model(self, target: CausalLM) -> None:
        assert target.is_last

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        assert not kv_caches

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        if not num_drafts:
            return None
        proposals = []
        for index, row in enumerate(batch.rows.tolist()):
            script = self.scripts.get(row, [])
            position = int(batch.positions[index])
            if row >= 0 and script and position < len(script) and position < int(batch.limits[index]):
                self._check(batch, index, script, position)
            proposal = [*script[position + 1 : position + 1 + num_drafts], *[-1] * num_drafts][:num_drafts]
            wrong = [self._random.random() < self.share_of_errors for _ in proposal]
            proposals.append(
                [1 + token % 2000 if is_wrong else token for token, is_wrong in zip(proposal, wrong, strict=True)]
            )
            self.num_proposals += 1
        return torch.tensor(proposals, dtype=torch.int32).view(-1, num_drafts)

    def _check(self, batch: DraftBatch, index: int, script: list[int], position: int) -> None:
        """Where the request stands, seen from the batch."""
        assert int(batch.newest[index]) == script[position]
        last = int(batch.last_index[index])
        assert int(batch.metadata.positions[last]) == position - 1
        assert int(batch.input_ids[last]) == script[position - 1]
        first = int(batch.metadata.query_start_loc[index])
        known = range(first, last + 1)
        expected = [script[int(batch.metadata.positions[token]) + 1] for token in known]
        assert [int(batch.next_ids[token]) for token in known] == expected


class CapturableAttention(SDPABackend):
    is_capturable = True


def make_runner(speculation: Speculation | None = None, device: RecordingDevice | None = None) -> ModelRunnerV2:
    config = load_model_config(DRAFT)
    has_graphs = device is not None and device.has_graphs
    attention = CapturableAttention() if has_graphs else select_attention("cpu")
    limits = MAX_MODEL_LEN + NUM_DRAFTS
    context = ModelContext(select_ops("cpu"), attention, torch.float32, torch.device("cpu"), limits)
    speculation = speculation or Speculation()
    runner = ModelRunnerV2(
        ModelLoader(config, context, DRAFT),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        capture_table=CaptureTable.of(
            device="cuda",
            enforce_eager=not has_graphs,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=64,
            num_drafts=speculation.num_drafts,
        ),
        device=device,
        speculation=speculation,
    )
    runner.load_model()
    runner.initialize_kv_cache(KVLayout.of(config, 64, 8, "float32"))
    return runner


@dataclass
class Life:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)


def wishes(number: int) -> SamplingParams:
    every = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 0},
    ]
    return SamplingParams(max_tokens=7 + 5 * number, ignore_eos=True, **every[number % len(every)])  # type: ignore[arg-type]


def live(
    runner: ModelRunnerV2,
    params: list[SamplingParams],
    *,
    num_drafts: int = 0,
    scripts: dict[str, list[int]] | None = None,
    drafter: ScriptedDrafter | None = None,
    budget: int = 64,
    depth: int = 0,
) -> dict[str, Life]:
    """Run requests to their end, in lockstep or with ``depth`` steps queued ahead."""
    config = SchedulerConfig(64, 8, MAX_NUM_SEQS, budget, num_drafts=num_drafts, num_lookahead=num_drafts)
    scheduler = Scheduler(config)
    lives: dict[str, Life] = {}
    for number, wish in enumerate(params):
        prompt = [20 + 7 * number + place % 5 for place in range(3 + 9 * number % 40)]
        name = f"r{number}"
        lives[name] = Life()
        scheduler.add_request(Request(name, prompt, wish, max_tokens=wish.max_tokens or 16, seed=number))
    queue = []
    while scheduler.has_unfinished or queue:
        output = scheduler.schedule()
        if output is not None:
            for request in output.new_requests:
                if drafter is not None and scripts is not None:
                    drafter.scripts[request.row] = scripts[request.request_id]
            runner.execute_model(output)
            queue.append((output, runner.sample_tokens(None)))
        if queue and (len(queue) > depth or output is None):
            retired, pending = queue.pop(0)
            result = pending.get()
            for step in scheduler.update(retired, result):
                life = lives[step.request.request_id]
                life.token_ids = list(step.request.token_ids)
                life.logprobs += result.logprobs.get(step.index, [])[: len(step.new_token_ids)]
    scheduler.check_idle()
    return lives


def assert_same(got: dict[str, Life], expected: dict[str, Life]) -> None:
    for name, life in expected.items():
        assert got[name].token_ids == life.token_ids, name
        assert len(got[name].logprobs) == len(life.logprobs), name
        for ours, theirs in zip(got[name].logprobs, life.logprobs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def expected() -> dict[str, Life]:
    return live(make_runner(), [wishes(number) for number in range(9)])


@pytest.mark.parametrize("depth", [0, 1], ids=["lockstep", "overlapped"])
@pytest.mark.parametrize("share_of_errors", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("budget", [64, 24], ids=["roomy", "tight"])
def test_drafts_change_no_token(expected: dict[str, Life], share_of_errors: float, depth: int, budget: int) -> None:
    drafter = ScriptedDrafter(share_of_errors=share_of_errors)
    runner = make_runner(Speculation(NUM_DRAFTS, drafter=drafter))
    scripts = {name: life.token_ids for name, life in expected.items()}
    got = live(
        runner,
        [wishes(number) for number in range(9)],
        num_drafts=NUM_DRAFTS,
        scripts=scripts,
        drafter=drafter,
        budget=budget,
        depth=depth,
    )
    assert drafter.num_proposals > 10
    assert_same(got, expected)


def test_right_drafts_save_steps() -> None:
    params = [SamplingParams(max_tokens=41, ignore_eos=True, temperature=0.0)]
    expected = live(make_runner(), params)
    drafter = ScriptedDrafter(share_of_errors=0.0)
    runner = make_runner(Speculation(NUM_DRAFTS, drafter=drafter))
    scripts = {name: life.token_ids for name, life in expected.items()}
    got = live(runner, params, num_drafts=NUM_DRAFTS, scripts=scripts, drafter=drafter)
    assert_same(got, expected)
    assert runner.graphs.num_steps["eager"] == 1 + 40 // (1 + NUM_DRAFTS)


@pytest.mark.parametrize("greedy", [True, False])
def test_captured_steps_verify_and_draft(greedy: bool) -> None:
    params = [
        SamplingParams(max_tokens=20 + number, ignore_eos=True, temperature=0.0 if greedy else 0.8)
        for number in range(5)
    ]
    expected = live(make_runner(), params)
    device = RecordingDevice(has_graphs=True)
    drafter = ScriptedDrafter()
    runner = make_runner(Speculation(NUM_DRAFTS, drafter=drafter), device)
    scripts = {name: life.token_ids for name, life in expected.items()}
    got = live(runner, params, num_drafts=NUM_DRAFTS, scripts=scripts, drafter=drafter, depth=1)
    assert_same(got, expected)
    assert runner.graphs.num_steps["uniform"] > 5


def test_a_steady_step_with_drafts_is_one_copy_in_one_copy_out_and_no_wait() -> None:
    device = RecordingDevice(has_graphs=True)
    drafter = ScriptedDrafter(share_of_errors=1.0)
    runner = make_runner(Speculation(NUM_DRAFTS, drafter=drafter), device)
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


@pytest.mark.parametrize("depth", [0, 1], ids=["lockstep", "overlapped"])
def test_n_grams_change_no_token(expected: dict[str, Life], depth: int) -> None:
    runner = make_runner(Speculation(NUM_DRAFTS, ngram=NgramSettings(3, 1)))
    got = live(runner, [wishes(number) for number in range(9)], num_drafts=NUM_DRAFTS, depth=depth)
    assert_same(got, expected)
