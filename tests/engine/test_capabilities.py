"""Each line of the runners' capabilities, held against a tiny model: what is declared runs, what is not is refused.

The tests are made from the tables. A feature that is newly declared has to be given a case here.
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
from tests.helpers import engines
from tests.helpers.checkpoints import QUANTIZED, QUANTIZED_TOKENS, make_checkpoint, reference_logits
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of, run_requests
from tests.helpers.faulty_connector import connector
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import in_one_runner, live, make_runner, make_scheduler

from fleetfoot import LLM, LLMEngine, PoolingParams, SamplingParams, StructuredOutputsParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.config.json_fields import ConfigError
from fleetfoot.executor.multiprocess import MultiprocessExecutor
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
TELL = [0, 587, 349, 286, 264, 1008]  # to the embedded model: Once there was a fox
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


def sliding_window(subject: Subject) -> None:
    window, whole = (
        make_checkpoint(subject.tmp_path / str(size), "mistral", **{**TEXT_MODEL, "sliding_window": size})
        for size in (8, None)
    )
    engine = subject.engine(subject.tmp_path / "8", skip_tokenizer_init=True)
    tokens = [output.token_ids for output in run_all(engine, PROMPTS, make_params())]
    assert tokens == [greedy(window, prompt) for prompt in PROMPTS]
    assert greedy(whole, PROMPT) != tokens[0]  # the window counts


def hybrid_layers(subject: Subject) -> None:
    folder, layer_types = subject.tmp_path / "states", ["conv", "full_attention"]
    model = make_checkpoint(folder, "lfm2", **TEXT_MODEL, layer_types=layer_types, block_multiple_of=8)
    engine = subject.engine(folder, skip_tokenizer_init=True)
    tokens = [output.token_ids for output in run_all(engine, PROMPTS, make_params())]
    assert tokens == [greedy(model, prompt) for prompt in PROMPTS]


def mixture_of_experts(subject: Subject) -> None:
    folder = subject.tmp_path / "experts"
    experts = make_checkpoint(folder, "mixtral", **TEXT_MODEL, num_local_experts=6, num_experts_per_tok=2)
    engine = subject.engine(folder, skip_tokenizer_init=True)
    tokens = [output.token_ids for output in run_all(engine, PROMPTS, make_params())]
    assert tokens == [greedy(experts, prompt) for prompt in PROMPTS]


def graphs(subject: Subject) -> None:
    """A device that plays graphs by running their work again: the tokens are those of eager steps."""
    assert subject.runner == "v2"
    for device in (RecordingDevice(), RecordingDevice(has_graphs=True)):
        runner = make_runner("v2", device=device, folder=subject.folder)
        runner.warm_up()
        device.counts.clear()
        lives = live(in_one_runner(runner), [make_params()], scheduler=make_scheduler(), prompts=[PROMPT])
        assert lives["r0"].token_ids == [*PROMPT, *subject.expected(PROMPT)]
        assert (device.counts["replay"] >= NUM_TOKENS) == device.has_graphs


def async_scheduling(subject: Subject) -> None:
    engine = subject.engine(async_scheduling=True)
    assert engine.plan.async_scheduling
    expected = [subject.expected(prompt) for prompt in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, make_params(stop_token_ids=[expected[0][4]]))
    assert engine.step() == []  # the second step is queued before the tokens of the first are processed
    outputs = {output.request_id: output.outputs[0].token_ids for output in drain(engine) if output.finished}
    assert outputs["0"] == expected[0][:5]  # tokens beyond the stop are dropped
    for number, tokens in enumerate(expected):
        assert outputs[str(number)] == tokens[: len(outputs[str(number)])]


def quantized_weights(subject: Subject, name: str = "fp8-channel-weights") -> None:
    folder = QUANTIZED / name
    engine = subject.engine(folder, skip_tokenizer_init=True)
    prompts = [QUANTIZED_TOKENS[:length] for length in (1, 4, 8)]
    tokens = [output.token_ids for output in run_all(engine, prompts, make_params(max_tokens=1))]
    logits = load_file(folder / "reference.safetensors")["logits"]  # [tokens, vocab]
    assert tokens == [[int(logits[len(prompt) - 1].argmax())] for prompt in prompts]


weights_without_kernels = partial(quantized_weights, name="fp8-narrow-blocks")


def chunked_prefill(subject: Subject) -> None:
    chunks = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    for settings, steps in ((chunks, [8, 8, 5]), ({"enable_chunked_prefill": False, "max_model_len": 64}, [21, 1])):
        engine = subject.engine(**settings)
        assert run_all(engine, [PROMPT], make_params())[0].token_ids == subject.expected(PROMPT)
        assert [step.num_tokens for step in engine.stats_collector.steps][: len(steps)] == steps


def prefix_caching(subject: Subject) -> None:
    engine, prompt = subject.engine(block_size=4), PROMPT
    for num_cached in (0, 24):
        output = run_requests(engine, {"r": (prompt, make_params())})["r"]
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (num_cached, subject.expected(prompt))
        prompt = prompt + output.outputs[0].token_ids[:5]


def preemption(subject: Subject) -> None:
    engine = subject.engine(num_gpu_blocks_override=20, block_size=4)
    subject.check(engine)
    assert engine.stats().scheduler.num_preemptions > 0


def priority_scheduling(subject: Subject) -> None:
    engine = subject.engine(scheduling_policy="priority", max_num_seqs=1)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, make_params(), priority=-number)
    finished = [output for output in drain(engine) if output.finished]
    assert [output.request_id for output in finished] == ["4", "3", "2", "1", "0"]
    assert [output.outputs[0].token_ids for output in finished] == [subject.expected(p) for p in PROMPTS[::-1]]


def sampling(subject: Subject) -> None:
    filters: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9}]
    seeded = [{"temperature": 1.3, "seed": seed, **more} for more in filters for seed in (1, 2)]
    outputs = sampled(subject, *(make_params(**params) for params in seeded))
    assert all(output != other for i, output in enumerate(outputs) for other in outputs[:i])
    subject.check(subject.engine(), make_params(temperature=2.0, top_k=1, seed=3))


def sampled(subject: Subject, *requests: SamplingParams) -> list[list[list[int]]]:
    """For each of ``requests`` the tokens of PROMPTS, which are not the greedy ones. What they should be is in
    test_sampling_features.py, and that they are those of both runners in test_random_requests.py."""
    engine = subject.engine(max_num_batched_tokens=16)
    tokens = [[output.token_ids for output in run_all(engine, PROMPTS, params)] for params in requests]
    engine.shutdown()
    assert [subject.expected(prompt) for prompt in PROMPTS] not in tokens
    return tokens


def penalties(subject: Subject) -> None:
    few = {"allowed_token_ids": [PROMPT[3], PROMPT[9], 90, 1000]}  # so few that tokens come again, of the prompt too
    penalized = make_params(**few, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=1.1)
    plain, changed = sampled(subject, make_params(**few), penalized)
    assert plain != changed


def logit_bias(subject: Subject) -> None:
    plain = subject.expected(PROMPT)
    allowed = [5, 90, 1000]
    params = [make_params(logit_bias={plain[1]: -5.0, 77: 2.0}), make_params(allowed_token_ids=allowed)]
    biased, restricted = sampled(subject, *params)
    assert biased[0][1] != plain[1] and {token for tokens in restricted for token in tokens} <= set(allowed)


def bad_words(subject: Subject) -> None:
    plain, tokenizer = subject.expected(PROMPT), subject.engine().tokenizer
    assert tokenizer is not None
    word, stops = tokenizer.decode([plain[2]]), {"stop_token_ids": [plain[1]], "ignore_eos": False}
    assert tokenizer.encode(word, add_special_tokens=False) == [plain[2]]
    params = [make_params(bad_words=[word]), make_params(**stops), make_params(**stops, min_tokens=6)]
    banned, early, late = sampled(subject, *params)
    assert banned[0][:2] == plain[:2] and plain[2] not in banned[0]
    assert early[0] == plain[:2]
    assert len(late[0]) >= 6 and plain[1] not in late[0][:5]


def structured_outputs(subject: Subject) -> None:
    choices, params = ["left", "right", "up"], make_params(ignore_eos=False)
    params.structured_outputs = StructuredOutputsParams(choice=choices)
    engine = subject.engine()
    assert {output.text for output in run_all(engine, PROMPTS, params)} <= {*choices}
    assert engine.tokenizer is not None
    beginnings = [text[:size] for text in choices for size in range(1, 1 + len(text))]
    allowed = {engine.tokenizer.get_vocab().get(text) for text in beginnings} - {None}
    logits = reference_logits(subject.reference, PROMPT)[-1]
    (output,) = run_all(engine, [PROMPT], params)
    assert output.token_ids[0] == max(allowed, key=lambda token: float(logits[token]))


def logprobs(subject: Subject) -> None:
    """Of the prompt, in chunks, and of the output, with ranks."""
    engine = subject.engine(max_num_batched_tokens=16)
    output = run_requests(engine, {"r": (PROMPT, make_params(logprobs=4, prompt_logprobs=3))})["r"]
    tokens = PROMPT + output.outputs[0].token_ids
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    expected = reference_logits(subject.reference, tokens).log_softmax(-1)[:-1]
    for place, (entry, token, chances) in enumerate(zip(entries, tokens[1:], expected, strict=True), start=1):
        order = chances.argsort(descending=True).tolist()
        assert entry is not None and entry.keys() == {token, *order[: 3 if place < len(PROMPT) else 4]}
        for known, logprob in entry.items():
            assert order[logprob.rank - 1] == known
            assert logprob.logprob == pytest.approx(chances[known].item(), abs=1e-4)


prompt_logprobs = logprobs


def draft_model(subject: Subject) -> None:
    """The model drafts for itself, and is right but for what it proposes behind the end."""
    engine = subject.engine(speculative_config={"model": str(subject.folder), "num_speculative_tokens": 3})
    subject.check(engine)
    drafts = engine.stats().scheduler.drafts
    assert drafts.num_rows == len(PROMPTS) * -(-(NUM_TOKENS - 1) // 4)
    assert drafts.num_accepted == len(PROMPTS) * (NUM_TOKENS - 1) - drafts.num_rows


def eagle(subject: Subject) -> None:
    """The embedded model with its head."""
    requests = {str(seed): ([*TELL, seed], make_params(temperature=seed % 2, seed=seed)) for seed in range(4, 10)}
    texts = []
    for drafts in (None, {"method": "eagle", "num_speculative_tokens": 3}):
        engine = subject.engine(embedded_model_path(), speculative_config=drafts)
        texts.append({name: output.outputs[0].token_ids for name, output in run_requests(engine, requests).items()})
    assert texts[0] == texts[1]
    assert engine.stats().scheduler.drafts.num_accepted > 0


def ngram(subject: Subject) -> None:
    """A prompt that repeats itself, and an output that must: one token is allowed."""
    engine = subject.engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    outputs = run_all(engine, [[PROMPT[0]] * 9, PROMPT], make_params(allowed_token_ids=[PROMPT[0]]))
    assert [output.token_ids for output in outputs] == [[PROMPT[0]] * NUM_TOKENS] * 2
    assert engine.stats().scheduler.drafts.num_accepted > NUM_TOKENS // 2
    subject.check(engine)


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


def torch_compile(subject: Subject) -> None:
    subject.check(subject.engine(compilation_config={"mode": 1}))


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


def in_processes(subject: Subject, **sizes: int) -> None:
    engine = subject.engine(**sizes)
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor) and len(executor._processes.by_rank) == 2
    subject.check(engine)
    engine.shutdown()


def kv_connector(subject: Subject) -> None:
    """What one engine has computed, another one reads from files."""
    extra = {"shared_storage_path": str(subject.tmp_path / "kv")}
    config = {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    assert_loaded(subject, engines=2, kv_transfer_config=config)


def assert_loaded(subject: Subject, *, engines: int, **settings: Any) -> None:
    """Run the same prompt twice, in one engine or two: tokens come by a connector the second time."""
    engine = subject.engine(block_size=4, **settings)
    for turn in range(2):
        outputs = run_requests(engine, {"r": (PROMPT, make_params())})
        assert outputs["r"].outputs[0].token_ids == subject.expected(PROMPT)
        while engine.has_transfers():
            engine.step()
        if turn == 0 and engines == 2:
            engine.shutdown()
            engine = subject.engine(block_size=4, **settings)
    assert engine.stats().transfers.tokens_loaded > 0
    engine.shutdown()


CASES: dict[Feature, Callable[[Subject], None]] = {
    Feature.TENSOR_PARALLELISM: partial(in_processes, tensor_parallel_size=2),
    Feature.PIPELINE_PARALLELISM: partial(in_processes, pipeline_parallel_size=2),
    # without a prefix cache the second run finds what it needs in host memory alone
    Feature.KV_OFFLOADING: partial(assert_loaded, engines=1, kv_offloading_size=0.01, enable_prefix_caching=False),
    Feature.SPECULATIVE_NGRAM: ngram,
    Feature.SPECULATIVE_DRAFT_MODEL: draft_model,
    Feature.SPECULATIVE_EAGLE: eagle,
} | {feature: globals()[feature.name.lower()] for feature in Feature if feature.name.lower() in globals()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("runner", "feature"), DECLARED)
def test_what_is_declared_runs(runner: str, feature: Feature, subjects: dict[str, Subject]) -> None:
    assert feature in CASES, f"{feature.name} is declared by {runner}, and nothing here runs it"
    CASES[feature](subjects[runner])


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

REQUESTS: dict[Feature, str] = {}
"""Features that a request would require, by the name that it would have in SamplingParams."""

CALLS: dict[Feature, tuple[str, ...]] = {}
"""Features that are methods of LLM."""


@pytest.mark.parametrize(("runner", "feature"), REFUSED)
def test_what_is_not_declared_is_refused(runner: str, feature: Feature, text_model: Path, tmp_path: Path) -> None:
    if feature is Feature.GRAPHS:  # no setting demands them: the plan has none
        assert make_engine(text_model, model_runner=runner).plan.capture_table.graphs == ()
        return
    tables = (SETTINGS, MODELS, CHECKPOINTS, REQUESTS, CALLS)
    assert any(feature in table for table in tables), f"nothing here needs {feature}"
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
    if feature in REQUESTS:
        with pytest.raises(TypeError, match=f"unknown keyword '{REQUESTS[feature]}'"):
            SamplingParams(**{REQUESTS[feature]: object()})
    assert not any(hasattr(LLM, name) for name in CALLS.get(feature, ()))


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
    assert set(CASES) == {feature for param in DECLARED for feature in param.values[1:]}
