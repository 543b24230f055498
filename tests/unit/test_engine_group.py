"""A group of engines that this process plays: what is sent to them, and what becomes of requests when they are lost."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.helpers.streams import async_test

from fleetfoot.engine.client import EngineClient
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import EngineRequest, InputProcessor
from fleetfoot.engine.link import EngineLink, engine_keys
from fleetfoot.engine.wire import (
    Call,
    ClientMessage,
    Dead,
    EngineMessage,
    EngineState,
    Failed,
    Finish,
    Hello,
    Interruption,
    Outputs,
    Ready,
    Refused,
    Reply,
    Stop,
    decode_as,
)  # fmt: skip
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput, SequenceEnd
from fleetfoot.sampling.request_params import request_seed
from fleetfoot.server.engine_group import MAX_LOST, STUCK_S, EngineGroup, GroupLink
from fleetfoot.server.own_engine import WINDOW_S, OwnEngine, OwnEngineLink, RestartLimit
from fleetfoot.server.replicas import Replicas, ReplicasLink, devices_of
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.curve import ClientCheck, listen_with

SETTINGS = {"dtype": "float32", "tokenizer": "abc", "KV": "in blocks of 16"}
FACTS = Ready(
    *(1, "m", "m", None, 100, 64, 640, [0], 5, False, {}, None, "v1"),
    settings=SETTINGS, weights="w", kv_connector="NixlConnector", kv_role="kv_both",
)  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=9, output_kind=RequestOutputKind.DELTA)
TRANSFER = {"do_remote_prefill": True, "offer": "of a test"}


class PlayedEngine:
    """An engine of which the test takes and sends the messages."""

    def __init__(self, facts: Ready = FACTS, address: str = "tcp://127.0.0.1:0") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.address = str(self._socket.last_endpoint, "ascii").rstrip("\0")
        self._facts = facts
        self._client = b""
        self._decode = decode_as(ClientMessage)

    async def next(self) -> Any:
        """The next message, but for the first of each client, which is answered."""
        while True:
            self._client, content = await self._socket.recv_multipart()
            message: ClientMessage = self._decode(content)
            if not isinstance(message, Hello):
                return message
            self.send(self._facts)

    def send(self, message: EngineMessage) -> None:
        self._socket.send_multipart((self._client, msgspec.msgpack.encode(message)))

    def generate(self, request: EngineRequest, *tokens: int, end: RequestStatus | None = None, **fields: Any) -> None:
        """Send tokens of the request's first sequence."""
        last = None if end is None else SequenceEnd(int(end), None, 0, 0, 0, 0.0, fields.get("transfer"), None)
        self.send(Outputs(0.0, [EngineOutput(request.number, list(tokens), end=last)]))

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def played(
    *numbers: int, facts: Ready = FACTS, **options: Any
) -> AsyncIterator[tuple[EngineClient, list[PlayedEngine]]]:
    """A client of ``numbers`` of prefill and decode engines, which are connected."""
    engines = [PlayedEngine(facts) for _ in range(sum(numbers))]
    addresses = [engine.address for engine in engines]
    link = GroupLink(EngineGroup(tuple(addresses[: numbers[0]]), tuple(addresses[numbers[0] :]), **options))
    client = EngineClient(link)
    greetings = [asyncio.ensure_future(engine.next()) for engine in engines]
    try:
        await client.start()
        for greeting in greetings:
            greeting.cancel()
        yield client, engines
    finally:
        client.close()
        for engine in engines:
            engine.close()


@async_test
async def test_a_prompt_goes_to_prefill_and_then_to_decode() -> None:
    async with played(1, 1) as (client, (prefill, decode)):
        stream = await client.submit([5, 6, 7], PARAMS, "r", 0)
        first = await prefill.next()
        assert (first.max_tokens, first.kv_transfer_params) == (1, {"do_remote_decode": True})
        prefill.generate(first, 9, end=RequestStatus.FINISHED_LENGTH, transfer=TRANSFER)
        request = await decode.next()
        assert (request.request_id, request.max_tokens, request.kv_transfer_params) == ("r", 9, TRANSFER)
        decode.generate(request, 8)
        assert (await anext(stream)).outputs[0].token_ids == [8]
        await stream.aclose()
        assert await decode.next() == Finish(request.number, int(RequestStatus.FINISHED_ABORTED))


