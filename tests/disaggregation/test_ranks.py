"""Engines of several ranks, with drafts: each rank lends its own blocks, and reads those of the same rank elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.prefill_decode import REQUESTS, ROOMY, SIZE, Tokens, decodes, nixl, prefilled, settle, tokens_of

from fleetfoot import LLMEngine
from fleetfoot.assets import embedded_model_path

MODEL = embedded_model_path()
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "draft": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": str(Path(__file__).parents[1] / "assets" / "story-draft"),
    },
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
}


@contextmanager
def running(runner: str, role: str, **settings: Any) -> Iterator[LLMEngine]:
    engine = make_engine(
        MODEL, runner=runner, dtype="float32", skip_tokenizer_init=True, kv_transfer_config=nixl(role), **settings
    )
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def alone() -> Tokens:
    """What one process makes of REQUESTS, without drafts and connectors."""
    engine = make_engine(MODEL, runner="v1", dtype="float32", skip_tokenizer_init=True, **SIZE)
    return tokens_of(run_requests(engine, REQUESTS))


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In worker processes too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("way, method, runner", [("tensor", "eagle", "v2"), ("pipeline", "draft", "v1")])
def test_tokens_are_those_of_one_process(way: str, method: str, runner: str, alone: Tokens) -> None:
    settings = {**WAYS[way], "speculative_config": METHODS[method]}
    with (
        running(runner, "kv_producer", **settings, **ROOMY) as producer,
        running(runner, "kv_consumer", **settings, **SIZE) as consumer,
    ):
        assert consumer.runner_name == runner
        held = prefilled(producer)
        assert len(held["long"]["remote_addresses"]) == 2
        assert tokens_of(run_requests(consumer, decodes(held))) == alone
        settle(consumer)
        sent = settle(producer)
        assert sent["sends_sent"] + sent.get("sends_declined", 0) == 2 * 4  # each rank counts
        stats = consumer.stats().transfers
        assert (stats.loads_failed, stats.loads_done >= 3) == (0, True)
        assert stats.counters["blocks_loaded"] * 4 == stats.tokens_loaded * 2


@pytest.mark.parametrize("method", ["none", "ngram", "draft", "eagle"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_with_drafts(method: str, runner: str, alone: Tokens) -> None:
    """On one rank: a drafter's own KV comes along."""
    with (
        running(runner, "kv_producer", speculative_config=METHODS[method], **ROOMY) as producer,
        running(runner, "kv_consumer", speculative_config=METHODS[method], **SIZE) as consumer,
    ):
        assert tokens_of(run_requests(consumer, decodes(prefilled(producer)))) == alone
        settle(consumer)
        settle(producer)
        assert consumer.stats().transfers.loads_done >= 3
        assert consumer.stats().transfers.loads_failed == 0
