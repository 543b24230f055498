"""Whatever the runner, overlap, cache, batch and drafts, a request gets the tokens that it gets alone; also random
requests with aborts, and preempted requests."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers import paged_models
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint, reference_logits
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of, run_requests
from tests.helpers.runner_lives import DRAFT, METHODS, STORY
from tests.helpers.schedules import Life, assert_agree, assert_lives_agree, live, live_alone, random_lives

from fleetfoot import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.engine.core import EngineCore

VOCAB = TEXT_MODEL["vocab_size"]
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 9},
    "tight": {"num_gpu_blocks_override": 22, "block_size": 4, "max_num_seqs": 5},
    "tight-chunked-no-cache": {
        "num_gpu_blocks_override": 45,
        "block_size": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "enable_prefix_caching": False,
    },
    "priority": {"num_gpu_blocks_override": 30, "block_size": 3, "max_num_seqs": 6, "scheduling_policy": "priority"},
    "whole": {"enable_chunked_prefill": False, "max_model_len": 90, "max_num_batched_tokens": 90},
}
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_seqs": 4}
Catalogue = list[tuple[Life, RequestOutput]]


def preemptions(engine: LLMEngine) -> int:
    return engine.stats().scheduler.num_preemptions


def random_params(rng: random.Random) -> SamplingParams:
    """Any parameters but the output kind."""
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 30)}
    if rng.random() < 0.7:
        params |= {"temperature": rng.choice([0.3, 1.0, 2.0]), "n": rng.choice([1, 1, 3])}
        params["seed"] = rng.choice([1, -7, 2**64 - 1])
        params |= rng.choice([{}, {"top_p": 0.8}, {"top_k": 30}, {"min_p": 0.02}])
    else:
        params["temperature"] = 0
    params |= rng.choice([{}, {"ignore_eos": True}, {"min_tokens": params["max_tokens"] // 2}])
    params |= rng.choice([{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.9}, {"frequency_penalty": -1.0}])
    params |= rng.choice([{}, {}, {"logit_bias": {1: 5.0}}])
    params |= rng.choice([{}, {"stop": ["e", " the"]}, {"stop": "a", "include_stop_str_in_output": True}])
    params |= rng.choice([{}, {"bad_words": ["fox", "her"]}, {"stop_token_ids": list(range(0, VOCAB, 40))}])
    params |= rng.choice([{}, {"logprobs": 2}, {"logprobs": 0, "allowed_token_ids": list(range(100, 900))}])
    params |= rng.choice([{}, {"prompt_logprobs": 1}, {"skip_special_tokens": False}])
    return SamplingParams(**params)


@pytest.fixture(scope="module")
def catalogue(text_model: Path) -> Catalogue:
    """Requests, some of which share a beginning, and what each yields alone."""
    rng, lives = random.Random(0), []
    for number in range(40):
        shared = prompt_of(30, VOCAB)[: rng.choice([0, 0, 8, 17, 30])]
        prompt = shared + prompt_of(rng.randint(1, 25), VOCAB, seed=number)
        lives.append(Life(f"r{number}", prompt, random_params(rng)))
    engine = make_engine(text_model, enable_prefix_caching=False, max_num_seqs=3)
    outputs = list(live_alone(engine, lives).values())
    engine.shutdown()
    assert {completion.finish_reason for output in outputs for completion in output.outputs} == {"stop", "length"}
    return list(zip(lives, outputs, strict=True))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, text_model: Path) -> Iterator[LLMEngine]:
    engine = make_engine(text_model, **ENGINES[request.param])
    yield engine
    if request.param.startswith(("tight", "priority")):
        assert preemptions(engine) > 0
    engine.shutdown()


@pytest.mark.parametrize("depth", [0, 2])
def test_random_requests(depth: int, engine: LLMEngine, catalogue: Catalogue, request: pytest.FixtureRequest) -> None:
    rng = random.Random(request.node.name)  # other requests in each case
    core = EngineCore(engine.core.scheduler, engine.core.executor, engine.core.stats, depth=depth)
    engine = LLMEngine(core, engine.input_processor, engine.tokenizer)
    lives, expected, aborted = [], {}, set()
    for number, (life, output) in enumerate(rng.choices(catalogue, k=25)):
        params = replace(life.params, output_kind=rng.choice(list(RequestOutputKind)))
        priority = rng.randint(0, 2) if core.scheduler.config.priority else 0
        expected[f"r{number}"] = output
        lives.append(Life(f"r{number}", life.prompt, params, rng.randint(0, 50), priority=priority))

    def disturb() -> None:
        if rng.random() < 0.08:
            aborted.add(name := f"r{rng.randrange(25)}")
            engine.abort_request(name)  # if it is running
        if rng.random() < 0.03:
            engine.reset_prefix_cache()

    got = live(engine, lives, disturb)
    for name, output in expected.items():
        assert_agree(got[name], output, tolerance=1e-4)
        assert name in aborted or "abort" not in [completion.finish_reason for completion in got[name].outputs]
    core.scheduler.check_idle()


def seeded(number: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"seed": number, "max_tokens": 40, "ignore_eos": True, **params})


def test_prompt_logprobs_of_a_preempted_prefill(text_checkpoint: tuple[Path, Any]) -> None:
    """The first chunks are computed twice; each position must be reported once."""
    folder, reference = text_checkpoint
    engine = make_engine(folder, num_gpu_blocks_override=18, block_size=4, max_num_seqs=3, max_num_batched_tokens=6)
    prompt = prompt_of(44, VOCAB, 9)
    for number in range(2):  # they grow, and need the blocks that the long prompt was admitted with
        engine.add_request(str(number), prompt_of(4, VOCAB, number), seeded(number, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    outputs = drain(engine)
    assert preemptions(engine) > 0
    (long,) = [output for output in outputs if output.request_id == "long" and output.finished]
    assert long.prompt_logprobs is not None and len(long.prompt_logprobs) == len(prompt)
    logprobs = reference_logits(reference, prompt).log_softmax(-1)
    expected = [logprobs[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
    found = [entry.get(prompt[i]) for i, entry in enumerate(long.prompt_logprobs) if entry is not None]
    assert [entry.logprob if entry else None for entry in found] == pytest.approx(expected, abs=1e-4)
    engine.shutdown()


def test_requests_of_low_priority_are_preempted(text_model: Path) -> None:
    """Those of high priority arrive last, finish first, and are never preempted."""
    engine = make_engine(text_model, **TIGHT, scheduling_policy="priority")
    for number in range(3):
        engine.add_request(f"low{number}", prompt_of(10, VOCAB, number), seeded(number), priority=5)
    for _ in range(5):
        engine.step()
    for number in range(2):
        engine.add_request(f"high{number}", prompt_of(10, VOCAB, number), seeded(number), priority=-1)
    finished = [output for output in drain(engine) if output.finished]
    assert {output.request_id for output in finished[:2]} == {"high0", "high1"}
    assert preemptions(engine) > 0
    tokens = {output.request_id: output.outputs[0].token_ids for output in finished}
    assert tokens["high0"] == tokens["low0"] and tokens["high1"] == tokens["low1"]
    engine.shutdown()


def test_one_request_fills_the_whole_cache(text_model: Path) -> None:
    """80 tokens of KV hold 40 of prompt and 40 of output."""
    engine = make_engine(text_model, **TIGHT)
    output = run_requests(engine, {"r": (prompt_of(40, VOCAB), SamplingParams(temperature=0, max_tokens=None))})["r"]
    other = run_requests(engine, {"r": (prompt_of(40, VOCAB), seeded(0, max_tokens=40))})["r"]
    assert len(other.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert engine.input_processor.max_model_len == 80
    engine.shutdown()


MODELS = {"llama": STORY} | {name: DRAFT.parent / f"story-{name}" for name in ("qwen3", "mistral", "draft")}
STORY_VOCAB = 2048
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    **UNTRAINED,
    **{name: paged_models.MODELS[name] for name in ("phi3-long", "granite-tied-biases", "smollm3-layers", "lfm2")},
}
"""Models that are not trained."""
LIMITS: dict[str, dict[str, int]] = {
    "roomy": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 256, "block_size": 8},
    # few blocks, few rows, small chunks: everything happens
    "tight": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 22, "block_size": 4},
}


class Way(NamedTuple):
    """One way to run."""

    runner: str
    async_scheduling: bool
    limits: str
    enable_chunked_prefill: bool = True
    method: str | None = None


def engine_of(model: Path, **options: Any) -> LLMEngine:
    return make_engine(model, dtype="float32", max_model_len=80, skip_tokenizer_init=True, **options)


def engine_in(way: Way, model: Path) -> LLMEngine:
    options: dict[str, Any] = {
        "model_runner": way.runner,
        "async_scheduling": way.async_scheduling,
        **LIMITS[way.limits],
    }
    if way.method is not None:
        options["speculative_config"] = {**METHODS[way.method], "adaptive": False}
    if not way.enable_chunked_prefill:
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}
    return engine_of(model, **options)


WAYS = [
    *(Way(runner, overlap, limits) for runner in ("v1", "v2") for overlap in (False, True) for limits in LIMITS),
    Way("v1", False, "tight", enable_chunked_prefill=False),
    Way("v2", True, "tight", enable_chunked_prefill=False),
]
PAIRS = [WAYS[index] for index in (0, 3, 5, 6, 8, 9)]
"""Any two of the settings meet in all of theirs."""
DRAFTING = [
    *(Way(runner, True, "tight", method=method) for runner in ("v1", "v2") for method in ("ngram", "eagle")),
    Way("v1", False, "tight", method="draft_model"),
    Way("v2", True, "tight", method="draft_model"),
    Way("v2", False, "tight", method="eagle"),
]
"""For the llama, for which there are drafters."""
TIGHT_WAYS = [WAYS[3], WAYS[7], DRAFTING[2]]
"""For models that are not trained."""


@pytest.fixture(scope="module", params=[*MODELS, *RANDOM], ids=str)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Way | None, LLMEngine]]:
    """An made_engine for each way, and under None the reference: V1, no prefix cache, one request at a time."""
    if request.param in RANDOM:
        model, (model_type, fields) = tmp_path_factory.mktemp(request.param), RANDOM[request.param]
        make_checkpoint(model, model_type, vocab_size=STORY_VOCAB, **fields)
        ways = TIGHT_WAYS
    else:
        model, ways = MODELS[request.param], WAYS + DRAFTING if request.param == "llama" else PAIRS
    made: dict[Way | None, LLMEngine] = {way: engine_in(way, model) for way in ways}
    made[None] = engine_of(model, model_runner="v1", enable_prefix_caching=False, max_num_seqs=1)
    yield made
    for made_engine in made.values():
        made_engine.shutdown()


def assert_every_way_agrees(engines: dict[Way | None, LLMEngine], seed: int) -> None:
    lives = random_lives(seed, STORY_VOCAB)
    expected = live_alone(engines[None], lives)
    for way, made_engine in engines.items():
        if way is not None:
            assert made_engine.runner_name == way.runner
            tolerance = 1e-5 if way.method is None else 1e-4
            assert_lives_agree(made_engine, lives, expected, f"seed {seed}, {way}", tolerance=tolerance)


def test_every_way_gives_the_same_tokens(engines: dict[Way | None, LLMEngine], request: pytest.FixtureRequest) -> None:
    """The first seed is one with which tight ways preempt, hit prefixes and accept drafts. Others are for trained
    models: the rest differ in their layers alone."""
    model = request.node.callspec.params["engines"]
    before = {way: engine.stats() for way, engine in engines.items()}
    assert_every_way_agrees(engines, 6)
    for way in (way for way in engines if way is not None and way.limits == "tight"):
        after = engines[way].stats()
        assert after.scheduler.num_preemptions > before[way].scheduler.num_preemptions
        has_states = engines[way].core.scheduler.config.groups[-1].is_state  # whose snapshots requests push out
        assert has_states or after.scheduler.prefix_cache_hits > before[way].scheduler.prefix_cache_hits
        assert way.method is None or after.drafts.num_drafted > before[way].drafts.num_drafted
        assert way.method in (None, "ngram") or after.drafts.num_accepted > before[way].drafts.num_accepted

    if model in MODELS:
        assert_every_way_agrees(engines, 7)