@async_test
async def test_an_engine_that_answers_nothing_gets_no_requests() -> None:
    async with played(0, 2) as (client, (first, second)):
        link: Any = client._link
        stuck = link._engines[0]
        link.check_progress(stuck.last_message_ts + 3)
        pings = [await engine.next() for engine in (first, second)]
        assert [ping.method for ping in pings] == ["ping", "ping"]
        second.send(Reply(pings[1].number))
        while link._engines[1].is_asked:
            await asyncio.sleep(0)
        link._engines[1].last_message_ts += 60
        for seconds in (8, STUCK_S):
            link.check_progress(stuck.last_message_ts + seconds)
        while not client.degraded:
            await asyncio.sleep(0)
        assert stuck.title in client.degraded and link._engines[1].title not in client.degraded
        assert not client.interruption
        for number in range(2):
            await client.submit([5, 6, 7], PARAMS, f"r{number}", 0)
            assert (await second.next()).request_id == f"r{number}"
        asked = asyncio.ensure_future(client.call("metrics"))
        second.send(Reply((await second.next()).number, {}))
        assert (await asked)[-1]["gauges"]["proxy_engines_unavailable"] == 1
        first.send(Reply(pings[0].number))
        first.send(Reply((await first.next()).number))
        while client.degraded:
            await asyncio.sleep(0)


@async_test
async def test_requests_of_an_engine_that_answers_nothing_continue_elsewhere() -> None:
    async with played(0, 2) as (client, (first, second)):
        link: Any = client._link
        stuck, other = link._engines
        stream = await client.submit([5, 6, 7], PARAMS, "r", 0)
        request = await first.next()
        first.generate(request, 8)
        assert (await anext(stream)).outputs[0].token_ids == [8]
        other.last_message_ts += 90
        link.check_progress(stuck.last_message_ts + 60)  # this process did not run
        assert not stuck.is_stuck
        for seconds in (64, 68, 70):
            link.check_progress(stuck.last_message_ts + seconds)
        resumed = await second.next()
        assert (resumed.request_id, resumed.resumed) == ("r", [[8]])
        ping, ended, last = [await first.next() for _ in range(3)]
        assert (ping.method, last.method) == ("ping", "ping")
        assert ended == Finish(request.number, int(RequestStatus.FINISHED_ABORTED))
        first.generate(request, 99)  # it goes on: what was on its way is nobody's
        first.send(Reply(ping.number))
        while stuck.is_asked:
            await asyncio.sleep(0)
        assert stuck.is_stuck
        first.send(Reply(last.number))
        while client.degraded:
            await asyncio.sleep(0)
        second.generate(resumed, 9, end=RequestStatus.FINISHED_STOPPED)
        assert (await anext(stream)).outputs[0].token_ids == [9]


@async_test
async def test_a_long_step_on_a_cpu_is_no_halt(tmp_path: Path) -> None:
    """A process of this machine is seen to work. Of an engine elsewhere that is not known: its requests wait."""
    facts = msgspec.structs.replace(FACTS, computes_on_cpu=True)
    async with played(0, 2, facts=facts) as (client, (first, _)):
        far: Any = client._link
        await client.submit([5, 6, 7], PARAMS, "r", 0)
        await first.next()
        for seconds in (0, 4, 8, STUCK_S + 1):
            far.check_progress(far._engines[0].last_message_ts + seconds)
        assert far._engines[0].is_stuck and far._engines[0].load == 1
    seconds_of_cpu = itertools.count(0, 2)
    for works in (True, False):
        engines = [PlayedEngine(facts, f"ipc://{tmp_path}/{works}{number}") for number in range(2)]
        use = lambda _, works=works: (next(seconds_of_cpu) if works else 0.0, False)  # noqa: E731
        link: Any = ReplicasLink(Replicas(tuple(engine.address for engine in engines)), use)
        client = EngineClient(link)
        greetings = [asyncio.ensure_future(engine.next()) for engine in engines]
        await client.start()
        begin = max(engine.last_message_ts for engine in link._engines)
        for seconds in range(0, 30, 2):
            link.check_progress(begin + seconds)
        assert [engine.is_stuck for engine in link._engines] == [not works] * 2
        client.close()
        for greeting in greetings:
            greeting.cancel()
        for engine in engines:
            engine.close()


