"""Prefill on one engine, decode on another, in one process: the same tokens as on one, whatever becomes of the KV."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import prefill_decode
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.kv_pair import skip_without
from tests.helpers.prefill_decode import PARAMS, PROMPTS, VOCAB, decodes, nixl, prefilled, settle, tokens_of

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.outputs import RequestOutput

Make = Callable[..., LLMEngine]
Outputs = dict[str, RequestOutput]


@pytest.fixture
def make(request: pytest.FixtureRequest, text_model: Path) -> Make:
    def make_one(role: str | None, *, backend: str = "tcp", model: Path = text_model, **settings: Any) -> LLMEngine:
        config = nixl(role, backend=backend) if role else None
        engine = make_engine(model, **{"kv_transfer_config": config, **prefill_decode.ROOMY, **settings})
        request.addfinalizer(engine.shutdown)
        return engine

    return make_one


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_are_of_one_engine(runner: str, backend: str, caching: bool, make: Make, expected: Outputs) -> None:
    skip_without(backend)
    settings: dict[str, Any] = {"model_runner": runner, "backend": backend, "enable_prefix_caching": caching}
    producer, consumer = make("kv_producer", **settings), make("kv_consumer", **settings, **prefill_decode.SIZE)
    assert producer.runner_name == consumer.runner_name == runner
    held = prefilled(producer)
    assert held["tiny"] is None  # it has no full block
    assert tokens_of(run_requests(consumer, decodes(held))) == tokens_of(expected)
    sent = settle(producer)
    assert sent["sends_sent"] + sent.get("sends_declined", 0) == 4
    settle(consumer)
    stats = consumer.stats().transfers
    assert stats.loads_failed == 0
    assert (stats.loads_done, stats.tokens_loaded) == (4, 104) or caching  # what another has loaded is not loaded again
    assert stats.loads_done >= 3


@pytest.mark.parametrize("caching", [True, False])
def test_models_with_states(
    runner: str, caching: bool, make: Make, hybrid_model: Path, expected_of_hybrid: Outputs
) -> None:
    """KV is loaded up to the newest state within the prompt: here the end of its last whole block."""
    settings: dict[str, Any] = {"model_runner": runner, "model": hybrid_model, "enable_prefix_caching": caching}
    producer = make("kv_producer", **settings)
    consumer = make("kv_consumer", **settings, num_gpu_blocks_override=14)
    held = prefilled(producer)
    assert [name for name in held if held[name] is None] == ["tiny"]
    assert tokens_of(run_requests(consumer, decodes(held))) == tokens_of(expected_of_hybrid)
    assert settle(producer)["sends_sent"] >= 3
    settle(consumer)
    stats = consumer.stats().transfers
    assert stats.loads_failed == 0
    assert (stats.loads_done, stats.tokens_loaded) == (4, 104) or caching
    assert stats.loads_done >= 3


def test_shutdown_saves_files_and_waits_for_no_consumer(runner: str, make: Make, tmp_path: Path) -> None:
    files = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": tmp_path}}
    several = {"connectors": [nixl("kv_producer"), files]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": several}
    producer = make(None, model_runner=runner, kv_transfer_config=config)
    params = replace(PARAMS["alone"], extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    output = run_requests(producer, {"alone": (PROMPTS["alone"], params)})["alone"]
    assert output.kv_transfer_params is not None and producer.has_transfers()
    producer.shutdown()
    assert len(list(tmp_path.rglob("*.kv"))) == 7


def test_requests_aborted_before_and_during_their_load(runner: str, make: Make) -> None:
    producer, consumer = make("kv_producer", model_runner=runner), make("kv_consumer", model_runner=runner)
    for num_steps in (0, 1):
        consumer.add_request("long", *decodes(prefilled(producer, ["long"]))["long"])
        for _ in range(num_steps):
            consumer.step()
        consumer.abort_request("long")
        (output,) = [output for output in consumer.step() if output.finished]
        assert output.outputs[0].finish_reason == "abort"
        settle(consumer)
        settle(producer)
    assert producer.stats().transfers.counters["sends_declined"] >= 1


def test_requests_that_are_not_loaded_starve_no_others(runner: str, make: Make, expected: Outputs) -> None:
    """No time passes. Together they need four times the blocks that there are."""
    producer, consumer = (
        make("kv_producer", model_runner=runner, **prefill_decode.SIZE),
        make("kv_consumer", model_runner=runner),
    )
    hold = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    outputs = run_requests(producer, {name: (prompt_of(40, VOCAB, seed=6 + int(name)), hold) for name in "0123456789"})
    assert producer.stats().transfers.num_held_blocks == 20
    assert producer.stats().transfers.counters["sends_evicted"] == 8
    output = run_requests(consumer, decodes({"long": outputs["0"].kv_transfer_params}))
    assert tokens_of(output)["long"] == expected["long"].outputs[0].token_ids
    assert consumer.stats().transfers.loads_failed == 1  # it was evicted, and computed again


def test_several_sequences_are_refused(make: Make) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    request = decodes(prefilled(producer, ["long"]))["long"]
    with pytest.raises(ValueError, match="n must be 1"):
        consumer.add_request("r", request[0], replace(request[1], n=2, temperature=1.0))
    consumer.add_request("r", *request)
    consumer.abort_request("r")
    consumer.step()
    settle(producer)
