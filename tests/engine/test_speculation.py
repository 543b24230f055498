"""Runners of both kinds, alone and in pipelines: whatever is proposed, a request gets the tokens of Model Runner V1."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import runner_lives as lives
from tests.helpers.kernels import cpu_kernels
from tests.helpers.local_pipeline import LocalPipeline, local_pipeline
from tests.helpers.recording_device import NoValues, RecordingDevice, StrictDevice, unwatched

from fleetfoot.assets import embedded_eagle_path
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import RowLogprobs
from fleetfoot.scheduler.drafting import DraftController
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.scheduler.stats import SchedulerStats
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftBatch, DraftSettings
from fleetfoot.tokenizer.tokenizer import Tokenizer

REQUESTS = [lives.params_of(number) for number in range(10)]
CAPTURED = [SamplingParams(max_tokens=12 + 5 * n, temperature=0.5 * (n % 3), ignore_eos=True) for n in range(9)]
"""All of their sampling is in graphs."""
QWEN = lives.DRAFT.parent / "story-qwen3"
NGRAM = DraftSettings(lives.NUM_DRAFTS, ngram=(3, 1))
ALONE = [("v1",), ("v2",)]
PAIRS = [("v1", "v1"), ("v2", "v2"), ("v1", "v2"), ("v2", "v1")]
SHARES = {"right": 0.0, "mixed": 0.3, "wrong": 1.0}
"""Of errors in scripted drafts."""
CASES = [
    *(
        (drafts, kinds, (i + j) % 3, 64 if kinds in PAIRS else 24)
        for i, drafts in enumerate(("none", "ngram", *SHARES))
        for j, kinds in enumerate([*ALONE, *PAIRS])
        if (i + j) % 3 == 1 or drafts == "mixed"
    ),
]
KIND = pytest.mark.parametrize("kind", ["v1", "v2"])
Prompts = list[list[int]]


def scripted(share_of_errors: float = 0.3, **fields: Any) -> DraftSettings:
    return DraftSettings(lives.NUM_DRAFTS, drafter=lives.ScriptedDrafter(share_of_errors=share_of_errors, **fields))


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
        config = load_model_config(options.get("folder", lives.DRAFT))
        self.draft_settings = draft_settings
        self.runners = []
        for rank, group in enumerate(local_pipeline(len(kinds), config.hidden_size if make_device() else None)):
            settings = draft_settings if group.is_last_rank else DraftSettings(draft_settings.num_drafts)
            layers = pipeline_layers(config, rank, len(kinds)) if len(kinds) > 1 else None
            options |= {"device": make_device(), "pipeline": group, "layers": layers}
            self.runners.append(lives.make_runner(kinds[rank], settings, **options))
        self.pipeline = LocalPipeline(self.runners) if len(kinds) > 1 else None
        self.execute = lives.in_one_runner(self.runners[0]) if self.pipeline is None else self.pipeline.execute

    def scheduler(self, **limits: Any) -> Scheduler:
        num_drafts = self.draft_settings.num_drafts
        lookahead = 0 if self.draft_settings.drafter is None else num_drafts
        return lives.make_scheduler(num_drafts, num_lookahead=lookahead, num_stages=len(self.runners), **limits)

    def live(
        self, params: list[SamplingParams], scheduler: Scheduler | None = None, **options: Any
    ) -> dict[str, lives.Life]:
        drafter: Any = self.draft_settings.drafter
        return lives.live(self.execute, params, scheduler=scheduler or self.scheduler(), drafter=drafter, **options)


@pytest.fixture(scope="module")
def expected() -> dict[str, lives.Life]:
    return Ranks(("v1",)).live(REQUESTS)


def test_every_request_is_a_case_of_its_own(expected: dict[str, lives.Life]) -> None:
    plain = Ranks(("v1",)).live([SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)] * 9)
    for number in range(1, 8):
        got, without = expected[f"r{number}"].token_ids, plain[f"r{number}"].token_ids
        length = min(len(got), len(without))
        assert got[:length] != without[:length], number
    assert lives.prompt_length(8) + 13 <= len(expected["r8"].token_ids) < lives.prompt_length(8) + 30
    assert len(expected["r9"].token_ids) == lives.MAX_MODEL_LEN


@pytest.mark.parametrize(("drafts", "kinds", "depth", "budget"), CASES)
def test_drafts_change_no_token(
    expected: dict[str, lives.Life], drafts: str, kinds: tuple[str, ...], depth: int, budget: int
) -> None:
    settings = scripted(SHARES[drafts]) if drafts in SHARES else {"none": NO_DRAFTING, "ngram": NGRAM}[drafts]
    ranks = Ranks(kinds, settings)
    got = ranks.live(REQUESTS, ranks.scheduler(budget=budget), expected=expected, depth=depth)
    lives.assert_same(got, expected)
    assert drafts not in SHARES or settings.drafter.num_proposals > 10  # type: ignore[union-attr]
    if ranks.pipeline is not None:
        max_behind = ranks.pipeline.max_behind
        assert max_behind == 1 + depth if drafts == "none" else max_behind >= min(2, 1 + depth)


@pytest.mark.parametrize(
    ("kinds", "seed", "depth"),
    [
        *((kinds, 0, depth) for depth, kinds in enumerate(ALONE)),
        *((kinds, seed, 1 + seed % 2) for seed, kinds in enumerate(PAIRS)),
    ],
)
def test_drafting_can_pause(expected: dict[str, lives.Life], kinds: tuple[str, ...], seed: int, depth: int) -> None:
    """Then a step has requests with new drafts beside others without: all ranks have the same for them."""
    ranks = Ranks(kinds, scripted())
    scheduler = ranks.scheduler(controller=lives.Whims(seed))
    lives.assert_same(ranks.live(REQUESTS, scheduler, expected=expected, depth=depth), expected)
    assert scheduler.stats().drafts.num_accepted > 10


@KIND
def test_three_ranks(kind: str) -> None:
    expected = tokens_of_qwen(kind, 0)
    ranks = Ranks((kind,) * 3, scripted(), folder=QWEN)
    lives.assert_same(ranks.live(REQUESTS, expected=expected, depth=3), expected)
    assert ranks.pipeline is not None and ranks.pipeline.max_behind >= 2


@functools.cache
def tokens_of_qwen(kind: str, number: int) -> dict[str, lives.Life]:
    """Of all requests, or of those of CAPTURED."""
    return Ranks((kind,), folder=QWEN).live([REQUESTS, CAPTURED][number])


@pytest.mark.parametrize(
    ("draft_settings", "number"),
    [
        (NO_DRAFTING, 0),
        (NGRAM, 1),
        (scripted(0.5), 0),
    ],
    ids=["none-all", "ngram-plain", "wrong-all"],
)
def test_graphs_on_every_rank_change_no_token(number: int, draft_settings: DraftSettings) -> None:
    """Each rank replays its part of a step, padding included; only the communication of ranks is not captured."""
    expected = tokens_of_qwen("v2", number)
    has_drafter, num_drafts = draft_settings.drafter is not None, draft_settings.num_drafts

    def make_device() -> RecordingDevice:
        return RecordingDevice(has_graphs=True) if has_drafter else StrictDevice()  # the drafter reads values

    ranks = Ranks(("v2",) * 3, draft_settings, make_device=make_device, folder=QWEN, ops=unwatched(cpu_kernels()))
    got = ranks.live([REQUESTS, CAPTURED][number], expected=expected, depth=3)
    lives.assert_same(got, expected, tolerance=1e-4)  # other shapes round differently
    for runner in ranks.runners:
        is_last = runner is ranks.runners[-1]
        assert runner.graphs.num_steps["uniform" if num_drafts else "decode"] > 10
        assert runner.graphs.num_steps["mixed"] > 0 and not runner.graphs.num_steps["eager"]
        assert any(key.sampling for key in runner.graphs.captured) == is_last


@KIND
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_computed_beyond_the_end(kind: str, seed: int) -> None:
    """A request alone, as long as the model's sequences can be: it is in steps in flight when it has ended."""
    expected, params, prompts = longest_life(kind)
    ranks = Ranks((kind, kind), scripted(0.0))
    scheduler = ranks.scheduler(max_num_seqs=1, controller=lives.Whims(seed))
    lives.assert_same(ranks.live(params, scheduler, expected=expected, depth=3, prompts=prompts), expected)