@async_test
async def test_a_decode_engine_that_refuses_an_offer() -> None:
    """It has expired on its way, for instance: the client's request is valid, and is computed without. If that is
    refused too, the client gets the error."""
    async with played(1, 1) as (client, (prefill, decode)):
        stream = await client.submit([5, 6, 7], PARAMS, "r", 0)
        first = await prefill.next()
        prefill.generate(first, 9, end=RequestStatus.FINISHED_LENGTH, transfer=TRANSFER)
        assert (await decode.next()).kv_transfer_params == TRANSFER
        decode.send(Refused(0, Failed("ValueError", "the offer has expired")))
        request = await decode.next()
        assert (request.number, request.request_id, request.kv_transfer_params) == (0, "r", None)
        released = await prefill.next()
        assert (released.method, released.arguments) == ("abort_requests", [[first.request_id]])
        decode.send(Refused(0, Failed("ValueError", "the prompt is wrong")))
        with pytest.raises(ValueError, match="the prompt is wrong"):
            await anext(stream)


@async_test
async def test_what_prefill_engines_cannot_do() -> None:
    """An error and a refusal: the decode engine gets the request as it is. The client leaves: KV is released."""
    async with played(1, 1) as (client, (prefill, decode)):
        await client.submit([5, 6, 7], PARAMS, "r", 0)
        prefill.generate(await prefill.next(), end=RequestStatus.FINISHED_ERROR)
        assert (await decode.next()).kv_transfer_params is None
        release = await prefill.next()
        assert isinstance(release, Call) and release.method == "abort_requests"
        await client.submit([5, 6, 7], PARAMS, "s", 0)
        request = await prefill.next()
        prefill.send(Refused(request.number, Failed("ValueError", "no")))
        assert (await decode.next()).request_id == "s"
        assert (await prefill.next()).method == "abort_requests"
        stream = await client.submit([5, 6, 7], PARAMS, "t", 0)
        request = await prefill.next()
        await stream.aclose()
        released = await prefill.next()
        assert (released.method, released.arguments) == ("abort_requests", [[request.request_id]])


@async_test
async def test_a_sequence_that_ends_before_the_request_has_an_engine() -> None:
    """The other one, of number 0, continues."""
    async with played(0, 1) as (client, (decode,)):
        await client.submit([5, 6, 7], replace(PARAMS, temperature=1.0, n=2), "r", 0)
        client._send(Finish(1, int(RequestStatus.FINISHED_STOPPED)))
        request = await decode.next()
        assert (request.number, request.resumed) == (0, [[], None])


@async_test
async def test_default_seeds_are_those_of_the_engine_that_is_lost() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    async with played(0, 2) as (client, (first, second)):
        stream = await client.submit([5, 6, 7], params, "r", 0)
        request = await first.next()
        assert request.seed_number is None
        first.send(Outputs(0.0, [EngineOutput(request.number, [1], seed_number=41)]))
        assert (await anext(stream)).outputs[0].token_ids == [1]
        first.close()
        again = await second.next()
        assert (again.resumed, again.seed_number) == ([[1]], 41)
    numbers = InputProcessor(vocab_size=99, max_model_len=64, eos_token_ids=[0], tokenizer=None, max_logprobs=0, seed=7)
    (begun,) = numbers.make_requests(copy(request))
    (resumed,) = numbers.make_requests(again)
    (later,) = numbers.make_requests(request)
    assert begun.seed == request_seed(None, 0, 7, 0)
    assert resumed.seed == request_seed(None, 0, 7, 41)
    assert later.seed == request_seed(None, 0, 7, 42)


