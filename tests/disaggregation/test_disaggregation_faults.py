"""Engines that are killed, connections that are slow or cut: the tokens stay the same, and every block is released.

One side of a pair is in the test's own process, where its steps and its clock can be held; the other is killed.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers import prefill_decode
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import TEXT_MODEL, drain, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import EngineLine, Gate, Line, skip_without
from tests.helpers.prefill_decode import PARAMS, PROMPTS, decodes, engine_settings, generate, prefilled, settle
from tests.helpers.streams import async_test

from fleetfoot import AsyncLLM, LLMEngine, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.outputs import RequestOutput
from fleetfoot.server.disaggregation.client import (
    EngineClient,
    EngineProcess,
    EngineUnreachableError,
    Generate,
)
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM, ProxyStats
from fleetfoot.server.disaggregation.serve import EngineServer, LocalEngine, reserve

Outputs = dict[str, RequestOutput]
MakeEngine = Callable[..., LLMEngine]
StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def make(text_model: Path, request: pytest.FixtureRequest) -> MakeEngine:
    """Engines in this process; ``policy``: the kv_load_failure_policy."""

    def make_engine(
        role: str, *, model: Path = text_model, backend: str = "tcp", policy: str = "recompute", **settings: Any
    ) -> LLMEngine:
        settings["kv_transfer_config"] = prefill_decode.nixl(role, backend=backend, kv_load_failure_policy=policy)
        engine = LLMEngine.from_config(EngineConfig(**engine_settings(model, role, **settings)))
        request.addfinalizer(engine.shutdown)
        return engine

    return make_engine


@pytest.fixture
def processes(text_model: Path, request: pytest.FixtureRequest) -> StartEngine:
    """Engines in processes of their own, which need not be alive in the end."""

    def start_one(role: str, **settings: Any) -> EngineProcess:
        process = prefill_decode.start(text_model, role, **settings)
        request.addfinalizer(process.stop)
        return process

    return start_one


def held_by(producer: EngineProcess, name: str = "long") -> dict[str, Any]:
    """The requests for the decode engine, for one of REQUESTS that the producer holds."""

    async def prefill() -> dict[str, Any] | None:
        engine = EngineClient(producer.wait_until_ready())
        return await DisaggregatedLLM(engine, engine).prefill(PROMPTS[name], PARAMS[name], name)

    held = asyncio.run(prefill())
    assert held is not None
    return {name: held}


@contextlib.contextmanager
def relayed(held: dict[str, Any], line_type: type[Line] = EngineLine) -> Iterator[Line]:
    """A relay between the producer of "long" and its consumer."""
    with line_type(held["long"]["remote_addresses"][0]) as line:
        held["long"]["remote_addresses"] = [line.address]
        yield line


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def finished(engine: LLMEngine) -> RequestOutput:
    """The output of the only request."""
    (output,) = [output for output in drain(engine) if output.finished]
    return output


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_producer_killed_around_a_transfer(
    runner: str, when: str, backend: str, make: MakeEngine, processes: StartEngine, expected: Outputs
) -> None:
    """During: with TCP in the middle of the KV, with NIXL just before it. After: another one takes its place."""
    skip_without(backend)
    producer = processes("kv_producer", model_runner=runner, backend=backend)
    consumer = make("kv_consumer", model_runner=runner, backend=backend)
    held = held_by(producer)
    if when == "before":
        producer.kill()
        output = run_requests(consumer, decodes(held))["long"]
    elif when == "during":
        with relayed(held, EngineLine if backend == "tcp" else Line) as line:
            gate = Gate() if isinstance(line, EngineLine) else Gate(b"Granted")
            (line.data if isinstance(line, EngineLine) else line).spoil = gate
            consumer.add_request("long", *decodes(held)["long"])
            consumer.step()
            assert gate.reached.wait(30)
            producer.kill()
            gate.opened.set()
            output = finished(consumer)
    else:
        consumer.add_request("long", *decodes(held)["long"])
        while not consumer.stats().num_generation_tokens:
            consumer.step()
        producer.kill()
        output = finished(consumer)
    assert tokens(output) == tokens(expected["long"])
    settle(consumer)
    transfers = consumer.stats().transfers
    assert (transfers.loads_done, transfers.loads_failed) == ((1, 0) if when == "after" else (0, 1))
    if when == "after":
        successor = processes("kv_producer", model_runner=runner, backend=backend)
        other = run_requests(consumer, decodes(held_by(successor, "alone")))["alone"]
        assert tokens(other) == tokens(expected["alone"])
        settle(consumer)
        assert (consumer.stats().transfers.loads_done, consumer.stats().transfers.loads_failed) == (2, 0)


@contextlib.asynccontextmanager
async def reading(consumer: EngineProcess, held: dict[str, Any]) -> AsyncIterator[None]:
    """The consumer reads held KV and is stopped there. The block must end it."""
    client = EngineClient(consumer.wait_until_ready())
    with relayed(held) as line:
        line.data.spoil = gate = Gate()
        request = asyncio.ensure_future(prefill_decode.last_output(client, *decodes(held)["long"], "long"))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        yield
        with pytest.raises(EngineUnreachableError, match="has gone away"):
            await request
        gate.opened.set()


@async_test
async def test_consumer_killed_in_a_read(runner: str, make: MakeEngine, processes: StartEngine, clock: Clock) -> None:
    """Its connection is lost, so the blocks are freed at once."""
    consumer, producer = processes("kv_consumer", model_runner=runner), make("kv_producer", model_runner=runner)
    async with reading(consumer, prefilled(producer, ["long"])):
        consumer.kill()
        assert settle(producer) == {"sends_lost": 1}


@async_test
async def test_consumer_hanging_in_a_read(runner: str, make: MakeEngine, processes: StartEngine, clock: Clock) -> None:
    """It keeps its connection without a message: the blocks are freed when their lease expires."""
    consumer, producer = processes("kv_consumer", model_runner=runner), make("kv_producer", model_runner=runner)
    async with reading(consumer, prefilled(producer, ["long"])):
        os.kill(consumer.pid, signal.SIGSTOP)
        clock.now += 29
        producer.step()
        assert producer.stats().transfers.num_held_blocks == 10
        while producer.has_transfers():  # renewals that it has sent may still arrive
            clock.now += 31
            producer.step()
        assert clock.now < 500  # abort_timeout is later
        assert settle(producer) == {"sends_expired": 1}
        consumer.kill()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_transfer_that_takes_too_long(
    runner: str, policy: str, make: MakeEngine, expected: Outputs, request: pytest.FixtureRequest
) -> None:
    held = prefilled(producer := make("kv_producer", model_runner=runner), ["long"])
    clock = request.getfixturevalue("clock")  # of the consumer alone: the lease does not expire
    consumer = make("kv_consumer", model_runner=runner, policy=policy)
    with relayed(held) as line:
        line.data.spoil = gate = Gate()
        consumer.add_request("long", *decodes(held)["long"])
        consumer.step()
        assert gate.reached.wait(30)
        consumer.add_request("alone", PROMPTS["alone"], PARAMS["alone"])  # other requests go on
        while not (done := [output for output in consumer.step() if output.finished]):
            pass
        assert [tokens(output) for output in done] == [tokens(expected["alone"])]
        clock.now += 59
        assert consumer.step() == []
        clock.now += 1
        completion = finished(consumer).outputs[0]
        assert settle(producer) == {"sends_lost": 1}
        gate.opened.set()
    if policy == "recompute":
        assert completion.token_ids == tokens(expected["long"])
    else:
        assert completion.finish_reason == "error"
        assert "9 of 9 KV blocks had not come from engine" in str(completion.stop_reason)
        assert "after 60 s (kv_transfer_timeout)" in str(completion.stop_reason)
    settle(consumer)
    stats = consumer.stats().transfers
    assert (stats.loads_failed, stats.loads_timed_out) == (1, 1)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_different_engines(runner: str, policy: str, make: MakeEngine, expected: Outputs, tmp_path: Path) -> None:
    """The differences are detected at once, and named."""
    make_checkpoint(tmp_path, "llama", **TEXT_MODEL, seed=1)
    producer = make("kv_producer", model_runner=runner, model=tmp_path, skip_tokenizer_init=True, dtype="bfloat16")
    consumer = make("kv_consumer", model_runner=runner, policy=policy)
    held = prefilled(producer, ["long"])
    completion = run_requests(consumer, decodes(held))["long"].outputs[0]
    if policy == "fail":
        reason = str(completion.stop_reason)
        assert f"its fingerprint is '{held['long']['remote_engine']['fingerprint']}', and '" in reason
        assert "its dtype is 'bfloat16', and 'float32' here" in reason
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
    else:
        assert completion.token_ids == tokens(expected["long"])
    assert "sends_declined" in settle(producer)
    settle(consumer)
    assert consumer.stats().transfers.loads_failed == 1


@async_test
async def test_proxy_with_a_prefill_engine_that_dies(
    runner: str, text_model: Path, processes: StartEngine, expected: Outputs
) -> None:
    """Before a request, and while it computes one: the decode engine computes prompts itself."""
    prefill = processes("kv_producer", model_runner=runner)
    async with AsyncLLM(**engine_settings(text_model, "kv_consumer", model_runner=runner)) as llm:
        with Line(prefill.wait_until_ready()) as line:
            proxy = DisaggregatedLLM(EngineClient(line.address), LocalEngine(llm))
            assert await generate(proxy, "alone") == tokens(expected["alone"])
            os.kill(prefill.pid, signal.SIGSTOP)
            line.asked.clear()
            request = asyncio.ensure_future(generate(proxy, "long"))
            assert await asyncio.to_thread(line.asked.wait, 30)
            assert not request.done()
            impatient = DisaggregatedLLM(EngineClient(line.address), LocalEngine(llm), prefill_timeout=0.0)
            assert await generate(impatient, "one") == tokens(expected["one"])
            assert impatient.counts == ProxyStats(num_requests=1, num_prefills_failed=1)
            prefill.kill()
            assert await request == tokens(expected["long"])
        assert await generate(proxy, "two") == tokens(expected["two"])
        assert proxy.counts == ProxyStats(num_requests=3, num_prefilled=1, num_prefills_failed=2)
        await LocalEngine(llm).drain()
        assert llm.stats().transfers.loads_done == 1


@async_test
async def test_proxy_with_a_prefill_engine_that_refuses(text_model: Path, expected: Outputs) -> None:
    """It has another role, or no connector at all."""
    settings = engine_settings(text_model, "kv_consumer", model_runner="v2")
    async with AsyncLLM(**settings) as llm, AsyncLLM(**{**settings, "kv_transfer_config": None}) as plain:
        for prefill in (llm, plain):
            proxy = DisaggregatedLLM(LocalEngine(prefill), LocalEngine(llm))
            assert await generate(proxy, "long") == tokens(expected["long"])
            assert proxy.counts == ProxyStats(num_requests=1, num_prefills_failed=1)


@async_test
async def test_proxy_with_a_dead_decode_engine(text_model: Path, processes: StartEngine, expected: Outputs) -> None:
    """Pending and later requests fail, and the prefill engine frees its blocks."""
    decode = processes("kv_consumer", model_runner="v2", **prefill_decode.SIZE)
    async with AsyncLLM(**engine_settings(text_model, "kv_producer", model_runner="v2")) as llm:
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


@pytest.mark.parametrize("how", ["connection", "proxy", "generator"])
@async_test
async def test_client_that_leaves_before_decode(how: str, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    async with AsyncLLM(**engine_settings(text_model, "kv_producer", model_runner="v2")) as llm:
        server, ended = EngineServer(engine := LocalEngine(llm)), threading.Event()
        await server.start(reserve())
        client = EngineClient(server.address)
        assert (await prefill_decode.last_output(client, PROMPTS["alone"], params, "read")).kv_transfer_params

        async def leaving(*arguments: Any, **options: Any) -> Any:
            async for output in engine.generate(*arguments, **options):
                yield output
            raise asyncio.CancelledError

        with contextlib.suppress(asyncio.CancelledError), monkeypatch.context() as patched:
            if how == "connection":
                async with client._call(Generate(PROMPTS["long"], params, "r")) as (reader, _):
                    await reader.readexactly(1)
            elif how == "proxy":
                await DisaggregatedLLM(SimpleNamespace(generate=leaving), client).prefill([7] * 9, PARAMS["long"], "r")  # type: ignore[arg-type]
            else:  # its output does not arrive
                patched.setattr("fleetfoot.async_llm._ResultQueue.put", lambda results, item: ended.set())
                request = asyncio.ensure_future(anext(engine.generate(PROMPTS["long"], params, "r")))
                assert await asyncio.to_thread(ended.wait, 30)
                request.cancel()
        await llm.abort("read")
        counters = (await engine.drain())["scheduler"]["transfers"]["counters"]
        assert counters == ({"sends_evicted": 2} if how == "generator" else {"sends_evicted": 1, "sends_declined": 1})
        await server.close()


def test_engine_that_cannot_start(processes: StartEngine, capfd: pytest.CaptureFixture[str]) -> None:
    process = processes("kv_consumer", model_runner="v2", max_num_seqs=0)
    with pytest.raises(RuntimeError, match="has ended with code 1 before it was ready"):
        process.wait_until_ready()
    assert "max_num_seqs" in capfd.readouterr().err
