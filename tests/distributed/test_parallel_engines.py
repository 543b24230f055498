"""Engines whose model is shared by several processes give the tokens of one that has it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.distributed.small_engines import check_lives
from tests.helpers.engines import make_engine
from tests.helpers.schedules import Life, live_alone, random_lives

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.outputs import RequestOutput

MODEL = embedded_model_path()
VOCAB = 2048
SEEDS = range(3)
ROOMY = {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 512}
TIGHT = {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 24, "max_num_seqs": 4}
"""Chunks, preemption, and rows that change hands."""

WAYS: dict[str, dict[str, Any]] = {
    "v2, tensor": {"runner": "v2", "tensor_parallel_size": 2, "async_scheduling": True, **ROOMY},
    "v1, tensor": {"runner": "v1", "tensor_parallel_size": 2, **TIGHT},
    "v2, pipeline": {"runner": "v2", "pipeline_parallel_size": 2, **TIGHT},
    "v1, pipeline": {"runner": "v1", "pipeline_parallel_size": 2, **ROOMY},
    "v2, both": {"runner": "v2", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, **TIGHT},
}


@contextmanager
def running(**settings: Any) -> Iterator[LLMEngine]:
    small = {"dtype": "float32", "max_model_len": 80, "block_size": 4, "skip_tokenizer_init": True}
    engine = make_engine(MODEL, **small, **settings)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, RequestOutput]]:
    with running(runner="v1", enable_prefix_caching=False, max_num_seqs=1) as engine:
        return {seed: live_alone(engine, lives_of(seed)) for seed in SEEDS}


def lives_of(seed: int) -> list[Life]:
    return random_lives(seed, VOCAB)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_are_those_of_one_process(way: str, expected: dict[int, dict[str, RequestOutput]]) -> None:
    with running(**WAYS[way]) as engine:
        assert isinstance(engine.core.executor, MultiprocessExecutor)
        assert engine.runner_name == WAYS[way]["runner"]
        for seed in SEEDS:
            check_lives(engine, lives_of(seed), expected[seed])
