"""The prefix cache through the engine: hits, misses, and the same tokens either way."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import engines
from tests.helpers.engines import make_engine, prompt_of, run_requests

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


def test_salts_keep_prefixes_apart(engine: LLMEngine) -> None:
    def cached(**salt: str) -> int:
        return run_one(engine, {"prompt_token_ids": PROMPT, **salt})[0]

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [16, 16, 16]
    assert [run_one(engine, {"prompt": "Once upon a time", "cache_salt": salt})[0] for salt in "aab"] == [0, 4, 0]


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