@async_test
async def test_the_same_engine_started_again(tmp_path: Path) -> None:
    """At its address. What it is now reaches the client, and calls under way fail. One that differs ends the client."""
    engine = PlayedEngine(address=f"ipc://{tmp_path}/engine")
    client = EngineClient(OwnEngineLink(OwnEngine(engine.address)))
    greeting = asyncio.ensure_future(engine.next())
    await client.start()
    greeting.cancel()
    stream = await client.submit([5, 6, 7], PARAMS, "r", 0)
    engine.generate(await engine.next(), 8)
    assert (await anext(stream)).outputs[0].token_ids == [8]
    call = asyncio.ensure_future(client.call("sleep"))
    assert (await engine.next()).method == "sleep"
    engine.close()
    with pytest.raises(RuntimeError, match="is lost"):
        await call
    assert client.interruption == OwnEngineLink.no_engine
    with pytest.raises(EngineDeadError, match="is started again"):
        await client.call("metrics")
    engine = PlayedEngine(msgspec.structs.replace(FACTS, pid=2, max_model_len=32), engine.address)
    request = await engine.next()
    assert request.resumed == [[8]]
    engine.generate(request, 9, end=RequestStatus.FINISHED_STOPPED)
    assert [output.outputs[0].token_ids async for output in stream] == [[9]]
    assert (client.facts.pid, client.facts.max_model_len, client.interruption) == (2, 32, "")
    stream = await client.submit([5, 6, 7], PARAMS, "s", 0)
    engine.generate(await engine.next(), 8)
    engine.close()
    engine = PlayedEngine(msgspec.structs.replace(FACTS, vocab_size=7), engine.address)
    assert isinstance(await engine.next(), Stop)
    with pytest.raises(EngineDeadError, match="the new process differs: the engines"):
        _ = [output async for output in stream]
    client.close()
    engine.close()


@async_test
async def test_replicas_get_requests_by_prefix_and_load(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(FACTS, max_model_len=400, num_kv_tokens=4000)
    engines = [PlayedEngine(facts, f"ipc://{tmp_path}/{number}") for number in range(2)]
    client = EngineClient(ReplicasLink(Replicas(tuple(engine.address for engine in engines))))
    greetings = [asyncio.ensure_future(engine.next()) for engine in engines]
    await client.start()
    for greeting in greetings:
        greeting.cancel()
    names = iter(range(99))

    async def goes_to(prompt: list[int], **options: Any) -> int:
        await client.submit(prompt, PARAMS, f"r{next(names)}", 0, **options)
        waiting = [asyncio.ensure_future(engine.next()) for engine in engines]
        (done,), others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        assert isinstance(done.result(), EngineRequest)
        return waiting.index(done)

    one, other = [*range(40)] * 4, [*range(50, 90)] * 4
    first = await goes_to(one)
    assert await goes_to(other) == 1 - first
    for more in ([1], [2, 3]):  # beginnings of 128 tokens
        assert await goes_to(one + more) == first
        assert await goes_to(other + more) == 1 - first
    assert [await goes_to(one) for _ in range(3)] == [first] * 3
    assert [await goes_to(one) for _ in range(5)].count(1 - first) > 0  # it has much more to do
    loads = [engine.load for engine in client._link._engines]  # type: ignore[attr-defined]
    assert await goes_to([7]) == loads.index(min(loads))
    assert [await goes_to([8], rank=rank) for rank in (1, 0, 0)] == [1, 0, 0]
    place = await goes_to([9], session="a conversation")
    await goes_to([10], rank=1 - place)
    await goes_to([10], rank=1 - place)
    assert await goes_to([11], session="a conversation") == place
    await client.stop()
    assert [type(await engine.next()) for engine in engines] == [Stop, Stop]
    client.close()
    for engine in engines:
        engine.close()


@async_test
async def test_a_profile_has_the_files_of_all_engines() -> None:
    async with played(0, 2) as (client, engines):
        files = asyncio.ensure_future(client.call("stop_profile"))
        for number, engine in enumerate(engines):
            engine.send(Reply((await engine.next()).number, [f"{number}.json"]))
        assert await files == ["0.json", "1.json"]


@async_test
async def test_how_often_processes_are_started_again() -> None:
    now, waits = [1000.0], list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    limit = RestartLimit(9, lambda: now[0], sleep)
    for number in range(9):
        assert await limit.wait(f"cause {number}") is None
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 10, 10]  # none before the first
    assert await limit.wait("another") == "cause 0"
    now[0] += WINDOW_S
    assert await limit.wait("later") is None
    assert len(waits) == 8


@async_test
async def test_a_request_that_loses_engine_after_engine_ends() -> None:
    async with played(1, MAX_LOST + 1) as (client, (_, *engines)):
        stream = await client.submit([5, 6, 7], replace(PARAMS, prompt_logprobs=1), "r", 0)
        for engine in engines[:MAX_LOST]:
            request = await engine.next()
            engine.generate(request, 8)
            engine.send(Dead("it has failed", ""))
        last = [output async for output in stream][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "error")
        assert "3 engines were lost" in str(last.outputs[0].stop_reason)


