"""Random schedules of requests under grammars: whatever the runner, overlap, drafts, blocks and ranks, each gets the
tokens that it gets alone, and its output fits."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engines import make_engine
from tests.helpers.runner_lives import METHODS, STORY
from tests.helpers.schedules import Life, assert_lives_agree, live_alone, random_params

from fleetfoot import CompletionOutput, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB = 2048
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"json": PERSON, "whitespace_pattern": "[ \n]{0,2}"},
    {"json": {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object"}},
    {"json": {"type": "array", "items": {"type": "string"}, "uniqueItems": False}},
    {"json_object": True},
    {"regex": r"[a-c]{2,9}-\d{3}"},
    {"regex": "(the |fox |and )*"},
    {"choice": ["positive", "negative", "no opinion"]},
    {"grammar": 'start: "(" WORD ("," WORD)~2 ")"\nWORD: /[a-z]{1,4}/'},
    {"grammar": 'root ::= "<" [0-9]+ ">" | "once upon a time"'},
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}},
    {"choice": ["left", "right"], "reasoning_end": "e"},
    {"json": PERSON, "reasoning_end": "</t>", "max_reasoning_tokens": 5, "reasoning_begin": "<t>"},
]


class Way(NamedTuple):
    """One way to run."""

    runner: str
    async_scheduling: bool = True
    method: str | None = None
    ranks: tuple[int, int] = (1, 1)
    """Of tensors and of the pipeline."""


WAYS = [
    Way("v1"),
    Way("v1", method="eagle"),
    Way("v1", async_scheduling=False, method="ngram"),
    Way("v2"),
    Way("v2", async_scheduling=False),
    Way("v2", method="ngram"),
    Way("v2", method="draft_model"),
    Way("v2", method="eagle"),
    Way("v2", async_scheduling=False, method="eagle"),
]
RANKS = [Way("v2", ranks=(2, 1), method="eagle"), Way("v2", ranks=(1, 2))]
TIGHT = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 22, "block_size": 4}
"""Few blocks, few rows, small chunks."""
SEED = 14
"""A schedule in which every engine preempts requests and finds blocks in its cache, and every method has drafts
accepted."""


def grammar_lives(seed: int) -> list[Life]:
    """Requests of which most have a grammar; they share beginnings, arrive over some steps, and some are aborted."""
    rng = random.Random(seed)
    base = [rng.randrange(6, VOCAB) for _ in range(30)]
    lives = []
    for number in range(rng.randint(2, 9)):
        shared, size = rng.randint(0, 20), rng.randint(1, 20)
        prompt = base[:shared] + [rng.randrange(6, VOCAB) for _ in range(size)]
        params, max_tokens = random_params(rng, VOCAB), rng.randint(1, 40)
        min_tokens = min(params.min_tokens, max_tokens)
        params = replace(params, detokenize=True, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None)
        if rng.random() < 0.2:
            params = replace(params, stop=["a", '",'], include_stop_str_in_output=rng.random() < 0.5)
        if params.temperature and rng.random() < 0.3:
            params = replace(params, n=2)
        if rng.random() < 0.85:
            allowed = params.allowed_token_ids
            constraint = StructuredOutputsParams(**rng.choice(CONSTRAINTS))
            params = replace(
                params,
                structured_outputs=constraint,
                allowed_token_ids=None if allowed is None else [1, *range(6, VOCAB, 2)],
            )
        abort_at = rng.choice([None, None, None, rng.randint(0, params.max_tokens or 0)])
        lives.append(Life(f"r{number}", prompt, params, rng.randint(0, 12), abort_at))
    return lives


def engine_of(**options: Any) -> LLMEngine:
    return make_engine(STORY, dtype="float32", max_model_len=80, **options)


def engine_in(way: Way) -> LLMEngine:
    options: dict[str, Any] = {"model_runner": way.runner, "async_scheduling": way.async_scheduling, **TIGHT}
    options |= dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), way.ranks, strict=True))
    if way.method is not None:
        options["speculative_config"] = {**METHODS[way.method], "adaptive": False}
    return engine_of(**options)


@pytest.fixture(scope="module")
def reference() -> Iterator[LLMEngine]:
    engine = engine_of(model_runner="v1", async_scheduling=False, enable_prefix_caching=False, max_num_seqs=2)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = Tokenizer.from_path(STORY)
    return GrammarCompiler(lambda: tokenizer, VOCAB, [1])


def assert_fits(params: SamplingParams, completion: CompletionOutput, grammars: GrammarCompiler) -> None:
    """An end token is where the grammar is met, and nowhere else; all other tokens are allowed."""
    constraint = params.structured_outputs
    if constraint is None:
        return
    tokens = list(completion.token_ids)
    has_end = bool(tokens) and tokens[-1] == 1
    state = grammars.start(constraint, min_tokens=0, ignore_eos=False)
    state.read(text_ids := tokens[:-1] if has_end else tokens)
    assert not state.has_begun or state.catch_up(text_ids) == ""
    if has_end:
        assert not state.has_begun or state.matcher.is_accepting()
    if completion.finish_reason == "stop" and completion.stop_reason is None:
        assert has_end or state.matcher.is_stopped()
    assert completion.finish_reason in ("stop", "length", "error")


Outputs = dict[str, RequestOutput]


def outputs_alone(seed: int, reference: LLMEngine, grammars: GrammarCompiler) -> Outputs:
    lives = grammar_lives(seed)
    expected = live_alone(reference, lives)
    for life in lives:
        for completion in expected[life.request_id].outputs:
            assert_fits(life.params, completion, grammars)
    return expected


@pytest.fixture(scope="module")
def expected(reference: LLMEngine, grammars: GrammarCompiler) -> Outputs:
    """For SEED."""
    return outputs_alone(SEED, reference, grammars)


def check(seed: int, expected: Outputs, engines: dict[Way, LLMEngine]) -> None:
    lives = grammar_lives(seed)
    for way, engine in engines.items():
        assert engine.runner_name == way.runner
        assert_lives_agree(engine, lives, expected, f"seed {seed}, {way}", tolerance=1e-4)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[Way, LLMEngine]]:
    made = {way: engine_in(way) for way in WAYS}
    yield made
    for engine in made.values():
        engine.shutdown()


def test_a_schedule(expected: Outputs, engines: dict[Way, LLMEngine]) -> None:
    before = {way: engine.stats() for way, engine in engines.items()}
    check(SEED, expected, engines)
    for way, engine in engines.items():
        stats, scheduler = engine.stats(), before[way].scheduler
        assert stats.scheduler.num_preemptions > scheduler.num_preemptions
        assert stats.scheduler.prefix_cache_hits > scheduler.prefix_cache_hits
        assert way.method is None or stats.drafts.num_accepted > before[way].drafts.num_accepted


def test_random_schedules(reference: LLMEngine, engines: dict[Way, LLMEngine], grammars: GrammarCompiler) -> None:
    @settings(max_examples=2, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        check(seed, outputs_alone(seed, reference, grammars), engines)

    run()


@pytest.mark.parametrize("way", RANKS, ids=str)
def test_schedules_of_ranks(way: Way, expected: Outputs) -> None:
    engine = engine_in(way)
    check(SEED, expected, {way: engine})
    engine.shutdown()
