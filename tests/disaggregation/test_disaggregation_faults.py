"""Engines that are killed, lines that are slow or cut: the tokens stay what they are, and every block comes back.

One side of a pair is in the test's own process, where its steps and its clock can be held; the other is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.clocked_nixl import clocked
from tests.helpers.engine_pairs import engine_settings, generate, last_output, start
from tests.helpers.engines import TEXT_MODEL, drain, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import EngineLine, Gate, Line, cut_at, flip_at, skip_without
from tests.helpers.prefill_decode import (
    PARAMS,
    PROMPTS,
    RUNNERS,
    SIZE,
    decodes,
    nixl,
    prefilled,
    settle,
)
from tests.helpers.streams import async_test

from fleetfoot import AsyncLLM, LLMEngine
from fleetfoot.config.engine import EngineConfig
from fleetfoot.outputs import RequestOutput
from fleetfoot.server.disaggregation.client import EngineClient, EngineProcess, EngineUnreachableError
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM, ProxyStats
from fleetfoot.server.disaggregation.serve import LocalEngine

Outputs = dict[str, RequestOutput]
MakeEngine = Callable[..., LLMEngine]
StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def make(text_model: Path, request: pytest.FixtureRequest) -> MakeEngine:
    """Engines in this process; ``clock``: what their transfers are timed by."""

    def make_engine(
        role: str, *, clock: Clock | None = None, model: Path = text_model, backend: str = "tcp", **settings: Any
    ) -> LLMEngine:
        extra = {name: settings.pop(name) for name in ("kv_load_failure_policy",) if name in settings}
        config = nixl(role, backend=backend, **extra)
        settings["kv_transfer_config"] = config if clock is None else clocked(config, clock)
        fields = engine_settings(model, role, **settings)
        engine = LLMEngine.from_config(EngineConfig(**fields))
        request.addfinalizer(engine.shutdown)
        return engine

    return make_engine


@pytest.fixture
def processes(text_model: Path, request: pytest.FixtureRequest) -> StartEngine:
    """Engines in processes of their own, which need not be alive in the end."""

    def start_one(role: str, **settings: Any) -> EngineProcess:
        process = start(text_model, role, **settings)
        request.addfinalizer(process.stop)
        return process

    return start_one


@dataclass
class Killable:
    """A producer in its own process, which the test kills, and a consumer in this one."""

    backend: str
    producer: EngineProcess
    consumer: LLMEngine

    def check(self, output: RequestOutput, expected: Outputs, **counts: int) -> None:
        """The tokens are the expected ones, all blocks are free, and so many loads have ended in this way."""
        assert tokens(output) == tokens(expected[output.request_id])
        settle(self.consumer)
        transfers = self.consumer.stats().transfers
        assert {name: getattr(transfers, name) for name in counts} == counts


@pytest.fixture(params=["v1-tcp", "v1-nixl", "v2-tcp", "v2-nixl"])
def pair(make: MakeEngine, processes: StartEngine, request: pytest.FixtureRequest) -> Killable:
    """On each runner, with each backend."""
    runner, backend = request.param.split("-")
    skip_without(backend)
    producer = processes("kv_producer", runner=runner, backend=backend)
    return Killable(backend, producer, make("kv_consumer", runner=runner, backend=backend))


def held_by(producer: EngineProcess, name: str = "long") -> dict[str, Any]:
    """KV transfer parameters of one of REQUESTS, which the producer holds."""

    async def prefill() -> dict[str, Any] | None:
        engine = EngineClient(producer.wait_until_ready())
        return await DisaggregatedLLM(engine, engine).prefill(PROMPTS[name], PARAMS[name], name)

    held = asyncio.run(prefill())
    assert held is not None
    return held


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# --- the producer is killed -------------------------------------------------------------------------------------------


def test_a_producer_killed_before_the_transfer(pair: Killable, expected: Outputs) -> None:
    held = held_by(pair.producer)
    pair.producer.kill()
    output = run_requests(pair.consumer, decodes({"long": held}))["long"]
    pair.check(output, expected, loads_failed=1)


def test_a_producer_killed_during_the_transfer(pair: Killable, expected: Outputs) -> None:
    """What it has sent is held back on its way: with TCP in the middle of the KV, with NIXL just before it."""
    held = held_by(pair.producer)
    with (EngineLine if pair.backend == "tcp" else Line)(held["remote_addresses"][0]) as line:
        held["remote_addresses"] = [line.address]
        gate = Gate() if isinstance(line, EngineLine) else Gate(b"Granted")
        (line.data if isinstance(line, EngineLine) else line).spoil = gate
        pair.consumer.add_request("long", *decodes({"long": held})["long"])
        pair.consumer.step()
        assert gate.reached.wait(30)
        pair.producer.kill()
        gate.opened.set()
        (output,) = [output for output in drain(pair.consumer) if output.finished]
    pair.check(output, expected, loads_failed=1)


def test_a_producer_killed_after_the_transfer(pair: Killable, processes: StartEngine, expected: Outputs) -> None:
    """And another one takes its place."""
    successor = processes("kv_producer", runner=pair.consumer.runner_name, backend=pair.backend)
    pair.consumer.add_request("long", *decodes({"long": held_by(pair.producer)})["long"])
    while not pair.consumer.stats().num_generation_tokens:
        pair.consumer.step()
    pair.producer.kill()
    (output,) = [output for output in drain(pair.consumer) if output.finished]
    pair.check(output, expected, loads_done=1, loads_failed=0)
    other = run_requests(pair.consumer, decodes({"alone": held_by(successor, "alone")}))["alone"]
    pair.check(other, expected, loads_done=2, loads_failed=0)


# --- the consumer is killed -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def reading(consumer: EngineProcess, held: dict[str, Any]) -> AsyncIterator[None]:
    """The consumer reads held KV and is stopped there. The block must end it."""
    client = EngineClient(consumer.wait_until_ready())
    with EngineLine(held["remote_addresses"][0]) as line:
        held["remote_addresses"] = [line.address]
        line.data.spoil = gate = Gate()
        request = asyncio.ensure_future(last_output(client, *decodes({"long": held})["long"], "long"))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        yield
        with pytest.raises(EngineUnreachableError, match="has gone away"):
            await request
        gate.opened.set()


@RUNNERS
@async_test
async def test_a_consumer_killed_while_it_reads(runner: str, make: MakeEngine, processes: StartEngine) -> None:
    """Its connection is lost, so the blocks are freed at once."""
    consumer = processes("kv_consumer", runner=runner)
    producer = make("kv_producer", runner=runner, clock=Clock())
    async with reading(consumer, prefilled(producer, ["long"])["long"]):
        consumer.kill()
        assert settle(producer) == {"sends_lost": 1}


@RUNNERS
@async_test
async def test_a_consumer_that_hangs_while_it_reads(runner: str, make: MakeEngine, processes: StartEngine) -> None:
    """It keeps its connection without a message: the blocks are freed when their lease expires."""
    consumer = processes("kv_consumer", runner=runner)
    producer = make("kv_producer", runner=runner, clock=(clock := Clock()))
    async with reading(consumer, prefilled(producer, ["long"])["long"]):
        os.kill(consumer.pid, signal.SIGSTOP)
        clock.now += 479
        producer.step()
        assert producer.stats().transfers.num_held_blocks == 10
        clock.now += 1
        assert settle(producer) == {"sends_expired": 1}
        consumer.kill()


# --- the line between them ------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_transfer_that_takes_too_long(runner: str, policy: str, make: MakeEngine, expected: Outputs) -> None:
    producer = make("kv_producer", runner=runner)
    consumer = make("kv_consumer", runner=runner, clock=(clock := Clock()), kv_load_failure_policy=policy)
    held = prefilled(producer, ["long"])
    with EngineLine(held["long"]["remote_addresses"][0]) as line:
        held["long"]["remote_addresses"] = [line.address]
        line.data.spoil = gate = Gate()
        consumer.add_request("long", *decodes(held)["long"])
        consumer.step()
        assert gate.reached.wait(30)
        other = run_requests_beside(consumer, "alone")
        assert tokens(other) == tokens(expected["alone"])  # other requests go on
        clock.now += 59
        assert consumer.step() == []
        clock.now += 1
        (output,) = [output for output in drain(consumer) if output.finished]
        assert settle(producer) == {"sends_lost": 1}
        gate.opened.set()
    completion = output.outputs[0]
    if policy == "recompute":
        assert completion.token_ids == tokens(expected["long"])
    else:
        assert completion.finish_reason == "error"
        assert "9 of 9 KV blocks had not come from engine" in str(completion.stop_reason)
        assert "after 60 s (kv_transfer_timeout)" in str(completion.stop_reason)
    settle(consumer)
    stats = consumer.stats().transfers
    assert (stats.loads_failed, stats.loads_timed_out) == (1, 1)


def run_requests_beside(engine: LLMEngine, name: str) -> RequestOutput:
    """One of REQUESTS, beside others that do not get on."""
    engine.add_request(name, PROMPTS[name], PARAMS[name])
    while True:
        for output in engine.step():
            if output.request_id == name and output.finished:
                return output


SPOIL: dict[str, tuple[str, Callable[[bytes, int], bytes]]] = {
    "KV is damaged": ("data", flip_at(1000)),
    "KV is cut short": ("data", cut_at(5000)),
    "its checksum is damaged": ("data", flip_at(9 + 9 * 2048)),
    "an announced length is damaged": ("data", flip_at(3)),
    "the side channel is cut": ("side", cut_at(10)),
    "the side channel sends garbage": ("side", flip_at(6)),
}


@RUNNERS
@pytest.mark.parametrize("what", SPOIL)
def test_a_line_that_spoils(runner: str, what: str, make: MakeEngine, expected: Outputs) -> None:
    producer = make("kv_producer", runner=runner)
    consumer = make("kv_consumer", runner=runner, enable_prefix_caching=False)
    held = prefilled(producer, ["long"])
    where, spoil = SPOIL[what]
    with EngineLine(held["long"]["remote_addresses"][0]) as line:
        held["long"]["remote_addresses"] = [line.address]
        (line.data if where == "data" else line).spoil = spoil
        assert tokens(run_requests(consumer, decodes(held))["long"]) == tokens(expected["long"])
    settle(consumer)
    assert consumer.stats().transfers.loads_failed == 1
    again = prefilled(producer, ["alone"])
    assert tokens(run_requests(consumer, decodes(again))["alone"]) == tokens(expected["alone"])
    settle(consumer)
    assert consumer.stats().transfers.loads_done == 1
    if where == "data":
        assert settle(producer)["sends_lost"] == 1


# --- engines that do not fit together -------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("unlike", ["model", "weights", "block_size", "dtype"])
def test_engines_that_are_unlike(
    runner: str, unlike: str, make: MakeEngine, expected: Outputs, tmp_path: Path, text_model: Path
) -> None:
    """The difference is detected at once, and named."""
    other: dict[str, Any] = {"block_size": {"block_size": 8}, "dtype": {"dtype": "bfloat16"}}.get(unlike, {})
    if unlike in ("model", "weights"):
        make_checkpoint(tmp_path, "llama", **{**TEXT_MODEL, "intermediate_size": 96 if unlike == "weights" else 80})
        other = {"model": tmp_path, "skip_tokenizer_init": True}
    producer = make("kv_producer", runner=runner, **other)
    for policy in ("fail", "recompute"):
        consumer = make("kv_consumer", runner=runner, kv_load_failure_policy=policy)
        held = prefilled(producer, ["long"])
        theirs = held["long"]["remote_engine"]["fingerprint"]
        completion = run_requests(consumer, decodes(held))["long"].outputs[0]
        if policy == "fail":
            assert f"its fingerprint is '{theirs}', and '" in str(completion.stop_reason)
            assert (f"its {unlike} is " in str(completion.stop_reason)) == (unlike in ("block_size", "dtype"))
            assert str(completion.stop_reason).endswith("' here")
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
        else:
            assert completion.token_ids == tokens(expected["long"])
        assert "sends_declined" in settle(producer)
        settle(consumer)
        assert consumer.stats().transfers.loads_failed == 1


# --- the proxy ------------------------------------------------------------------------------------------------------


@RUNNERS
@async_test
async def test_a_proxy_whose_prefill_engine_dies(
    runner: str, text_model: Path, processes: StartEngine, expected: Outputs
) -> None:
    """Before a request, and while it computes one: the decode engine computes prompts itself."""
    prefill = processes("kv_producer", runner=runner)
    settings = engine_settings(text_model, "kv_consumer", runner=runner)
    async with AsyncLLM(**settings) as llm:
        with Line(prefill.wait_until_ready()) as line:
            proxy = DisaggregatedLLM(EngineClient(line.address), LocalEngine(llm))
            assert await generate(proxy, "alone") == tokens(expected["alone"])
            os.kill(prefill.pid, signal.SIGSTOP)
            line.asked.clear()
            request = asyncio.ensure_future(generate(proxy, "long"))
            assert await asyncio.to_thread(line.asked.wait, 30)
            assert not request.done()
            prefill.kill()
            assert await request == tokens(expected["long"])
        assert await generate(proxy, "two") == tokens(expected["two"])
        assert proxy.counts == ProxyStats(num_requests=3, num_prefilled=1, num_prefills_failed=2)
        await LocalEngine(llm).drain()
        assert llm.stats().transfers.loads_done == 1


@async_test
async def test_a_proxy_whose_prefill_engine_takes_too_long(
    text_model: Path, processes: StartEngine, expected: Outputs
) -> None:
    prefill = processes("kv_producer", runner="v2")
    address = prefill.wait_until_ready()
    async with AsyncLLM(**engine_settings(text_model, "kv_consumer", runner="v2")) as llm:
        os.kill(prefill.pid, signal.SIGSTOP)
        proxy = DisaggregatedLLM(EngineClient(address), LocalEngine(llm), prefill_timeout=0.0)
        assert await generate(proxy, "long") == tokens(expected["long"])
        assert proxy.counts == ProxyStats(num_requests=1, num_prefills_failed=1)
        prefill.kill()


@async_test
async def test_a_proxy_whose_prefill_engine_refuses(
    text_model: Path, processes: StartEngine, expected: Outputs
) -> None:
    """It has another role, or no connector at all."""
    settings = engine_settings(text_model, "kv_consumer", runner="v2")
    async with AsyncLLM(**settings) as llm, AsyncLLM(**{**settings, "kv_transfer_config": None}) as plain:
        for prefill in (llm, plain):
            proxy = DisaggregatedLLM(LocalEngine(prefill), LocalEngine(llm))
            assert await generate(proxy, "long") == tokens(expected["long"])
            assert proxy.counts == ProxyStats(num_requests=1, num_prefills_failed=1)


@async_test
async def test_a_proxy_whose_decode_engine_dies(text_model: Path, processes: StartEngine, expected: Outputs) -> None:
    """Pending and later requests fail, and the prefill engine frees its blocks."""
    decode = processes("kv_consumer", runner="v2", **SIZE)
    async with AsyncLLM(**engine_settings(text_model, "kv_producer", runner="v2")) as llm:
        proxy = DisaggregatedLLM(LocalEngine(llm), EngineClient(decode.wait_until_ready()))
        assert await generate(proxy, "alone") == tokens(expected["alone"])
        await LocalEngine(llm).drain()
        os.kill(decode.pid, signal.SIGSTOP)
        with Line(decode.wait_until_ready()) as line:
            through_line = DisaggregatedLLM(LocalEngine(llm), EngineClient(line.address))
            request = asyncio.ensure_future(generate(through_line, "one"))
            assert await asyncio.to_thread(line.asked.wait, 30)
            decode.kill()
            with pytest.raises(EngineUnreachableError, match="has gone away"):
                await request
        with pytest.raises(EngineUnreachableError, match="cannot be reached"):
            await generate(proxy, "two")
        stats = await LocalEngine(llm).drain()  # the KV that was held for them is freed
        assert stats["scheduler"]["transfers"]["counters"]["sends_declined"] == 2


def test_an_engine_that_cannot_start(processes: StartEngine, capfd: pytest.CaptureFixture[str]) -> None:
    process = processes("kv_consumer", runner="v2", max_num_seqs=0)
    with pytest.raises(RuntimeError, match="has ended with code 1 before it was ready"):
        process.wait_until_ready()
    assert "max_num_seqs" in capfd.readouterr().err
