"""The prefix cache through the engine: hits, misses, and the same tokens either way."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import engines
from tests.helpers.engines import drain, make_engine, prompt_of, run_requests

from fleetfoot import LLM, LLMEngine, SamplingParams

VOCAB = engines.TEXT_MODEL["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = prompt_of(20, VOCAB)


def run_one(engine: LLMEngine, prompt: object, params: SamplingParams = GREEDY) -> tuple[int, list[int]]:
    """Cached tokens of the prompt, and the output."""
    output = run_requests(engine, {"r": (prompt, params)})["r"]
    return output.num_cached_tokens, output.outputs[0].token_ids


@pytest.fixture(scope="module")
def engine(text_model: Path) -> LLMEngine:
    return make_engine(text_model, block_size=4)


@pytest.fixture(autouse=True)
def forget(engine: LLMEngine) -> None:
    """Each test begins with an empty cache."""
    engine.reset_prefix_cache()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 20])
def test_full_blocks_are_hit_and_the_last_token_is_computed(length: int, engine: LLMEngine) -> None:
    cached, tokens = run_one(engine, PROMPT[:length])
    assert cached == 0
    assert run_one(engine, PROMPT[:length]) == ((length - 1) // 4 * 4, tokens)


def test_a_hit_ends_at_the_first_token_that_differs(engine: LLMEngine) -> None:
    run_one(engine, PROMPT)
    for position, cached in ((0, 0), (3, 0), (4, 4), (11, 8), (19, 16)):
        prompt = list(PROMPT)
        prompt[position] += 1
        found, tokens = run_one(engine, prompt)
        assert found == cached
        engine.reset_prefix_cache()
        assert run_one(engine, prompt) == (0, tokens)
        run_one(engine, PROMPT)
    assert run_one(engine, PROMPT[4:])[0] == 0  # the same tokens in another place


def test_requests_of_one_step_share(engine: LLMEngine) -> None:
    """Attention of the second request reads KV that the same layer has just written for the first."""
    _, alone = run_one(engine, PROMPT)
    engine.reset_prefix_cache()
    outputs = run_requests(engine, {name: (PROMPT, GREEDY) for name in "abc"})
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 16, 16]
    assert all(output.outputs[0].token_ids == alone for output in outputs.values())
    engine.reset_prefix_cache()
    before = engine.stats().scheduler
    run_one(engine, PROMPT, SamplingParams(n=3, seed=0))  # so do the sequences of a request
    after = engine.stats().scheduler
    assert after.prefix_cache_queries - before.prefix_cache_queries == 60
    assert after.prefix_cache_hits - before.prefix_cache_hits == 32


def test_salts_keep_prefixes_apart(engine: LLMEngine) -> None:
    def cached(**salt: str) -> int:
        return run_one(engine, {"prompt_token_ids": PROMPT, **salt})[0]

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [16, 16, 16]
    assert [run_one(engine, {"prompt": "Once upon a time", "cache_salt": salt})[0] for salt in "aab"] == [0, 4, 0]


def test_prompt_logprobs_need_the_whole_prompt(engine: LLMEngine) -> None:
    run_one(engine, PROMPT)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    cached, tokens = run_one(engine, PROMPT, params)
    assert cached == 0
    assert run_one(engine, PROMPT) == (16, tokens)


def test_blocks_of_an_aborted_request_are_cached(text_model: Path) -> None:
    engine = make_engine(text_model, block_size=4, max_num_batched_tokens=8)
    prompt = prompt_of(40, VOCAB)
    engine.add_request("r", prompt, GREEDY)
    engine.step()
    engine.step()
    engine.abort_request("r")
    drain(engine)
    cached, tokens = run_one(engine, prompt)
    assert cached == 16
    engine.reset_prefix_cache()
    assert run_one(engine, prompt) == (0, tokens)
    engine.shutdown()


def test_requests_from_before_a_reset_are_not_cached_after_it() -> None:
    """A reset means that KV so far is of other weights, and so is KV that is computed from it."""
    engine = engines.scripted_engine(engines.ScriptedExecutor())
    prompt = list(range(100, 109))
    engine.add_request("old", prompt, SamplingParams(max_tokens=20))
    engine.step()
    engine.step()
    engine.reset_prefix_cache()
    (old, *_) = [output for output in drain(engine) if output.finished]
    tokens = prompt + old.outputs[0].token_ids
    # the beginning is computed anew and cached; the old request's later blocks must not continue it
    engine.add_request("new", tokens[:12], SamplingParams(max_tokens=1))
    drain(engine)
    engine.add_request("newer", tokens, SamplingParams(max_tokens=1))
    (newer,) = drain(engine)
    assert newer.num_cached_tokens == 12


def test_nan_stays_with_its_request(tmp_path: Path) -> None:
    """One token's embedding is NaN: other requests reuse the blocks of requests that have it, unharmed."""
    engines.make_text_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), device="cpu", block_size=4, num_gpu_blocks_override=12, max_num_seqs=4) as llm:
        healthy = [prompt_of(length, VOCAB, seed=length) for length in (6, 11)]
        expected = [run_one(llm.llm_engine, prompt) for prompt in healthy]
        sick = [*prompt_of(5, VOCAB), 7, 9, 9, 9, 9]
        for _ in range(3):
            prompts = {"0": healthy[0], "sick": sick, "1": healthy[1]}
            outputs = run_requests(llm.llm_engine, {name: (prompt, GREEDY) for name, prompt in prompts.items()})
            completion = outputs["sick"].outputs[0]
            assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
            assert "NaN" in str(completion.stop_reason)
            for number, (_, tokens) in enumerate(expected):
                completion = outputs[str(number)].outputs[0]
                assert (completion.token_ids, completion.finish_reason) == (tokens, "length")
