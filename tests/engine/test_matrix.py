"""The promise of the same tokens: whatever the model, runner, steps, limits, drafts, KV connector, ranks and cache, a
request gets what it gets alone, from one process of Model Runner V1 without any of these, in float32. Any two of the
settings meet in all of their values. That the lone request gets the tokens of `transformers` is tested here too; what
each setting does besides is tested in its own file."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import shorten_story
from tests.helpers.checkpoints import UNTRAINED, reference_logits
from tests.helpers.engines import make_engine, make_text_checkpoint, prompt_of
from tests.helpers.faulty_connector import OFFLOADING, connector
from tests.helpers.kernels import cpu_kernels
from tests.helpers.paged_models import MODELS as PAGED
from tests.helpers.pairwise import Cell, Pair, pairwise
from tests.helpers.prefill_decode import settle
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import DRAFT, METHODS
from tests.helpers.schedules import Life, assert_lives_agree, grammar_lives, live_alone, random_lives, story_lives
from tests.helpers.second_tokens import make_mtp_checkpoint

from fleetfoot import LLM, CompletionOutput, LLMEngine, RequestOutput, SamplingParams
from fleetfoot.assets import embedded_eagle_path
from fleetfoot.native.loading import native_problem
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.v2 import runner as v2
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB = 2048
MAX_MODEL_LEN = 96
NUM_DRAFTS = 3
AXES = {
    "model": ("story", "mistral", "gemma3", "qwen3-next", "gpt-oss"),
    "runner": ("v1", "v2"),
    "steps": ("lockstep", "overlapped", "graphs"),
    "limits": ("roomy", "tight", "within a block", "whole prompts"),
    "drafts": ("none", "ngram", "draft model", "eagle", "mtp"),
    "store": ("none", "host", "little host", "files"),
    "ranks": ("one", "tensor", "pipeline"),
    "caching": ("on", "off", "reset"),
    "requests": ("parameters", "stories", "grammars"),
}


def can_meet(pair: Pair) -> bool:
    (axis, value), (_, other) = pair
    match axis, value, other:
        case "model", _, "draft model" | "eagle":
            return value == "story"
        case "model", _, "mtp":
            return value == "qwen3-next"
        case "model", _, "stories":
            return value in ("story", "mistral")  # which have learned to tell them
        case "model", "mistral", "tensor":  # three heads
            return False
        case "drafts", "mtp", "pipeline" | "stories":  # it reads the embedding, and its model is not trained
            return False
        case "runner", "v1", "graphs":
            return False
        case "steps", "graphs", "tensor" | "pipeline":  # devices of other processes are their own
            return False
        case "ranks", "tensor" | "pipeline", "stories":  # whose many steps take ranks many messages
            return False
    return True


def cost(cell: Cell) -> float:
    return (3 if cell["ranks"] != "one" else 1) * (2 if cell["requests"] == "stories" else 1)


CELLS = pairwise(AXES, can_meet, cost, seed=7)
CELLS += [
    CELLS[0]
    | {"model": "story", "runner": "v2", "steps": "overlapped", "limits": "tight", "drafts": "eagle"}
    | {"store": "host", "ranks": "both", "requests": "parameters"}
]
LIMITS: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 8},
    # few blocks, few rows, small chunks, priorities: everything happens
    "tight": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4, "scheduling_policy": "priority"},
    "within a block": {"max_num_seqs": 3, "max_num_batched_tokens": 12, "block_size": 16},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128, "block_size": 4},
}
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": METHODS["ngram"],
    "draft model": METHODS["draft_model"],
    "eagle": METHODS["eagle"] | {"model": str(embedded_eagle_path())},
    "mtp": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS},
}
RANKS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
NUM_BLOCKS = {"gemma3": (15, 400), "qwen3-next": (6, 60)}
"""Slabs where KV is short, and elsewhere. Other models have 24 and 256 blocks."""
Outputs = dict[str, RequestOutput]


class Models:
    """Folders of models, and what their requests get alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = cache(self._write)
        self.lives = cache(self._lives)
        self.expected = cache(self._expected)
        self.reference: dict[str, Any] = {}
        """Models of ``transformers``, once their folder is written."""

    def _write(self, name: str) -> Path:
        if name == "mistral":
            return DRAFT.parent / "story-mistral"
        (folder := self._folder / name).mkdir()
        if name == "story":
            shorten_story(folder, (0, 1, 6, 7))  # of which drafters foresee as much as of all eight layers
        elif name == "qwen3-next":
            fields = {**PAGED[name][1], "mlp_only_layers": [], "vocab_size": VOCAB, "max_position_embeddings": 512}
            self.reference[name], _ = make_mtp_checkpoint(folder, **fields)
        else:
            kind, fields = UNTRAINED[name] if name in UNTRAINED else PAGED[name]
            self.reference[name] = make_text_checkpoint(folder, kind, **{**fields, "num_hidden_layers": 3})
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((DRAFT / file).read_bytes())
        return folder

    def engine(self, name: str, **settings: Any) -> LLMEngine:
        return make_engine(self.folder(name), dtype="float32", max_model_len=MAX_MODEL_LEN, **settings)

    def alone(self, name: str, lives: list[Life]) -> Outputs:
        engine = self.engine(name, model_runner="v1", enable_prefix_caching=False, max_num_seqs=3)
        outputs = live_alone(engine, lives)
        engine.shutdown()
        return outputs

    def _lives(self, name: str, requests: str) -> list[Life]:
        if requests == "grammars":
            return grammar_lives(14, VOCAB)
        if requests == "stories":
            make = partial(story_lives, Tokenizer.from_path(self.folder(name)), MAX_MODEL_LEN)
            (greedy,) = self.alone(name, make("none")[:1]).values()
            return make(greedy.outputs[0].text[61:67] or "?")
        lives = random_lives(6, VOCAB)
        lives[0].prompt[:] = [40, 50, 60] * 5  # which n-grams foresee
        return lives

    def _expected(self, name: str, requests: str) -> Outputs:
        return self.alone(name, self.lives(name, requests))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = Tokenizer.from_path(DRAFT)
    return GrammarCompiler(lambda: tokenizer, VOCAB, [1])


