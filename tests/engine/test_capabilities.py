"""Each line of the runners' capabilities, held against a tiny model: what is declared runs, what is not is refused.

The tests are made from the tables. A newly declared feature has to be in the matrix, or to be given a case here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.test_matrix import CELLS
from tests.helpers import engines
from tests.helpers.checkpoints import QUANTIZED, QUANTIZED_TOKENS, reference_logits
from tests.helpers.engines import TEXT_MODEL, make_engine, prompt_of, run_requests
from tests.helpers.faulty_connector import connector
from tests.helpers.pairwise import Cell

from fleetfoot import LLMEngine, PoolingParams, SamplingParams
from fleetfoot.config.json_fields import ConfigError
from fleetfoot.outputs import CompletionOutput
from fleetfoot.plan.oracle import UnsupportedFeatureError
from fleetfoot.records.kv_layout import ARENA
from fleetfoot.runner.capabilities import CAPABILITIES, KV_LAYOUTS, Feature

DECLARED, REFUSED = (
    [
        pytest.param(runner, feature, id=f"{runner}-{feature.name}")
        for runner, declared in CAPABILITIES.items()
        for feature, why_not in declared.items()
        if (why_not == "") == is_supported
    ]
    for is_supported in (True, False)
)
VOCAB = TEXT_MODEL["vocab_size"]
PROMPT = prompt_of(21, VOCAB, seed=1)
PROMPTS = [PROMPT, *(prompt_of(length, VOCAB, seed=length) for length in (3, 9, 30, 34))]
NUM_TOKENS = 10


@dataclass(frozen=True)
class Subject:
    """A runner to try, with a tiny model and the same model in `transformers`."""

    runner: str
    folder: Path
    reference: Any
    tmp_path: Path
    known: dict[tuple[int, ...], list[int]]
    """Greedy tokens of the reference, by prompt."""

    def engine(self, folder: Path | None = None, **settings: Any) -> LLMEngine:
        made = make_engine(folder or self.folder, model_runner=self.runner, dtype="float32", **settings)
        assert made.runner_name == self.runner  # what really runs
        return made

    def expected(self, prompt: list[int]) -> list[int]:
        """Greedy tokens of the reference."""
        key = tuple(prompt)
        if key not in self.known:
            self.known[key] = greedy(self.reference, prompt)
        return self.known[key]

    def check(self, engine: LLMEngine, params: SamplingParams | None = None) -> None:
        """PROMPTS have the greedy tokens of the reference."""
        tokens = [output.token_ids for output in run_all(engine, PROMPTS, params or make_params())]
        assert tokens == [self.expected(prompt) for prompt in PROMPTS]


def run_all(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[CompletionOutput]:
    outputs = run_requests(engine, {str(i): (prompt, params) for i, prompt in enumerate(prompts)})
    return [outputs[str(i)].outputs[0] for i in range(len(prompts))]


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        output.append(int(reference_logits(reference, prompt + output)[-1].argmax()))
    return output


def make_params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def subjects(text_checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    known: dict[tuple[int, ...], list[int]] = {}
    return {name: Subject(name, *text_checkpoint, tmp_path_factory.mktemp(name), known) for name in CAPABILITIES}


def quantized_weights(subject: Subject, name: str = "fp8-channel-weights") -> None:
    folder = QUANTIZED / name
    engine = subject.engine(folder, skip_tokenizer_init=True)
    prompts = [QUANTIZED_TOKENS[:length] for length in (1, 4, 8)]
    tokens = [output.token_ids for output in run_all(engine, prompts, make_params(max_tokens=1))]
    logits = load_file(folder / "reference.safetensors")["logits"]  # [tokens, vocab]
    assert tokens == [[int(logits[len(prompt) - 1].argmax())] for prompt in prompts]


weights_without_kernels = partial(quantized_weights, name="fp8-narrow-blocks")


def pooling(subject: Subject) -> None:
    """The last hidden state of each prompt, as a vector of length 1."""
    engine = subject.engine(runner="pooling")
    outputs: dict[str, Any] = run_requests(engine, {str(len(ids)): (ids, PoolingParams()) for ids in PROMPTS})
    for prompt in PROMPTS:
        with torch.no_grad():
            state = subject.reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        vector = outputs[str(len(prompt))].outputs.data
        torch.testing.assert_close(vector, state / state.norm(), rtol=1e-4, atol=1e-5)


def live_weights(subject: Subject) -> None:
    """Random weights, and then those of the checkpoint."""
    engine = subject.engine(load_format="dummy")
    run_all(engine, PROMPTS, make_params())
    assert engine.reload_weights(subject.folder) == 1
    subject.check(engine)


def logits_processors(subject: Subject) -> None:
    """One that leaves a single token, in a request's own parameters."""
    engine = subject.engine()
    only_9 = make_params(logits_processors=[lambda _, logits: logits.index_fill(0, torch.tensor([9]), 1e9)])
    assert [output.token_ids for output in run_all(engine, PROMPTS, only_9)] == [[9] * NUM_TOKENS] * len(PROMPTS)
    subject.check(engine)


