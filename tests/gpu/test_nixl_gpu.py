"""KV that is held by one GPU engine and read by another, and the whole of it in two engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kv_bench import same
from tests.helpers.kv_pair import Engine, skip_without
from tests.helpers.prefill_decode import REQUESTS, RUNNERS, decodes, nixl, prefilled, settle, tokens_of

from fleetfoot.assets import embedded_model_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = pytest.mark.parametrize("backend", ["tcp", "nixl"])


@pytest.fixture
def pair(backend: str) -> Iterator[tuple[Engine, Engine]]:
    """A producer, and a consumer that has room for one block at a time."""
    skip_without(backend)
    producer = Engine(backend=backend, device="cuda")
    consumer = Engine(backend=backend, device="cuda", extra={"buffer_bytes": 1, "num_threads": 1})
    yield producer, consumer
    consumer.shutdown()
    producer.shutdown()


@BACKENDS
def test_blocks_are_the_same_bits(pair: tuple[Engine, Engine], backend: str) -> None:
    """Also while the devices' queues are full: held blocks are written before they are read."""
    producer, consumer = pair
    big = torch.randn(4096, 4096, device="cuda")
    for number in range(3):
        for _ in range(20):
            big = (big @ big).clamp(-1, 1)
        producer.scramble([3, 7, 1, 12])
        params = producer.hold(f"p{number}")
        untouched = consumer.contents([4, 5, 6])
        assert consumer.load(consumer.remote(params, f"r{number}")).loaded == {f"r{number}"}
        assert same(consumer.contents([9, 8, 2, 0]), producer.contents([3, 7, 1, 12]))
        assert same(consumer.contents([4, 5, 6]), untouched)
        producer.until_sent(f"p{number}")


@BACKENDS
@RUNNERS
def test_tokens_are_those_of_one_engine(runner: str, backend: str) -> None:
    skip_without(backend)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "runner": runner, "skip_tokenizer_init": True}
    settings |= {"block_size": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64}
    alone = make_engine(embedded_model_path(), **settings)
    expected = tokens_of(run_requests(alone, REQUESTS))
    alone.shutdown()
    producer, consumer = [
        make_engine(embedded_model_path(), kv_transfer_config=nixl(role, backend=backend), **settings)
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        assert tokens_of(run_requests(consumer, decodes(prefilled(producer)))) == expected
        settle(producer)
        settle(consumer)
        stats = consumer.stats().transfers
        assert stats.loads_done >= 3 and stats.loads_failed == 0
    finally:
        consumer.shutdown()
        producer.shutdown()
