"""KV that is lent by one GPU engine and read by another, and the whole of it in two engines."""

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
    """A lender, and a reader that has room for one block at a time."""
    skip_without(backend)
    lender = Engine(backend=backend, device="cuda")
    reader = Engine(backend=backend, device="cuda", extra={"buffer_bytes": 1, "num_threads": 1})
    yield lender, reader
    reader.shutdown()
    lender.shutdown()


@BACKENDS
def test_blocks_are_the_same_bits(pair: tuple[Engine, Engine], backend: str) -> None:
    """Also while the devices' queues are full: what is lent is written, and what is read into is nobody's any more."""
    lender, reader = pair
    big = torch.randn(4096, 4096, device="cuda")
    for number in range(3):
        for _ in range(20):
            big = (big @ big).clamp(-1, 1)
        lender.scramble([3, 7, 1, 12])
        params = lender.lend(f"p{number}")
        untouched = reader.contents([4, 5, 6])
        assert reader.load(reader.wants(params, f"r{number}")).loaded == {f"r{number}"}
        assert same(reader.contents([9, 8, 2, 0]), lender.contents([3, 7, 1, 12]))
        assert same(reader.contents([4, 5, 6]), untouched)
        lender.until_sent(f"p{number}")


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