def sleep(subject: Subject) -> None:
    engine = subject.engine(enable_sleep_mode=True)
    for level in (1, 2):
        subject.check(engine)
        engine.sleep(level)
        assert engine.is_sleeping()
        engine.wake_up()
    subject.check(engine)


MATRIX: dict[Feature, Cell] = {
    Feature.MIXTURE_OF_EXPERTS: {"model": "gpt-oss"},
    Feature.HYBRID_LAYERS: {"model": "qwen3-next"},
    Feature.SLIDING_WINDOW: {"model": "mistral"},
    Feature.GRAPHS: {"steps": "graphs"},
    Feature.ASYNC_SCHEDULING: {"steps": "overlapped"},
    Feature.TENSOR_PARALLELISM: {"ranks": "tensor"},
    Feature.PIPELINE_PARALLELISM: {"ranks": "pipeline"},
    Feature.SPECULATIVE_NGRAM: {"drafts": "ngram"},
    Feature.SPECULATIVE_DRAFT_MODEL: {"drafts": "draft model"},
    Feature.SPECULATIVE_EAGLE: {"drafts": "eagle"},
    Feature.CHUNKED_PREFILL: {"limits": "within a block"},
    Feature.PREFIX_CACHING: {"caching": "on"},
    Feature.PREEMPTION: {"limits": "tight"},
    Feature.PRIORITY_SCHEDULING: {"limits": "tight"},
    Feature.KV_CONNECTOR: {"store": "files"},
    Feature.KV_OFFLOADING: {"store": "host"},
    Feature.STRUCTURED_OUTPUTS: {"requests": "grammars"},
    Feature.SAMPLING: {"requests": "stories"},
    Feature.PENALTIES: {"requests": "stories"},
    Feature.LOGIT_BIAS: {"requests": "stories"},
    Feature.BAD_WORDS: {"requests": "stories"},
    Feature.LOGPROBS: {"requests": "stories"},
    Feature.PROMPT_LOGPROBS: {"requests": "stories"},
}
"""Features that cells of the matrix have, by what these cells have in common."""
CASES: dict[Feature, Callable[[Subject], None]] = {
    feature: globals()[feature.name.lower()] for feature in Feature if feature.name.lower() in globals()
}
ELSEWHERE = {Feature.TORCH_COMPILE: "test_torch_compile.py"}


@pytest.mark.parametrize(("runner", "feature"), DECLARED)
def test_what_is_declared_runs(runner: str, feature: Feature, subjects: dict[str, Subject]) -> None:
    if feature in MATRIX:
        wanted = MATRIX[feature].items() | {("runner", runner)}
        assert any(wanted <= cell.items() for cell in CELLS)
    elif feature in CASES:
        CASES[feature](subjects[runner])
    else:
        assert (Path(__file__).parent / ELSEWHERE[feature]).is_file()