@async_test
async def test_no_engine_is_left() -> None:
    async with played(1, 1, engine_timeout=0.0) as (client, engines):
        for engine in engines:
            engine.close()
        with pytest.raises(EngineDeadError, match="no engine can be reached"):
            async for _ in client.generate([5, 6, 7], PARAMS, "r"):
                pass
        assert client.interruption == "no engine can be reached"
        with pytest.raises(RuntimeError, match="no engine can be reached"):
            await client.call("ping")


@async_test
async def test_an_engine_that_restarts_its_workers_gets_no_requests() -> None:
    async with played(1, 2) as (client, engines):
        call = asyncio.ensure_future(client.call("check_integrity"))
        asked = [await engine.next() for engine in engines]
        engines[1].send(Interruption("restarts"))
        for engine, message in zip(engines, asked, strict=True):
            engine.send(Reply(message.number))
        await call
        assert client.interruption == ""
        await client.submit([5, 6, 7], replace(PARAMS, prompt_logprobs=1), "r", 0)
        assert (await engines[2].next()).request_id == "r"


def other_facts(**fields: Any) -> Ready:
    return msgspec.structs.replace(FACTS, **fields)


DIFFERENT: dict[str, Ready] = {
    "vocab_size, 7": other_facts(vocab_size=7),
    "max_model_len, 32": other_facts(max_model_len=32),
    "eos_token_ids, [1]": other_facts(eos_token_ids=[1]),
    "sampling_defaults, {'top_k': 3}": other_facts(sampling_defaults={"top_k": 3}),
    "max_logprobs, 9": other_facts(max_logprobs=9),
    "has_priority, True": other_facts(has_priority=True),
    "weights, 'v'": other_facts(weights="v"),
    "dtype, 'bfloat16'": other_facts(settings={**SETTINGS, "dtype": "bfloat16"}),
    "tokenizer, 'abd'": other_facts(settings={**SETTINGS, "tokenizer": "abd"}),
    "KV, 'in blocks of 8'": other_facts(settings={**SETTINGS, "KV": "in blocks of 8"}),
}
NEVER: dict[str, tuple[Ready, Ready]] = {
    "prefill-0 at tcp://.* never hands over KV: its kv_connector is 'SharedStorageConnector'": (
        other_facts(kv_connector="SharedStorageConnector", kv_role=None),
        FACTS,
    ),
    "prefill-0 at tcp://.* never hands over KV: .* 'kv_consumer'": (other_facts(kv_role="kv_consumer"), FACTS),
    "decode-0 at tcp://.* never takes over KV: .* 'kv_producer'": (FACTS, other_facts(kv_role="kv_producer")),
    "decode-0 at tcp://.* never takes over KV: its kv_connector is None": (
        FACTS,
        other_facts(kv_connector=None, kv_role=None),
    ),
}


async def refusal(prefill: Ready, decode: Ready) -> str:
    """Why a group of two engines does not start."""
    engines = PlayedEngine(prefill), PlayedEngine(decode)
    client = EngineClient(GroupLink(EngineGroup((engines[0].address,), (engines[1].address,))))
    greetings = [asyncio.ensure_future(engine.next()) for engine in engines]
    with pytest.raises(ValueError) as raised:
        await client.start()
    client.close()
    for greeting, engine in zip(greetings, engines, strict=True):
        greeting.cancel()
        engine.close()
    return str(raised.value)


@pytest.mark.parametrize("difference", DIFFERENT)
@async_test
async def test_engines_that_would_answer_differently(difference: str) -> None:
    """Both sides and the setting are named."""
    text = await refusal(DIFFERENT[difference], FACTS)
    name, value = difference.split(", ", 1)
    assert f"; {name} is " in text or f": {name} is " in text
    assert f"{value} of prefill-0" in text and " of decode-0" in text
    assert "decode-0 at tcp://127.0.0.1:" in text and "prefill-0 at tcp://127.0.0.1:" in text


@pytest.mark.parametrize("message", NEVER)
@async_test
async def test_prefill_that_never_happens_is_refused_at_the_start(message: str) -> None:
    assert re.search(message, await refusal(*NEVER[message]))


