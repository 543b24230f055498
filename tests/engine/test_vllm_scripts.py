"""Scripts of vLLM's with the import changed: their names, what they call and what they read."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
from fleetfoot.v1.engine.async_llm import AsyncLLM
from fleetfoot.v1.metrics.reader import Counter, Gauge, Histogram, Vector

from fleetfoot import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, SamplingParams
from fleetfoot.sampling_params import BeamSearchParams, RequestOutputKind

PROMPT = "Once upon a time"
PARAMS = SamplingParams(temperature=0, max_tokens=6)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(**SETTINGS, disable_log_stats=False, speculative_config=NGRAM)) as made:
        yield made


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_an_engine_that_steps(greedy: list[int]) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**SETTINGS))
    engine.add_request("a", PROMPT, PARAMS, lora_request=None, trace_headers=None)
    with pytest.raises(TypeError, match="add_request got an unknown keyword 'lora_request'; LoRA adapters"):
        engine.add_request("b", PROMPT, PARAMS, lora_request=1)
    engine.step()
    engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.core.scheduler.stats().num_preemptions == 1
    outputs = [output for _ in range(9) if engine.has_unfinished_requests() for output in engine.step()]
    engine.check_integrity()
    engine.shutdown()
    assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == greedy


def test_an_asynchronous_engine(greedy: list[int]) -> None:
    async def run() -> list[int]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS), stat_loggers=None)
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
        try:
            with pytest.raises(TypeError, match="generate got an unknown keyword 'data_parallel_rank'; leave"):
                await anext(engine.generate(PROMPT, params, "1", data_parallel_rank=1))
            deltas = engine.generate(request_id="2", prompt=PROMPT, sampling_params=params, lora_request=None)
            tokens = [token async for output in deltas for token in output.outputs[0].token_ids]
            assert await engine.reset_prefix_cache(reset_running_requests=True)
            return tokens
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == greedy


def test_metrics(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, {"prompt_token_ids": [5, 6] * 9, "multi_modal_data": None}], PARAMS, use_tqdm=False)
    named = {metric.name: metric for metric in llm.get_metrics()}
    metrics = {name.removeprefix("fleetfoot:"): metric for name, metric in named.items() if name.startswith("fleet")}
    assert all(named[f"vllm:{name}"].labels == metric.labels for name, metric in metrics.items())
    counters = {name: metric.value for name, metric in metrics.items() if isinstance(metric, Counter)}
    assert counters["generation_tokens"] >= sum(len(output.outputs[0].token_ids) for output in outputs)
    accepted, waiting = metrics["spec_decode_num_accepted_tokens_per_pos"], metrics["num_requests_waiting"]
    assert isinstance(accepted, Vector) and sum(accepted.values) == counters["spec_decode_num_accepted_tokens"]
    assert isinstance(waiting, Gauge) and waiting.value == 0
    latency = metrics["e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram) and latency.labels == {"model_name": "story-llama", "engine": "0"}
    counts = list(latency.buckets.values())
    assert latency.count == counts[-1] == latency.buckets["+Inf"] and counts == sorted(counts) and latency.sum > 0


def test_beam_search(llm: LLM) -> None:
    prompts = [PROMPT, {"prompt": "The dog", "cache_salt": "own"}]
    wide = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=5, temperature=0.5), use_tqdm=True)
    alone = llm.beam_search(prompts[1:], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert [beam.tokens for beam in wide[1].sequences] == [beam.tokens for beam in alone[0].sequences]
    best = wide[0].sequences
    assert len(best) == 3 and best[0].cum_logprob >= best[2].cum_logprob
    for beam in best:  # the model's own score of the text that was found
        assert beam.text == llm.get_tokenizer().decode(beam.tokens) and beam.finish_reason == "length"
        scored = llm.generate(beam.tokens, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        entries = list(zip(beam.tokens, scored.prompt_logprobs or (), strict=True))[-5:]
        assert beam.cum_logprob == pytest.approx(
            sum(entry[token].logprob for token, entry in entries if entry), abs=1e-3
        )
    for name, value in (("beam_width", 0), ("max_tokens", 0), ("temperature", -1), ("length_penalty", math.nan)):
        with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
            BeamSearchParams(**{"beam_width": 1, "max_tokens": 1, name: value})
    for given, params, message in (
        (["a", []], BeamSearchParams(1, 1), r"prompts\[1\].prompt has no tokens"),
        (
            ["a", "b"],
            BeamSearchParams(1, 9999),
            r"prompts\[0\].max_tokens is 9999, but the prompt leaves room",
        ),
        ("a", None, "params is None; it must be a BeamSearchParams"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            llm.beam_search(given, params)
    with pytest.raises(ValueError, match=r"logprobs must be at most 20, got 22; .*max_logprobs=22"):
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=11, max_tokens=2))


def test_a_beam_of_one_is_greedy_and_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch, greedy: list[int]) -> None:
    monkeypatch.setattr(llm.llm_engine.input_processor, "eos_token_ids", frozenset(greedy[2:3]))
    for ignore_eos, length, reason in ((False, 3, "stop"), (True, 6, "length")):
        (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=ignore_eos))
        (beam,) = found.sequences
        assert beam.tokens[-length:] == greedy[:length] and beam.finish_reason == reason


def test_calls_of_the_worker(llm: LLM) -> None:
    assert llm.collective_rpc(lambda worker, rank: worker.rank == rank, args=(0,)) == [True]
    assert llm.collective_rpc("parts")[0]["runner"] == llm.llm_engine.runner_name
    assert llm.collective_rpc(lambda worker: worker.model_runner.model.lm_head is not None) == [True]
    assert llm.collective_rpc("reload_weights") == [1]
    assert (llm.model_config.max_model_len, llm.model_config.vocab_size) == (2048, 2048)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'apply_model'; collective_rpc takes"):
        llm.apply_model  # noqa: B018
    assert not hasattr(llm, "nothing") and llm.reset_prefix_cache(reset_running_requests=True)


def test_overrides_of_the_model(llm: LLM) -> None:
    def two_layers(config: Any) -> Any:
        config.num_hidden_layers = 2
        config.update({"rms_norm_eps": 0.1})
        return config

    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
    for overrides, backend, length in ((two_layers, "mp", 2048), ({"rope_parameters": rope}, "uni", 4096)):
        settings = {**SETTINGS, "load_format": "dummy", "distributed_executor_backend": backend}
        with LLM(hf_overrides=overrides, **settings) as changed:
            model = changed.llm_engine.plan.model
            assert (model.num_layers, model.rms_norm_eps) == (2, 0.1) or overrides is not two_layers
            assert changed.model_config.max_model_len == length
            if backend == "mp":
                with pytest.raises(ValueError, match="method is 'build', which a worker does not have"):
                    changed.collective_rpc("build")
    for value, message in (
        (lambda config: None, "has returned None; it must return the config"),
        ("3", "is 3; it must"),
    ):
        with pytest.raises(TypeError, match=f"hf_overrides {message}"):
            LLM(hf_overrides=value)
