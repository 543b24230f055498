"""Engines that are killed, connections that are slow or cut: the tokens stay the same, and every block is released.

One side of a pair is in the test's own process, where its steps and its clock can be held; the other is killed.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import prefill_decode
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import TEXT_MODEL, drain, run_requests
from tests.helpers.kv_bench import Clock
from tests.helpers.kv_pair import EngineLine, Gate, Line, changed, opened, skip_without
from tests.helpers.prefill_decode import (
    PARAMS,
    PROMPTS,
    REQUESTS,
    client_of,
    decodes,
    engine_settings,
    generate,
    kill,
    last_output,
    prefilled,
    settle,
)
from tests.helpers.streams import async_test

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.outputs import RequestOutput
from fleetfoot.server.engine_group import EngineGroup

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

    def start_one(role: str, *, model: Path = text_model, **settings: Any) -> EngineProcess:
        process = prefill_decode.start(model, role, **settings)
        request.addfinalizer(process.stop)
        return process

    return start_one


def held_by(producer: EngineProcess, name: str = "long") -> dict[str, Any]:
    """The requests for the decode engine, for one of REQUESTS that the producer holds."""
    params = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})

    async def prefill() -> dict[str, Any] | None:
        async with client_of(producer) as client:
            return (await last_output(client, PROMPTS[name], params, name)).kv_transfer_params

    held = asyncio.run(prefill())
    assert held is not None
    return {name: held}


@contextlib.contextmanager
def relayed(held: dict[str, Any], line_type: type[Line] = EngineLine) -> Iterator[Line]:
    """A relay between the producer of "long" and its consumer."""
    with line_type(opened(held["long"]).addresses[0]) as line:
        held["long"] = changed(held["long"], addresses=[line.address])
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
        kill(producer)
        output = run_requests(consumer, decodes(held))["long"]
    elif when == "during":
        with relayed(held, EngineLine if backend == "tcp" else Line) as line:
            gate = Gate() if isinstance(line, EngineLine) else Gate(b"Granted")
            (line.data if isinstance(line, EngineLine) else line).spoil = gate
            consumer.add_request("long", *decodes(held)["long"])
            consumer.step()
            assert gate.reached.wait(30)
            kill(producer)
            gate.opened.set()
            output = finished(consumer)
    else:
        consumer.add_request("long", *decodes(held)["long"])
        while not consumer.stats().num_generation_tokens:
            consumer.step()
        kill(producer)
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


def test_producer_of_states_killed_during_a_transfer(
    runner: str, make: MakeEngine, processes: StartEngine, hybrid_model: Path, expected_of_hybrid: Outputs
) -> None:
    """Its KV has arrived, and its state has not: all of the prompt is computed."""
    producer = processes("kv_producer", model_runner=runner, model=hybrid_model)
    consumer = make("kv_consumer", model_runner=runner, model=hybrid_model)
    held = held_by(producer)
    with relayed(held) as line:
        state = 9 * consumer.core.executor.layout.group_bytes[0]  # type: ignore[attr-defined]
        arrived = 0

        def spoil(content: bytes, offset: int) -> bytes:
            nonlocal arrived
            arrived = offset + len(content)
            if arrived > state + 1000:
                gate(content, offset)
            return content

        gate = Gate()
        line.data.spoil = spoil
        consumer.add_request("long", *decodes(held)["long"])
        consumer.step()
        assert gate.reached.wait(30)
        kill(producer)
        gate.opened.set()
        output = finished(consumer)
    assert tokens(output) == tokens(expected_of_hybrid["long"])
    settle(consumer)
    assert (consumer.stats().transfers.loads_done, consumer.stats().transfers.loads_failed) == (0, 1)


@contextlib.asynccontextmanager
async def reading(consumer: EngineProcess, held: dict[str, Any]) -> AsyncIterator[None]:
    """The consumer reads held KV and is stopped there. The block must end it."""
    async with client_of(consumer) as client:
        with relayed(held) as line:
            line.data.spoil = gate = Gate()
            request = asyncio.ensure_future(last_output(client, *decodes(held)["long"], "long"))
            assert await asyncio.to_thread(gate.reached.wait, 30)
            yield
            request.cancel()
            gate.opened.set()


@async_test
async def test_consumer_killed_in_a_read(runner: str, make: MakeEngine, processes: StartEngine, clock: Clock) -> None:
    """Its connection is lost, so the blocks are freed at once."""
    consumer, producer = processes("kv_consumer", model_runner=runner), make("kv_producer", model_runner=runner)
    async with reading(consumer, prefilled(producer, ["long"])):
        kill(consumer)
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
        kill(consumer)


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
        assert f"its fingerprint is '{opened(held['long']).engine['fingerprint']}', and '" in reason
        assert "its dtype is 'bfloat16', and 'float32' here" in reason
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
    else:
        assert completion.token_ids == tokens(expected["long"])
    assert "sends_declined" in settle(producer)
    settle(consumer)
    assert consumer.stats().transfers.loads_failed == 1


async def have_sent() -> None:
    """Let requests that have been made reach the sockets: they wait for nothing before."""
    for _ in range(10):
        await asyncio.sleep(0)


@async_test
async def test_engines_of_a_group_that_die(processes: StartEngine, expected: Outputs) -> None:
    """A prefill engine hangs, and dies while it has a request: a decode engine computes the prompts. A decode engine
    dies while it has requests, old and new: they continue on the other one."""
    prefill, *others = (processes(role, model_runner="v2") for role in ("kv_producer", "kv_consumer", "kv_consumer"))
    group = EngineGroup((prefill.address,), tuple(engine.address for engine in others))
    async with client_of(group) as client, client_of(replace(group, prefill_timeout=0.0)) as impatient:
        assert await generate(client, "alone") == tokens(expected["alone"])
        os.kill(prefill.pid, signal.SIGSTOP)
        assert await generate(impatient, "one") == tokens(expected["one"])
        request = asyncio.ensure_future(generate(client, "long"))
        await have_sent()
        kill(prefill)
        assert await request == tokens(expected["long"])
        begun = [client.generate(*REQUESTS[name], name) for name in REQUESTS]
        last = dict(zip(REQUESTS, [await anext(outputs) for outputs in begun], strict=True))
        for engine in others:
            os.kill(engine.pid, signal.SIGSTOP)
        # those above may have ended; of these some begin at the engine that dies
        late = [
            asyncio.ensure_future(last_output(client, *REQUESTS["one"], f"late {number}"))
            for number in range(len(REQUESTS) + 1)
        ]
        await have_sent()
        kill(others[0])
        os.kill(others[1].pid, signal.SIGCONT)
        for name, outputs in zip(REQUESTS, begun, strict=True):
            async for output in outputs:  # none, if the first output was that of all steps together
                last[name] = output
            assert (tokens(last[name]), last[name].outputs[0].finish_reason) == (tokens(expected[name]), "length")
        assert [tokens(output) for output in await asyncio.gather(*late)] == [tokens(expected["one"])] * len(late)
        counters = (await client.call("metrics"))[-1]["counters"]
        assert counters["proxy_prefills"] == 1 and counters["proxy_requests_resumed"] >= 1