async def used_by(client: EngineClient, *engines: PlayedEngine) -> set[PlayedEngine]:
    """The engines that get requests, of which there are more than engines."""
    waiting = {asyncio.ensure_future(engine.next()): engine for engine in engines}
    found, streams = set(), []
    for number in range(2 * len(engines)):
        streams.append(await client.submit([5], replace(PARAMS, n=1, prompt_logprobs=1), f"used {number}", 0))
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            engine, request = waiting.pop(task), task.result()
            found.add(engine)
            engine.generate(request, 8, end=RequestStatus.FINISHED_LENGTH)
            waiting[asyncio.ensure_future(engine.next())] = engine
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:  # their ids are used again
        async for _ in stream:
            pass
    return found


async def until(client: EngineClient, condition: Callable[[], Any]) -> None:
    """Wait for changes of the group's engines."""
    link: Any = client._link
    while not condition():
        await asyncio.shield(link._changed)


def refusals(client: EngineClient) -> list[bool]:
    """Of each engine."""
    link: Any = client._link
    return [bool(engine.refusal) for engine in link._engines]


async def metrics(client: EngineClient, *engines: PlayedEngine) -> Any:
    """The proxy's own."""
    asked = asyncio.ensure_future(client.call("metrics"))
    for engine in engines:
        call = await engine.next()
        assert call.method == "metrics"
        engine.send(Reply(call.number, {}))
    return (await asked)[-1]


@async_test
async def test_an_engine_that_comes_back_with_earlier_weights() -> None:
    """It is not used before it has those of the group, which each proxy can give it. It is paused if they are."""
    state = EngineState(1, "folder", is_paused=True)
    async with played(0, 2) as (client, (first, second)):
        update = asyncio.ensure_future(client.call("reload_weights", "folder", mode="keep"))
        for engine in (first, second):
            call = await engine.next()
            assert (call.method, call.arguments) == ("reload_weights", ["folder"])
            assert call.keywords == {"mode": "keep", "weight_version": 1}  # of the proxy: the same for all
            engine.send(other_facts(weights="w-version-1", weight_version=1, state=state))
            engine.send(Reply(call.number, 1))
        assert await update == 1
        assert client.facts.weight_version == 1
        second.close()
        again = PlayedEngine(FACTS, second.address)
        call = await again.next()
        assert (call.method, msgspec.convert(call.arguments[0], EngineState)) == ("bring_to", state)
        assert (await metrics(client, first, again))["gauges"]["proxy_engines_refused"] == 1
        assert await used_by(client, first) == {first}
        again.send(other_facts(weights="w-version-1", weight_version=1, state=state))
        again.send(Reply(call.number))
        await until(client, lambda: refusals(client) == [False, False])
        assert await used_by(client, first, again) == {first, again}
        again.close()
        again = PlayedEngine(other_facts(weights="w-version-1", weight_version=1), second.address)
        call = await again.next()  # it has the weights, and is not paused
        assert call.method == "bring_to" and refusals(client) == [False, True]
        again.send(Reply(call.number))
        await until(client, lambda: refusals(client) == [False, False])
        again.close()


@async_test
async def test_an_engine_that_comes_while_others_are_called() -> None:
    """It is as it was before the call, which it has not got."""
    asleep = EngineState(asleep=["weights", "kv_cache"], sleep_level=1)
    async with played(0, 2, facts=other_facts(state=asleep)) as (client, (first, second)):
        second.close()
        await until(client, lambda: client._link._engines[1].link is None)  # type: ignore[attr-defined]
        wake_up = asyncio.ensure_future(client.call("wake_up"))
        call = await first.next()
        again = PlayedEngine(other_facts(state=asleep), second.address)
        asked = asyncio.ensure_future(again.next())
        await until(client, lambda: client._link._engines[1].link is not None)  # type: ignore[attr-defined]
        first.send(FACTS)
        first.send(Reply(call.number))
        await wake_up
        sent = await asked
        assert (sent.method, msgspec.convert(sent.arguments[0], EngineState)) == ("bring_to", EngineState())
        assert refusals(client) == [False, True]
        again.send(FACTS)
        again.send(Reply(sent.number))
        await until(client, lambda: refusals(client) == [False, False])
        again.close()