@pytest.mark.parametrize(("runner", "layout"), [(name, kept) for name, kinds in KV_LAYOUTS.items() for kept in kinds])
def test_declared_layouts_of_the_kv_cache(runner: str, layout: str, subjects: dict[str, Subject]) -> None:
    """The runner keeps what a connector accepts; a second engine computes with KV of the first one."""
    subject = subjects[runner]
    folder = str(subject.tmp_path / layout)
    config = connector("EitherExample", "tests.helpers.vllm_connector", shared_storage_path=folder, layout=layout)
    if layout == ARENA:  # which classes of vLLM's do not know
        config = connector("SharedStorageConnector", shared_storage_path=folder)
    for num_cached in (0, 20):
        engine = subject.engine(block_size=4, kv_transfer_config=config)
        assert engine.core.executor.layout.name == engine.plan.kv_layout == layout
        output = run_requests(engine, {"r": (PROMPT, make_params())})["r"]
        assert output.outputs[0].token_ids == subject.expected(PROMPT)
        assert output.num_cached_tokens == num_cached
        engine.shutdown()


SETTINGS: dict[Feature, dict[str, Any]] = {
    Feature.POOLING: {"runner": "pooling"},
    Feature.TORCH_COMPILE: {"compilation_config": {"mode": 1}},
    Feature.LOGITS_PROCESSORS: {"logits_processors": ["fleetfoot.sampling.custom_processors:LogitsProcessor"]},
    Feature.PREFILL_CONTEXT_PARALLELISM: {"prefill_context_parallel_size": 2},
    Feature.PROMPT_EMBEDDINGS: {"enable_prompt_embeds": True},
    Feature.LORA: {"enable_lora": True},
}
"""Features that settings require."""

MODELS: dict[Feature, dict[str, Any]] = {
    Feature.OTHER_LAYERS: {"architectures": ["JambaForCausalLM"], "mamba_d_state": 16},
}
"""Features that a model requires, by fields of its config.json."""

CHECKPOINTS = {Feature.WEIGHTS_WITHOUT_KERNELS: QUANTIZED / "fp8-narrow-blocks"}
"""Features that a checkpoint requires which other runners load."""


@pytest.mark.parametrize(("runner", "feature"), REFUSED)
def test_what_is_not_declared_is_refused(runner: str, feature: Feature, text_model: Path, tmp_path: Path) -> None:
    if feature is Feature.GRAPHS:  # no setting demands them: the plan has none
        assert make_engine(text_model, model_runner=runner).plan.capture_table.graphs == ()
        return
    assert any(feature in table for table in (SETTINGS, MODELS, CHECKPOINTS)), f"nothing here needs {feature}"
    if feature in CHECKPOINTS:
        with pytest.raises(UnsupportedFeatureError, match=feature.value):
            make_engine(CHECKPOINTS[feature], model_runner=runner, skip_tokenizer_init=True)
    if feature in SETTINGS:
        with pytest.raises(UnsupportedFeatureError) as caught:
            make_engine(text_model, model_runner=runner, **SETTINGS[feature])
        why = CAPABILITIES[runner][feature]
        no_runner = all(declared[feature] for declared in CAPABILITIES.values())
        which = "no model runner supports" if no_runner else "it does not support"
        parts = (f"{which} what is on:", f"- {feature.value} (", why)
        assert all(part in str(caught.value) for part in parts)
    if feature in MODELS:
        content = json.loads((text_model / "config.json").read_text()) | MODELS[feature]
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=str(tmp_path)):
            make_engine(tmp_path, model_runner=runner)


def test_what_v2_lacks_and_v1_has_is_one_warning_and_v1(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for feature in (Feature.PREFIX_CACHING, Feature.CHUNKED_PREFILL):
        monkeypatch.setitem(CAPABILITIES["v2"], feature, "Not today.")
    monkeypatch.delenv("FLEETFOOT_USE_V2_MODEL_RUNNER", raising=False)
    engine = make_engine(text_model)
    assert (engine.runner_name, engine.plan.runner, engine.plan.explicit) == ("v1", "v1", False)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "prefix caching" in warning and "chunked prefill" in warning
    assert make_engine(text_model, enable_prefix_caching=False, enable_chunked_prefill=False).runner_name == "v2"


def test_an_engine_put_together_by_hand_has_no_plan() -> None:
    with pytest.raises(ValueError, match="put together from parts: there is no plan"):
        _ = engines.scripted_engine(engines.ScriptedExecutor()).plan


def test_there_is_no_case_for_what_no_runner_declares() -> None:
    assert {*CASES, *MATRIX, *ELSEWHERE} == {feature for param in DECLARED for feature in param.values[1:]}
