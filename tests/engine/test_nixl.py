"""Prefill on one engine, decode on another, in one process: the same tokens as on one, whatever becomes of the KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.clocked_nixl import clocked
from tests.helpers.engine_pairs import generate
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import skip_without
from tests.helpers.prefill_decode import (
    PARAMS,
    PROMPTS,
    REQUESTS,
    ROOMY,
    RUNNERS,
    SIZE,
    Tokens,
    decodes,
    nixl,
    prefilled,
    settle,
    tokens_of,
)

from fleetfoot import AsyncLLM, LLMEngine
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM, ProxyStats
from fleetfoot.server.disaggregation.serve import LocalEngine

Make = Callable[..., LLMEngine]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    def make_one(folder: Path, **settings: Any) -> LLMEngine:
        engine = make_engine(folder, **settings)
        request.addfinalizer(engine.shutdown)
        return engine

    return make_one


@RUNNERS
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_are_those_of_one_engine(
    runner: str, backend: str, caching: bool, text_model: Path, make: Make, no_connector: Tokens
) -> None:
    skip_without(backend)
    settings: dict[str, Any] = {"runner": runner, "enable_prefix_caching": caching}
    producer = make(text_model, kv_transfer_config=nixl("kv_producer", backend=backend), **settings, **ROOMY)
    consumer = make(text_model, kv_transfer_config=nixl("kv_consumer", backend=backend), **settings, **SIZE)
    assert producer.runner_name == consumer.runner_name == runner
    held = prefilled(producer)
    assert held["tiny"] is None  # it has no full block
    assert tokens_of(run_requests(consumer, decodes(held))) == no_connector
    sent = settle(producer)
    assert sent["sends_sent"] + sent.get("sends_declined", 0) == 4
    settle(consumer)
    stats = consumer.stats().transfers
    assert stats.loads_failed == 0
    assert (stats.loads_done, stats.tokens_loaded) == (4, 104) or caching  # what another has loaded is not loaded again
    assert stats.loads_done >= 3


@RUNNERS
def test_only_what_the_reader_does_not_have_is_read(
    runner: str, text_model: Path, make: Make, no_connector: Tokens
) -> None:
    producer = make(text_model, runner=runner, kv_transfer_config=nixl("kv_producer"), **ROOMY)
    consumer = make(text_model, runner=runner, kv_transfer_config=nixl("kv_consumer"), **ROOMY)
    assert tokens_of(run_requests(consumer, {"one": REQUESTS["one"]})) == {"one": no_connector["one"]}
    output = run_requests(consumer, decodes(prefilled(producer, ["two"])))["two"]
    assert output.outputs[0].token_ids == no_connector["two"]
    assert output.num_cached_tokens == 24
    assert settle(consumer)["blocks_loaded"] == 1  # five blocks of six are those of the other prompt
    settle(producer)  # the request's id is free again
    again = run_requests(consumer, decodes(prefilled(producer, ["two"])))["two"]
    assert again.outputs[0].token_ids == no_connector["two"]
    assert settle(consumer)["blocks_loaded"] == 1
    assert settle(producer) == {"sends_sent": 1, "blocks_sent": 6, "bytes_sent": 6 * 2048, "sends_declined": 1}


@RUNNERS
def test_an_engine_that_ends_saves_what_it_has_and_waits_for_no_reader(
    runner: str, text_model: Path, tmp_path: Path
) -> None:
    files = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": tmp_path}}
    several = {"connectors": [nixl("kv_producer"), files]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": several}
    producer = make_engine(text_model, runner=runner, kv_transfer_config=config, **ROOMY)
    params = replace(PARAMS["alone"], extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    output = run_requests(producer, {"alone": (PROMPTS["alone"], params)})["alone"]
    assert output.kv_transfer_params is not None and producer.has_transfers()
    producer.shutdown()
    assert len(list(tmp_path.rglob("*.kv"))) == 7


@RUNNERS
def test_requests_that_are_aborted(runner: str, text_model: Path, make: Make) -> None:
    """Before they load, and while they do."""
    producer = make(text_model, runner=runner, kv_transfer_config=nixl("kv_producer"), **ROOMY)
    consumer = make(text_model, runner=runner, kv_transfer_config=nixl("kv_consumer"), **ROOMY)
    for num_steps in (0, 1):
        for name, request in decodes(prefilled(producer, ["long"])).items():
            consumer.add_request(name, *request)
        for _ in range(num_steps):
            consumer.step()
        consumer.abort_request("long")
        (output,) = [output for output in consumer.step() if output.finished]
        assert output.outputs[0].finish_reason == "abort"
        settle(consumer)
        settle(producer)
    assert producer.stats().transfers.counters["sends_declined"] >= 1


@RUNNERS
def test_blocks_that_nobody_reads_come_back(runner: str, text_model: Path, make: Make) -> None:
    clock = Clock()
    producer = make(text_model, runner=runner, kv_transfer_config=clocked(nixl("kv_producer"), clock), **ROOMY)
    prefilled(producer)
    # each prompt's blocks, with the last that is not full; "one" and "two" begin with the same five
    assert producer.stats().transfers.num_held_blocks == 5 + 8 + 7 + 10 - 5
    clock.now += 479
    producer.step()
    assert producer.stats().transfers.num_held_blocks == 25
    clock.now += 1
    assert settle(producer) == {"sends_expired": 4}


@RUNNERS
def test_beside_host_memory(runner: str, text_model: Path, make: Make, no_connector: Tokens) -> None:
    """A request is loaded from the connector with more of its tokens; the other producer's lease is declined."""
    producer = make(text_model, runner=runner, kv_transfer_config=nixl("kv_producer"), **ROOMY)
    consumer = make(
        text_model,
        runner=runner,
        kv_transfer_config=nixl("kv_consumer"),
        kv_offloading_size=0.01,
        enable_prefix_caching=False,
        **SIZE,
    )
    for _ in range(2):
        assert tokens_of(run_requests(consumer, decodes(prefilled(producer)))) == no_connector
        settle(consumer)
        sent = settle(producer)
    assert tokens_of(run_requests(consumer, REQUESTS)) == no_connector  # without another engine
    counters = settle(consumer)
    assert counters["NixlConnector.blocks_loaded"] > 0 and counters["OffloadingConnector.blocks_loaded"] > 0
    assert sent["sends_sent"] + sent.get("sends_declined", 0) == 8