@async_test
async def test_weights_that_came_by_another_proxy() -> None:
    """An engine without them has come first: the one that has them says where they are."""
    old, new = PlayedEngine(), PlayedEngine(other_facts(weights="w", weight_version=7, state=EngineState(7, "there")))
    client = EngineClient(GroupLink(EngineGroup((), (old.address, new.address))))
    greetings = [asyncio.ensure_future(engine.next()) for engine in (old, new)]
    await client.start()
    greetings[1].cancel()
    call = await greetings[0]
    assert (call.method, call.arguments[0][:2]) == ("bring_to", [7, "there"])
    client.close()
    for engine in (old, new):
        engine.close()


@async_test
async def test_weights_that_the_proxy_cannot_give(caplog: pytest.LogCaptureFixture) -> None:
    """They came as patches. Without an engine that has them, no request is answered."""
    async with played(0, 2, engine_timeout=0.0) as (client, (first, second)):
        state = EngineState(5, has_own_weights=True)
        for engine in (first, second):
            engine.send(other_facts(weights="w-version-5", weight_version=5, state=state))
        await until(client, lambda: [engine.facts.weight_version for engine in client._link._engines] == [5, 5])
        second.close()
        again = PlayedEngine(FACTS, second.address)
        greeting = asyncio.ensure_future(again.next())
        await until(client, lambda: refusals(client) == [False, True])
        await asyncio.sleep(0)
        greeting.cancel()
        assert "needs weights that this proxy cannot give it" in caplog.text
        assert "has weights of version 0 (w), and answers are of version 5 (w-version-5); it is not used" in caplog.text
        patch = asyncio.ensure_future(client.call("apply_sparse_weight_patches", [{}]))
        call = await first.next()  # alone: patches are of the newest weights
        assert call.keywords == {"weight_version": 6}
        first.send(Reply(call.number, error=Failed("ValueError", "no")))
        with pytest.raises(ValueError, match="no"):
            await patch
        assert client.interruption == ""
        first.close()
        with pytest.raises(EngineDeadError, match="no engine can be reached"):
            async for _ in client.generate([5, 6, 7], PARAMS, "r"):
                pass
        assert "has weights of version 0" in client.interruption  # which /health reports
        again.close()


@async_test
async def test_weights_of_one_version_that_differ() -> None:
    """They came to each engine by itself, and without a version that both were given."""
    async with played(0, 2) as (client, (first, second)):
        first.send(other_facts(weights="w-1", weight_version=1))
        await until(client, lambda: refusals(client) == [False, True])
        second.send(other_facts(weights="w-2", weight_version=1))
        await until(client, lambda: client._link._engines[1].facts.weights == "w-2")
        assert (await metrics(client, first, second))["gauges"]["proxy_engines_refused"] == 1
        assert await used_by(client, first) == {first}


@async_test
async def test_an_update_by_collective_rpc_is_an_update() -> None:
    async with played(0, 1) as (client, (engine,)):
        call = {"method": "reload_weights", "args": ["folder"], "kwargs": {}}
        update = asyncio.ensure_future(client.call("collective_rpc", **call))
        sent = await engine.next()
        assert (sent.method, sent.arguments, sent.keywords) == ("reload_weights", ["folder"], {"weight_version": 1})
        engine.send(Reply(sent.number, 1))
        assert await update == 1
        with pytest.raises(ValueError, match="update_weights is not supported through a proxy"):
            await client.call("collective_rpc", method="update_weights", args=[{}])


@async_test
async def test_a_client_without_the_key_is_told() -> None:
    key = ClusterKey(b"a secret of a deployment")
    context = zmq.Context()
    check = ClientCheck(context, engine_keys(key)[1][0])
    socket = context.socket(zmq.ROUTER)
    listen_with(socket, engine_keys(key)[0])
    address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    link = EngineLink(address)
    try:
        link.send(Hello())
        with pytest.raises(ValueError, match="has a cluster key, and this client has none"):
            await link.lost()
    finally:
        link.close(0)
        check.close()
        context.destroy(linger=0)


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert [devices_of(index, 2)[name] for index in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv(name, "5, GPU-a,7,8")
    assert [devices_of(index, 2)[name] for index in range(2)] == ["5,GPU-a", "7,8"]
