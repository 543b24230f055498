"""The embedded model in each kind of engine gives the same tokens: what `make test-quick` runs of the engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetfoot import LLM, AsyncLLM, SamplingParams

PROMPTS = ["Once upon a time, there was a", "One day, Tom and his dog went to the park. They", "Hi"]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=3, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.7, seed=4, repetition_penalty=1.2, stop=["!"]),
]
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 40}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FEW_BLOCKS = {"max_num_batched_tokens": 8, "num_gpu_blocks_override": 9, "block_size": 8, "max_model_len": 64}
EAGLE = {"method": "eagle", "num_speculative_tokens": 2}


def generate(**settings: Any) -> list[list[int]]:
    with LLM(**SETTINGS | settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # of cached prefixes
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [output.outputs[0].token_ids for output in again] == tokens
    return tokens


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(model_runner="v1", enable_prefix_caching=False, max_num_seqs=1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 3, **FEW_BLOCKS}, {"speculative_config": NGRAMS}, {"speculative_config": EAGLE}],
    ids=["plain", "few blocks and small steps", "ngram", "eagle"],
)
def test_tokens_are_the_same(runner: str, settings: dict[str, Any], expected: list[list[int]]) -> None:
    assert generate(model_runner=runner, **settings) == expected


def test_a_connector_loads_what_another_engine_saved(runner: str, tmp_path: Path, expected: list[list[int]]) -> None:
    config: dict[str, Any] = {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"}
    config |= {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    settings = {"model_runner": runner, "kv_transfer_config": config, "block_size": 4}
    assert generate(**settings) == expected
    with LLM(**SETTINGS | settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.stats().transfers.loads_done > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_requests_of_an_async_engine_run_together(expected: list[list[int]]) -> None:
    async def last(llm: AsyncLLM, index: int) -> list[int]:
        async for output in llm.generate(PROMPTS[index], PARAMS[index], str(index)):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def generate_all() -> list[list[int]]:
        async with AsyncLLM(**SETTINGS) as llm:
            return await asyncio.gather(*(last(llm, index) for index in range(len(PROMPTS))))

    assert asyncio.run(generate_all()) == expected