def test_wrong_roles_are_refused(text_model: Path, make: Make) -> None:
    producer = make(text_model, kv_transfer_config=nixl("kv_producer"), **ROOMY)
    consumer = make(text_model, kv_transfer_config=nixl("kv_consumer"), **ROOMY)
    plain = make(text_model, **ROOMY)
    held = prefilled(producer, ["long"])
    request = decodes(held)["long"]
    with pytest.raises(ValueError, match="do_remote_prefill is true, but kv_role is 'kv_producer'"):
        producer.add_request("r", *request)
    with pytest.raises(ValueError, match="do_remote_decode is true, but kv_role is 'kv_consumer'"):
        prefilled(consumer)
    with pytest.raises(ValueError, match="this engine has no KV connector that accepts any"):
        plain.add_request("r", *request)
    with pytest.raises(ValueError, match="n must be 1"):
        consumer.add_request("r", request[0], replace(request[1], n=2, temperature=1.0))
    consumer.add_request("r", *request)
    consumer.abort_request("r")
    consumer.step()
    settle(producer)


@RUNNERS
def test_async_engines(runner: str, text_model: Path, no_connector: Tokens) -> None:
    async def everything() -> None:
        settings = {"device": "cpu", "max_num_seqs": 8, "runner": runner, **ROOMY}
        async with (
            AsyncLLM(str(text_model), kv_transfer_config=nixl("kv_both"), **settings) as prefill,
            AsyncLLM(str(text_model), kv_transfer_config=nixl("kv_both"), **settings) as decode,
        ):
            llm = DisaggregatedLLM(LocalEngine(prefill), LocalEngine(decode))
            tokens = await asyncio.gather(*(generate(llm, name) for name in REQUESTS))
            assert dict(zip(REQUESTS, tokens, strict=True)) == no_connector
            assert llm.counts == ProxyStats(num_requests=5, num_prefilled=4)
            await prefill.check_integrity()
            await decode.check_integrity()
            transfers = decode.stats().transfers
            assert transfers.loads_done >= 3 and transfers.loads_failed == 0

    asyncio.run(everything())