@functools.cache
def longest_life(kind: str) -> tuple[dict[str, lives.Life], list[SamplingParams], Prompts]:
    """Of a request that ends at the model's limit; its parameters and its prompt."""
    prompts = [[20 + place % 5 for place in range(72)]]
    params = [SamplingParams(max_tokens=lives.MAX_MODEL_LEN - 72, ignore_eos=True, temperature=0.0)]
    return Ranks((kind,)).live(params, prompts=prompts), params, prompts


@KIND
def test_a_request_that_has_ended_gets_nothing(kind: str) -> None:
    """Only on the device it is known that the first step in flight has reached its length."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    expected = Ranks((kind,)).live([params])["r0"].token_ids
    ranks = Ranks((kind,), scripted(0.0, scripts={0: expected}))
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
    ranks = Ranks((kind,), scripted(0.0, scripts=scripts))
    scheduler = ranks.scheduler(max_num_seqs=2)
    for number, tokens in scripts.items():
        prompt: Any = tokens[: lives.prompt_length(number)]
        scheduler.add_request(Request(f"r{number}", prompt, params, max_tokens=20, seed=number))
        output = scheduler.schedule()
        assert output is not None
        result = ranks.execute(output).get()
        scheduler.update(output, result)
    new = [expected["r0"].token_ids[4:8], expected["r1"].token_ids[12:13]]
    assert output is not None and output.num_decodes == 1
    assert result.sampled_token_ids == new
    assert result.num_drafted == [lives.NUM_DRAFTS]
    rows = {index: map(RowLogprobs.unpack, packed) for index, packed in result.logprobs.items()}
    logprobs = {index: [row.token_ids[0] for row in each] for index, each in rows.items()}
    assert logprobs == dict(enumerate(new))


@dataclass
class CuriousDrafter(lives.ScriptedDrafter):
    """Records its input, without padding and what is behind a request's end."""

    inputs: list[dict[str, Any]] = field(default_factory=list)

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        starts, rows = batch.metadata.query_start_loc.tolist(), batch.rows.to(torch.int64)
        valid = [t for i, last in enumerate(batch.last_index.tolist()) for t in range(starts[i], last + 1)]
        valid += range(starts[len(rows)], starts[-1])  # chunks that do not reach their prompts' ends
        reach = torch.minimum(batch.positions + num_drafts, batch.limits)
        assert bool((batch.positions + num_drafts <= batch.max_seq_len).all())
        tables = zip(batch.block_tables.tolist(), reach.tolist(), strict=True)
        per_token = (batch.input_ids[valid], batch.next_ids[valid])
        noise = (batch.temperatures[rows], batch.seeds[rows])
        values = (*per_token, batch.last_index, batch.newest, batch.positions, batch.limits, *noise)
        metadata = (getattr(batch.metadata, name).tolist() for name in ("slot_mapping", "positions", "seq_lens"))
        self.inputs.append(
            {
                "starts": starts,
                "hidden": batch.hidden[valid].sum(1),
                "values": [tensor.tolist() for tensor in values],
                "metadata": list(metadata),
                "blocks": [table[: -(-end // 8)] for table, end in tables],
                "shape": (batch.is_decode, num_drafts),
            }
        )
        return super().propose(batch, num_drafts)


def test_a_drafter_gets_the_same_input_from_both(expected: dict[str, lives.Life]) -> None:
    inputs = []
    for kind in ("v1", "v2"):
        drafter = CuriousDrafter()
        ranks = Ranks((kind,), DraftSettings(lives.NUM_DRAFTS, drafter=drafter))
        ranks.live(REQUESTS, ranks.scheduler(budget=24, controller=lives.Whims(0)), expected=expected)
        inputs.append(drafter.inputs)
    first, second = inputs
    assert {batch["shape"][1] for batch in first} == {0, lives.NUM_DRAFTS}
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours.pop("hidden"), theirs.pop("hidden"))
        assert ours == theirs


OPENINGS = ("Once there was a fox named", "One morning, the little bear", "Long ago, a rabbit and", "Pip the mouse")
SHARED = "Once upon a time, in a small green valley, there lived a young fox named Wren. "
DRAFTERS: dict[str, tuple[Path, dict[str, Any]]] = {
    "ngram": (lives.STORY, {"method": "ngram", "prompt_lookup_max": 3}),
    "small": (lives.STORY, {"model": str(lives.DRAFT)}),
    "self": (lives.DRAFT, {"model": str(lives.DRAFT)}),
    "eagle": (lives.STORY, {"method": "eagle"}),
}
"""The target, and the ``speculative_config``."""
Stories = dict[tuple[Path, float], dict[str, list[int]]]


def drafting_runner(drafter: str, kind: str = "v2", *, num_blocks: int = 128, **options: Any) -> Any:
    target, speculative = DRAFTERS[drafter]
    context = lives.make_context(options.get("device"), max_model_len=160)
    settings = lives.configured_drafting(target, context, kind, speculative)
    options = {"ops": cpu_kernels(), **options, "num_blocks": num_blocks, "max_model_len": 160}
    options["ops"] = unwatched(options["ops"])
    return lives.make_runner(kind, settings, folder=target, **options)


def run_stories(
    runner: Any, prompts: Prompts, temperature: float, num_drafts: int = lives.NUM_DRAFTS, *, depth: int = 0,
    **limits: Any,
) -> tuple[dict[str, list[int]], SchedulerStats]:  # fmt: skip
    common: dict[str, Any] = {"ignore_eos": True, "temperature": temperature}
    params = [SamplingParams(max_tokens=40 + 3 * number, **common) for number in range(len(prompts))]
    scheduler = lives.make_scheduler(num_drafts, **{"num_blocks": 128, **limits})
    lived = lives.live(lives.in_one_runner(runner), params, scheduler=scheduler, depth=depth, prompts=prompts)
    return {name: life.token_ids for name, life in lived.items()}, scheduler.stats()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = Tokenizer.from_path(lives.STORY)
    return [tokenizer.encode(text) for text in (*OPENINGS, *(SHARED + opening for opening in OPENINGS))]


@pytest.fixture(scope="module")
def stories(prompts: Prompts) -> Stories:
    found = {}
    for target in (lives.DRAFT, lives.STORY):
        runner = lives.make_runner("v2", folder=target, num_blocks=128, max_model_len=160)
        for temperature in (0.0, 1.0):
            found[target, temperature] = run_stories(runner, prompts, temperature, num_drafts=0)[0]
    return found


def assert_all_right(stats: SchedulerStats, num_requests: int) -> None:
    """No draft was wrong except those behind a request's last token."""
    assert stats.drafts.num_drafted - stats.drafts.num_accepted <= lives.NUM_DRAFTS * num_requests


ROOMY = {"num_blocks": 128}
SITUATIONS: dict[str, dict[str, int]] = {
    "roomy": ROOMY,
    "chunked": ROOMY | {"depth": 1, "budget": 26},
    "preempting": {"num_blocks": 24},
}
DRAFTED = [
    ("roomy", "self", "v1", 0.0),
    ("roomy", "self", "v2", 1.0),
    ("roomy", "eagle", "v2", 0.0),
    ("chunked", "eagle", "v2", 1.0),
    ("preempting", "self", "v2", 0.0),
]


@pytest.mark.parametrize(("situation", "drafter", "kind", "temperature"), DRAFTED)
def test_stories_are_those_without_drafts(
    prompts: Prompts, stories: Stories, situation: str, drafter: str, kind: str, temperature: float
) -> None:
    """A model that drafts for itself is always right, and takes as few steps as possible."""
    limits = SITUATIONS[situation]
    num_blocks = limits["num_blocks"]
    got, stats = run_stories(drafting_runner(drafter, kind, num_blocks=num_blocks), prompts, temperature, **limits)
    assert got == stories[DRAFTERS[drafter][0], temperature]
    assert stats.drafts.num_drafted > 250
    assert (stats.num_preemptions > 0) == (num_blocks < 128)
    if drafter == "eagle":
        assert (0.3 if temperature else 0.5) < stats.drafts.acceptance_rate < 1
    else:
        assert_all_right(stats, len(prompts))
        fewest = sum(-(-(40 + 3 * i - 1) // (1 + lives.NUM_DRAFTS)) for i in range(len(prompts)))
        assert num_blocks < 128 or stats.drafts.num_rows == fewest


@pytest.mark.parametrize("drafter", ["eagle", "small"])
def test_drafts_are_the_same_each_time(prompts: Prompts, stories: Stories, drafter: str) -> None:
    outcomes = []
    for _ in range(2):
        got, stats = run_stories(drafting_runner(drafter), prompts[:3], 1.0)
        assert got == {name: stories[lives.STORY, 1.0][name] for name in got}
        outcomes.append(stats.drafts)
    assert outcomes[0] == outcomes[1]
    assert 0.15 < outcomes[0].acceptance_rate < 1


def test_a_prefix_of_earlier_requests_has_the_drafters_kv_too(prompts: Prompts, stories: Stories) -> None:
    """Blocks that were computed for one request serve the draft model of another."""
    runner, scheduler = drafting_runner("self"), lives.make_scheduler(lives.NUM_DRAFTS, num_blocks=128)
    assert run_stories(runner, prompts[:2], 0.0)[0] == {name: stories[lives.DRAFT, 0.0][name] for name in ("r0", "r1")}
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    for _ in range(2):  # one after the other
        (got,) = lives.live(lives.in_one_runner(runner), [params], scheduler=scheduler, prompts=[prompts[4]]).values()
        assert got.token_ids == stories[lives.DRAFT, 0.0]["r4"][: len(prompts[4]) + 30]
    stats = scheduler.stats()
    assert stats.prefix_cache_hits > 0
    assert_all_right(stats, 2)
    assert stats.drafts.num_accepted > 30


class EveryOtherStep(DraftController):
    """Steps that propose, and steps in which a drafter only fills its cache."""

    def choose(self, num_decodes: int) -> int:
        self.num_drafts = lives.NUM_DRAFTS - self.num_drafts
        return self.num_drafts


def test_steps_without_proposals_leave_no_gap_in_the_kv(prompts: Prompts, stories: Stories) -> None:
    got, stats = run_stories(drafting_runner("self"), prompts, 1.0, controller=EveryOtherStep(0))
    assert got == stories[lives.DRAFT, 1.0]
    assert_all_right(stats, len(prompts))
    assert stats.drafts.num_accepted > 100


@pytest.mark.parametrize(("drafter", "floor"), [("self", 0.9), ("eagle", 0.3)])
def test_captured_steps_draft(prompts: Prompts, stories: Stories, drafter: str, floor: float) -> None:
    runner = drafting_runner(drafter, device=RecordingDevice(has_graphs=True))
    got, stats = run_stories(runner, prompts[:5], 1.0, depth=1)
    assert got == {name: stories[DRAFTERS[drafter][0], 1.0][name] for name in got}
    assert runner.graphs.num_steps["uniform"] > 5
    assert stats.drafts.acceptance_rate >= floor


@pytest.mark.parametrize("drafter", ["ngram", "self", "eagle"])
def test_drafts_behind_a_forward_pass_that_samplers_share(drafter: str, prompts: Prompts) -> None:
    """The same as steps without graphs."""
    params = [SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": number, **EDITED}) for number in range(4)]

    def run(device: RecordingDevice | None) -> tuple[dict[str, list[int]], Any]:
        runner, scheduler = (
            drafting_runner(drafter, device=device),
            lives.make_scheduler(lives.NUM_DRAFTS, num_blocks=128),
        )
        lived = lives.live(lives.in_one_runner(runner), params, scheduler=scheduler, depth=1, prompts=prompts[:4])
        return {name: life.token_ids for name, life in lived.items()}, runner.graphs

    expected, _ = run(None)
    got, graphs = run(RecordingDevice(has_graphs=True))
    assert got == expected
    assert graphs.num_steps["uniform"] > 5


def test_the_head_ships_without_the_targets_matrices() -> None:
    assert (embedded_eagle_path() / "model.safetensors").stat().st_size < 1_200_000


ONE_STEP = {"copy_in": 1, "replay": 1, "copy_out": 1}
WITH_LOGPROBS = {**ONE_STEP, "copy_out": 2}
EDITED = {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {30: 1.0}, "logprobs": 2}


@pytest.mark.parametrize(
    ("drafter", "features", "num_drafts", "counts"),
    [
        *((drafter, {"temperature": 0.0}, lives.NUM_DRAFTS, ONE_STEP) for drafter in ("ngram", "small", "eagle")),
        ("ngram", {"temperature": 1.0}, lives.NUM_DRAFTS, ONE_STEP),
        # a forward pass that all samplers share, and this sampling with verification and drafting
        ("small", EDITED, lives.NUM_DRAFTS, {**WITH_LOGPROBS, "replay": 2}),
        # the forward pass is a graph; sampling, verification and drafting are queued behind it
        ("eagle", {**EDITED, "logprobs": -1}, lives.NUM_DRAFTS, WITH_LOGPROBS),
        # with drafting off, a drafter still fills its KV cache, in the same graph
        ("eagle", {"temperature": 0.0}, 0, ONE_STEP),
    ],
    ids=["greedy", "greedy, a model", "greedy, eagle", "random", "edited", "all logprobs", "off"],
)
def test_a_steady_step_is_one_copy_in_one_replay_and_one_copy_out(
    drafter: str,
    features: dict[str, Any],
    num_drafts: int,
    counts: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the graph depends on a value, and the host waits for nothing."""
    monkeypatch.setattr(NoValues, "num_operations", 0)
    device = StrictDevice()
    # layers one by one: operations within a chain of them would not be seen
    runner = drafting_runner(drafter, device=device, ops=replace(cpu_kernels(), layer_chain=None))
    scheduler = lives.make_scheduler(lives.NUM_DRAFTS, num_blocks=128, controller=DraftController(num_drafts))
    prompt = Tokenizer.from_path(lives.STORY).encode("Pip the mouse, Pip the mouse, Pip")
    params = SamplingParams(**{"max_tokens": 100, "ignore_eos": True, **features})
    for request in lives.requests_of([params] * 3, [prompt] * 3):
        scheduler.add_request(request)
    for step in range(8):
        device.counts.clear()
        output, pending = lives.queue_step(scheduler, lives.in_one_runner(runner))
        assert output.num_drafts == (num_drafts if step > 0 else 0)
        if step > 0:
            assert device.counts == counts
        scheduler.update(output, pending.get())
    assert NoValues.num_operations > 100
    assert runner.graphs.num_steps == {"mixed": 1, "uniform" if num_drafts else "decode": 7}


def test_what_no_graph_can_hold_is_refused() -> None:
    numbers = torch.arange(4)
    for ask in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], lambda: torch.equal(numbers, numbers)):
        with pytest.raises(AssertionError, match="aten"), NoValues():
            ask()
