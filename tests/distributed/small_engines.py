"""Engines of worker processes for tests of what becomes of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.records.sampling_params import SamplingParams

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 80,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
"""Nearly as long as requests can be."""


@contextmanager
def running(**settings: Any) -> Iterator[LLMEngine]:
    """An engine that is shut down in the end."""
    engine = LLMEngine.from_config(EngineConfig(**{**SMALL, **settings}))
    try:
        yield engine
    finally:
        engine.shutdown()


def executor_of(engine: LLMEngine) -> MultiprocessExecutor:
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor


def step_until_dead(engine: LLMEngine) -> EngineDeadError:
    """There are always requests that run."""
    with pytest.raises(EngineDeadError) as caught:
        while True:
            if not engine.has_unfinished_requests():
                engine.add_request("again", PROMPT, LONG)
            engine.step()
    return caught.value
