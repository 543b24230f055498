"""Events that are pushed to a connection are those of the iteration, whatever the client's speed; and what a client of
an engine's process makes of several steps at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import zmq
from hypothesis import given, settings
from starlette.types import Message

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.client import EngineClient, OutputStream
from fleetfoot.engine.link import merge_steps
from fleetfoot.engine.wire import EngineMessage, Outputs, Ready, Reply
from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput, SequenceEnd
from fleetfoot.server.service import RequestOutputs
from fleetfoot.server.streaming import EXTENSION, BodyWriter, PushedEvents, iterate
from fleetfoot.tokenizer.tokenizer import Tokenizer


class Client:
    """Of `OutputStream`: counts what is aborted."""

    def __init__(self) -> None:
        self.num_discarded = 0

    def discard(self, request_id: str, stream: OutputStream) -> None:
        self.num_discarded += 1


class Source:
    """Events with the text of each output; some have none."""

    def __init__(self, outputs: RequestOutputs) -> None:
        self.outputs = outputs

    def feed(self, index: int, output: RequestOutput) -> bytes:
        text = output.outputs[0].text
        if "!" in text:
            raise ValueError(text)
        return f"{index}{text}\n".encode() if text else b""

    def end(self) -> bytes:
        return b"end"

    def fail(self, error: Exception) -> bytes:
        return b"error " + str(error).encode()


class Connection:
    """A transport and its flow control. While it is paused, what is written counts as buffered."""

    def __init__(self) -> None:
        self.transport = self.flow = self
        self.data = b""
        self.write_paused = False
        self.num_buffered = 0
        self._writable = asyncio.Event()
        self._writable.set()

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.data += data
        self.num_buffered += self.write_paused

    def pause(self) -> None:
        self.write_paused = True
        self.num_buffered = 0
        self._writable.clear()

    def resume(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        await self._writable.wait()


def content(chunked: bytes) -> bytes:
    """A body without its chunked encoding."""
    parts = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        parts += rest[:length]
        chunked = rest[length + 2 :]
    return parts


def an_output(text: str, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(0, text, [7])], finished)


def texts(data: bytes) -> dict[str, str]:
    """By prompt: the text, without the borders of events."""
    result = {"0": "", "1": ""}
    for line in data.removesuffix(b"end").decode().splitlines():
        result[line[0]] += line[1:]
    return result


STEPS = st.lists(st.tuples(st.sampled_from(["a", "bc", ""]), st.sampled_from(["d", ""])), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, actions=st.lists(st.sampled_from(["pause", "resume", "turn"]), max_size=12))
def test_pushed_events_are_those_of_the_iteration(steps: list[tuple[str, str]], actions: list[str]) -> None:
    async def run() -> None:
        pushed, iterated = [
            [OutputStream(Client(), "r", RequestOutputKind.DELTA) for _ in range(2)]
            for _ in range(2)  # type: ignore[arg-type]
        ]
        connection, sent = Connection(), []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"type": "http", "extensions": {EXTENSION: {"writer": BodyWriter(connection)}}}
        response = asyncio.ensure_future(PushedEvents(Source(RequestOutputs(pushed)))(scope, receive, send))
        for place, step in enumerate(steps):
            is_last = place == len(steps) - 1
            for streams in (pushed, iterated):
                for stream, text in zip(streams, step, strict=True):
                    stream.put(an_output(text, finished=is_last))
            assert connection.num_buffered <= 2  # one for each prompt
            action = actions[place] if place < len(actions) else "turn"
            if action == "turn":
                for _ in range(4):
                    await asyncio.sleep(0)
            else:
                getattr(connection, action)()
        connection.resume()
        await response
        expected = b"".join([event async for event in iterate(Source(RequestOutputs(iterated)))])
        data = content(connection.data)
        assert data.endswith(b"end")
        assert texts(data) == texts(expected)
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert not sent[1]["more_body"]

    asyncio.run(run())


def test_an_error_is_the_last_event_and_aborts_the_rest() -> None:
    async def run() -> None:
        client = Client()
        streams = [OutputStream(client, "r", RequestOutputKind.DELTA) for _ in range(2)]  # type: ignore[arg-type]
        connection = Connection()
        response = PushedEvents(Source(RequestOutputs(streams)))
        response._writer = BodyWriter(connection)
        body = asyncio.ensure_future(response.send_body(None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for stream, text in zip(streams, ("a!", "b"), strict=True):
            stream.put(an_output(text))
        await body
        assert content(connection.data) == b"error a!"
        assert client.num_discarded == 2

    asyncio.run(run())


def test_outputs_of_consecutive_steps_are_merged_up_to_a_change_of_the_weights() -> None:
    def outputs(number: int, version: int = 0) -> Outputs:
        return Outputs(float(number), [EngineOutput(number, [number])], version)

    messages: list[EngineMessage] = [outputs(1), outputs(2), Reply(9), outputs(3), outputs(4, 1), outputs(5, 1)]
    merged: list[Any] = list(merge_steps(messages))
    assert [type(message) for message in merged] == [Outputs, Reply, Outputs, Outputs]
    assert [[tokens.number for tokens in one.tokens] for one in merged if isinstance(one, Outputs)] == [
        *([1, 2], [3], [4, 5])
    ]
    assert [one.now for one in merged if isinstance(one, Outputs)] == [2, 3, 5]


FACTS = Ready(
    pid=1,
    model="m",
    model_path="m",
    tokenizer_path=str(embedded_model_path()),
    vocab_size=4096,
    max_model_len=512,
    num_kv_tokens=4096,
    eos_token_ids=[1],
    max_logprobs=20,
    has_priority=False,
    sampling_defaults={},
    pooling=None,
    runner_name="v2",
)
LENGTH = int(RequestStatus.FINISHED_LENGTH)


def test_tokens_of_many_steps_at_once(tmp_path: Path) -> None:
    """An engine that sends everything before its client reads: texts, stop strings and ends are those of the tokens."""
    tokenizer = Tokenizer.from_path(embedded_model_path())
    prompt = tokenizer.encode("Once")
    ids = tokenizer.encode("Once upon a time there was a café, naïve and small. It was happy.")[1:]
    plain, stops = SamplingParams(max_tokens=len(ids)), SamplingParams(max_tokens=len(ids), stop=["was"])
    several = SamplingParams(max_tokens=len(ids), n=2)
    for params in (plain, stops, several):
        params.output_kind = RequestOutputKind.DELTA

    ends = [None] * (len(ids) - 1) + [SequenceEnd(LENGTH, None, 0, 0, 0, 0.0, None, None)]

    async def run() -> list[Any]:
        address = f"ipc://{tmp_path}/engine"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as engine:
            engine.bind(address)
            client = EngineClient(address)
            starting = asyncio.ensure_future(client.start())
            await asyncio.sleep(0)
            client_id, _ = await asyncio.to_thread(engine.recv_multipart)

            def send(message: EngineMessage) -> None:
                engine.send_multipart((client_id, msgspec.msgpack.encode(message)))

            send(FACTS)
            await starting
            streams = [
                await client.submit({"prompt_token_ids": prompt}, one, name)
                for name, one in {"plain": plain, "stops": stops, "several": several}.items()
            ]
            for _ in streams:
                await asyncio.to_thread(engine.recv_multipart)
            for token_id, end in zip(ids, ends, strict=True):
                send(Outputs(0.0, [EngineOutput(number, [token_id], end=end) for number in range(4)]))
            results = [[output async for output in stream] for stream in streams]
            client.close()
            return results

    results = asyncio.run(run())
    text = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
    found = [
        ["".join([output.outputs[index].text for output in outputs]) for index in range(len(outputs[0].outputs))]
        for outputs in results
    ]
    assert found == [[text], [text.partition("was")[0]], [text, text]]
    reasons = [[one.finish_reason for one in outputs[-1].outputs] for outputs in results]
    assert reasons == [["length"], ["stop"], ["length", "length"]]


def test_a_stream_that_has_ended_is_freed_without_a_collection() -> None:
    """A server collects garbage seldom, because that stops all threads."""

    class Listener:
        def __init__(self) -> None:
            self.stream = OutputStream(Client(), "r", RequestOutputKind.DELTA)  # type: ignore[arg-type]
            self.stream.listen(self.take)

        def take(self, item: object) -> bool:
            return True

    for end in (lambda stream: stream.put(ValueError()), lambda stream: stream.close()):
        listener = Listener()
        freed = weakref.ref(listener)
        gc.disable()
        try:
            end(listener.stream)
            del listener
            assert freed() is None
        finally:
            gc.enable()


class _Scripted:
    """A `Link` whose engine has sent messages already."""

    def __init__(self, ready: Ready, messages: list[EngineMessage]) -> None:
        self._ready, self._messages = ready, messages
        self.sent: list[Any] = []

    async def hello(self) -> Ready:
        return self._ready

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> EngineMessage:
        while not self._messages:
            await asyncio.sleep(0)
        return self._messages.pop(0)

    def close(self) -> None:
        """Nothing is open."""


def test_outputs_of_others_and_replies_overtake_those_of_a_flow_that_lags() -> None:
    """64 outputs are processed at a time, of 300 sequences and 8 steps."""
    order: list[str] = []
    params = SamplingParams(max_tokens=9, n=300, output_kind=RequestOutputKind.DELTA, detokenize=False)

    async def run() -> None:
        messages: list[EngineMessage] = []
        client = EngineClient(_Scripted(FACTS, messages))
        await client.start()
        many = await client.submit({"prompt_token_ids": [5]}, params, "many", flow="a")
        one = await client.submit({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1), "one", flow="b")
        for name, stream in (("many", many), ("one", one)):
            stream.listen(lambda output, name=name: order.append(name) is None)
        call = asyncio.ensure_future(client.call("metrics"))
        call.add_done_callback(lambda _: order.append("metrics"))
        await asyncio.sleep(0)
        step = [EngineOutput(number, [5]) for number in range(300)]
        messages += [Outputs(0.0, list(step)) for _ in range(8)]
        messages += [
            Outputs(0.0, [EngineOutput(300, [5], end=SequenceEnd(LENGTH, None, 0, 0, 0, 0.0, None, None))]),
            Reply(301, {}),
        ]
        await call
        while "one" not in order:
            await asyncio.sleep(0)
        assert order.count("many") < 20  # of 40
        while order.count("many") < 40:
            await asyncio.sleep(0)
        client.close()

    asyncio.run(run())