def transfer_config(store: str, folder: Path) -> dict[str, Any] | None:
    files = connector("SharedStorageConnector", shared_storage_path=str(folder))
    little = connector("OffloadingConnector", num_cpu_blocks=20)
    return {"none": None, "host": OFFLOADING, "little host": little, "files": files}[store]


def start(models: Models, cell: Cell, folder: Path) -> LLMEngine:
    few, many = NUM_BLOCKS.get(cell["model"], (24, 256))
    drafts = DRAFTS[cell["drafts"]]
    return models.engine(
        cell["model"],
        model_runner=cell["runner"],
        async_scheduling=cell["steps"] == "overlapped",
        num_gpu_blocks_override=few if cell["limits"] == "tight" else many,
        speculative_config=None if drafts is None else {**drafts, "adaptive": False},
        kv_transfer_config=transfer_config(cell["store"], folder),
        enable_prefix_caching=cell["caching"] != "off",
        **{"max_num_seqs": 8, **LIMITS[cell["limits"]]},
        **RANKS[cell["ranks"]],
    )


def poison(engine: LLMEngine) -> None:
    """NaN in every block that is not in use and has no cached prefix: nothing may be read that was not written."""
    pools, runner, layout = engine.core.scheduler.pools, engine.core.executor.runner, engine.core.executor.layout
    for group, pool in enumerate(pools.all):
        free = [block for block in pool._plain_blocks() if pool.state(block) == "FREE" and block >= pool._first]
        owned = {block // pool.size for block in free} & pool._plain_of.keys() if hasattr(pool, "size") else None
        blocks = [block for block in free if owned is None or block // pool.size in owned]
        for layer, kv_cache in enumerate(runner._kv_caches):
            if layout.group_of_layers[layer] == group:
                kv_cache[blocks] = float("nan")


def between_steps(engine: LLMEngine, cell: Cell) -> Callable[[], None]:
    """What happens before each step."""
    is_exposed = cell["ranks"] == "one" and cell["steps"] != "overlapped"
    count = 0

    def disturb() -> None:
        nonlocal count
        count += 1
        if cell["caching"] == "reset" and count % 7 == 0:
            engine.reset_prefix_cache()
        if is_exposed and not engine.core.scheduler.transfers.connector.has_pending:  # else they are still read
            poison(engine)

    return disturb


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


def play_graphs(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    """Steps of the next engine of Model Runner V2 are graphs, which a device plays by running their work again."""
    device = RecordingDevice(has_graphs=True)
    monkeypatch.setattr(v2, "open_device", lambda *_: device)
    monkeypatch.setattr(type(cpu_kernels().attention), "is_capturable", True)
    of = CaptureTable.of
    monkeypatch.setattr(CaptureTable, "of", lambda **fields: of(**{**fields, "device": "cuda"}))
    return device


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: ", ".join(cell.values()))
def test_tokens_are_those_alone(cell: Cell, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives, expected = (find(cell["model"], cell["requests"]) for find in (models.lives, models.expected))
    device = play_graphs(monkeypatch) if cell["steps"] == "graphs" else None
    if cell["limits"] == "tight":
        lives = [replace(life, priority=number % 3) for number, life in enumerate(lives)]
    engine = start(models, cell, tmp_path)
    try:
        assert engine.runner_name == cell["runner"]
        disturb = between_steps(engine, cell)
        assert_lives_agree(engine, lives, expected, before_step=disturb, tolerance=1e-4, ties=False)
        stats = engine.stats()
        assert (stats.drafts.num_drafted > 0) == (cell["drafts"] != "none")
        if cell["limits"] == "tight" and cell["model"] == "story" and cell["ranks"] == "one":
            assert stats.scheduler.num_preemptions > 0 or cell["requests"] == "grammars"
        if cell["store"] != "none":  # once more, with much of the KV loaded; an engine's own seeds go on
            settle(engine)
            engine.reset_prefix_cache()
            again = [life for life in lives if life.request_id != "own-seed"]
            assert_lives_agree(engine, again, expected, before_step=disturb, tolerance=1e-4, ties=False)
            settle(engine)
            assert engine.stats().transfers.loads_failed == 0
            # a prompt that is not divided leaves no state at the end of a block
            may_load_nothing = cell["limits"] == "whole prompts" and cell["model"] == "qwen3-next"
            assert engine.stats().transfers.tokens_loaded > 0 or may_load_nothing or cell["store"] == "little host"
        assert device is None or device.counts["replay"] > 5
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "gpt-oss"])
def test_alone_they_are_those_of_transformers(name: str, models: Models) -> None:
    models.folder(name)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    lives = [Life(str(length), prompt_of(length, VOCAB, seed=length), params) for length in (1, 13, 37)]
    for life in lives:
        (output,) = models.alone(name, [life])[life.request_id].outputs
        tokens = [*life.prompt, *output.token_ids]
        logits = reference_logits(models.reference[name], tokens)[len(life.prompt) - 1 : -1]
        assert output.token_ids == logits.argmax(-1).tolist()


def test_requests_with_grammars_fit(models: Models, grammars: GrammarCompiler) -> None:
    expected = models.expected("story", "grammars")
    for life in models.lives("story", "grammars"):
        for completion in expected[life.request_id].outputs:
            assert_fits(life.params, completion, grammars)


def test_the_stories_mean_something(models: Models) -> None:
    expected = models.expected("story", "stories")
    last = {name: output.outputs[0] for name, output in expected.items()}
    greedy, tokens = last["greedy"].token_ids, {name: completion.token_ids for name, completion in last.items()}
    for name in ("stop-string", "stop-included"):
        assert last[name].finish_reason == "stop"
        assert 8 < len(tokens[name]) < len(greedy)
    assert [last[name].finish_reason for name in ("stop-token", "min-tokens", "stop-late")] == ["stop"] * 3
    assert len(tokens["min-tokens"]) > 10 and len(tokens["stop-late"]) > 9
    assert 1 < len(tokens["stop-token"]) < 24
    assert [len(tokens[name]) for name in ("last", "last-two", "last-few")] == [1, 2, 7]
    assert len(tokens["to-the-end"]) == 56
    assert len({tuple(copy.token_ids) for copy in expected["copies"].outputs}) == 3
    assert tokens["bias"] != tokens["random"][:24]
    assert tokens["allowed"] != greedy[:24]
    assert tokens["penalties"] != tokens["greedy-delta"] != tokens["bad-words"]


def test_in_bfloat16_every_path_agrees() -> None:
    """A request's tokens may not depend on company, cache or chunks."""
    if native_problem():
        pytest.skip("plain torch rounds bfloat16 in ways that depend on the batch")
    texts = ["Once upon a time", "The fox said", "In the wood there lived a badger who had lost a lantern", "She"]
    seeded: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(temperature=0.7 * (seed % 2), seed=seed, **seeded) for seed in range(len(texts))]

    def tokens(alone: bool = False, **keywords: Any) -> list[list[int]]:
        with LLM(device="cpu", dtype="bfloat16", **{"max_num_seqs": 4, **keywords}) as llm:
            if alone:
                outputs = [llm.generate(*pair, use_tqdm=False)[0] for pair in zip(texts, params, strict=True)]
            else:
                outputs = llm.generate(texts, params, use_tqdm=False)
            assert (llm.stats().scheduler.num_preemptions > 0) == ("num_gpu_blocks_override" in keywords)
            return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(alone=True)
    assert tokens() == expected
    assert tokens(max_num_batched_tokens=5) == expected
    assert tokens(num_gpu_blocks_override=10, enable_prefix_caching=False) == expected
