"""Runners of both kinds, alone and in pipelines: whatever is proposed, a request gets the tokens of Model Runner V1."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings
from fleetfoot.tokenizer.tokenizer import Tokenizer

REQUESTS = [lives.params_of(number) for number in range(10)]
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


ROOMY = {"num_blocks": 128}


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
