"""Parts of responses without a server: items, events of any output, and the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pydantic
import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import MessageDelta, ToolCallDelta
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.conversation import MessageChunk, reasoning_variables
from fleetfoot.server.openai.responses import Answer, decode_record, encode_record
from fleetfoot.server.openai.responses_items import chat_messages, read_items
from fleetfoot.server.openai.responses_output import EventLog, Events, NoEvents, OutputBuilder
from fleetfoot.server.openai.responses_protocol import ResponseRequest
from fleetfoot.server.store import MemoryStore, StoreClient, StoreServer

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
OUTPUT_ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseOutputItem)
KEY = "0" * 32
DELTAS = [
    MessageDelta(reasoning="I should "),
    MessageDelta(reasoning="look."),
    MessageDelta(content="Let me "),
    MessageDelta(content="see."),
    MessageDelta(tool_calls=[ToolCallDelta(0, "call_a", "find", "{"), ToolCallDelta(0, arguments='"x": 1}')]),
    MessageDelta(tool_calls=[ToolCallDelta(1, "call_b", "list"), ToolCallDelta(1, arguments="{}")]),
]
ITEMS: list[Any] = [
    {"role": "user", "content": "Where?"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I should look."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "call_a", "name": "find", "arguments": '{"x": 1}'},
    {"type": "function_call", "call_id": "call_b", "name": "list", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_a", "output": "here"},
    {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "there"}]},
]


def parsed(events: Events) -> list[Any]:
    blocks = events.take().decode().split("\n\n")[:-1]
    return [EVENT.validate_json(block.split("\ndata: ")[1], strict=True) for block in blocks]


@pytest.mark.parametrize("options", [{}, {"as_summary": True}, {"encrypts": True}], ids=str)
def test_events_of_reasoning_text_and_calls(options: dict[str, bool]) -> None:
    events = Events()
    builder = OutputBuilder(KEY, events, **options)
    for delta in DELTAS:
        builder.add(delta)
    builder.finish("completed")
    by_item: dict[int, list[Any]] = {}
    for event in parsed(events):
        by_item.setdefault(event.output_index, []).append(event)
    reasoning = "reasoning_summary" if options.get("as_summary") else "reasoning"
    parts = "reasoning_summary_part" if options.get("as_summary") else "content_part"
    item = ["output_item.added", "output_item.done"]
    call = [item[0], "function_call_arguments.delta", "function_call_arguments.done", item[1]]
    assert [list(dict.fromkeys(one.type.removeprefix("response.") for one in ones)) for ones in by_item.values()] == [
        [item[0], f"{parts}.added", f"{reasoning}_text.delta", f"{reasoning}_text.done", f"{parts}.done", item[1]],
        [item[0], "content_part.added", "output_text.delta", "output_text.done", "content_part.done", item[1]],
        call,
        call,
    ]
    texts = ["".join(one.delta for one in ones if one.type.endswith(".delta")) for ones in by_item.values()]
    assert texts == ["I should look.", "Let me see.", '{"x": 1}', "{}"]
    assert [one.item.id for ones in by_item.values() for one in (ones[0], ones[-1])] == [
        one.id for one in builder.items for _ in range(2)
    ]
    whole = OutputBuilder(KEY, NoEvents(), **options)
    calls = [call for delta in DELTAS for call in delta.tool_calls]
    whole.add(MessageDelta("Let me see.", "I should look.", calls))
    whole.finish("completed")
    assert whole.items == builder.items


@pytest.mark.parametrize("options", [{}, {"as_summary": True}, {"encrypts": True}], ids=str)
def test_output_items_are_input_items(options: dict[str, bool]) -> None:
    builder = OutputBuilder(KEY, NoEvents(), **options)
    for delta in DELTAS:
        builder.add(delta)
    builder.finish("completed")
    output = [OUTPUT_ITEM.validate_python(msgspec.to_builtins(item), strict=True) for item in builder.items]
    given = [item.model_dump(exclude_none=True) for item in output]
    if "encrypts" in options:
        del given[0]["content"]
    expected = chat_messages(read_items(ITEMS, KEY))
    assert chat_messages(read_items([ITEMS[0], *given, *ITEMS[5:]], KEY)) == expected


def test_items_are_messages_of_chat() -> None:
    items = read_items(ITEMS, KEY)
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("call_a", "find", '{"x": 1}'), ("call_b", "list", "{}"))
    ]
    reasoning = {"content": "Let me see.", "reasoning_content": "I should look."}
    assert chat_messages(items) == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", **reasoning, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_a", "content": "here"},
        {"role": "tool", "tool_call_id": "call_b", "content": "there"},
    ]


def test_cut_output() -> None:
    for delta, status in ((DELTAS[0], "incomplete"), (MessageDelta(), "completed")):
        builder = OutputBuilder(KEY, NoEvents())
        builder.add(delta)
        builder.finish(status)
        (item,) = builder.items
        assert item.status == status


@pytest.mark.parametrize(
    ("effort", "thinks", "source", "variables"),
    [
        ("none", None, "", {"enable_thinking": False, "thinking": False}),
        ("max", None, "", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ("max", None, "['low', 'max']", {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"}),
        ("none", None, '"none"', {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ("low", False, "", {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
        (None, True, "", {"enable_thinking": True, "thinking": True}),
    ],
)
def test_efforts_are_variables_of_the_template(
    effort: Any, thinks: bool | None, source: str, variables: dict[str, Any]
) -> None:
    assert reasoning_variables(effort, thinks, source) == variables


def test_readers_of_a_log() -> None:
    async def run() -> None:
        log = EventLog()
        readers = [asyncio.ensure_future(collect(log, begin)) for begin in (0, 2, 9)]
        for _ in range(3):
            log.add("response.queued")
            log.take()
            await asyncio.sleep(0)
        log.end()
        assert [len(await reader) for reader in readers] == [3, 1, 0]
        assert await collect(log, 0) == log.recorded()

    async def collect(log: EventLog, begin: int) -> list[bytes]:
        return [event async for event in log.read(begin)]

    asyncio.run(run())


class EndlessMessage:
    """One token, and no end."""

    is_closed = False

    async def __aiter__(self) -> Any:
        completion = CompletionOutput(0, "a", [5], None, None)
        yield RequestOutput("", None, [1, 2], [completion], False), [MessageChunk(completion, DELTAS[2], None)]
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        self.is_closed = True


async def run_here(function: Any) -> Any:
    return function()


def test_records_of_long_conversations_are_in_pieces() -> None:
    items = [{"id": f"msg_{number}", "content": "é" * number} for number in range(1000)]
    response = {"id": "resp_1", "output": items[:3]}
    record = decode_record(encode_record(response, items, ["event: a"]))
    assert record == {"response": response, "items": items, "events": ["event: a"]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_generation(stream: bool) -> None:
    async def run() -> None:
        body: Any = ResponseRequest(input="x", stream=stream)
        service: Any = SimpleNamespace(model_name="model", work=run_here)
        answer = Answer(KEY, body, service, SamplingParams(), [], MemoryStore(1, 1))
        generated: Any = EndlessMessage()
        if stream:
            events = answer.events(generated)
            assert b"response.created" in await anext(events) and b"Let me " in await anext(events)
            await events.aclose()
        else:
            work = asyncio.ensure_future(answer.whole(generated))
            await asyncio.wait([work], timeout=0)
            work.cancel()
            await asyncio.wait([work])
        assert generated.is_closed

    asyncio.run(run())


def test_limits_of_the_store() -> None:
    async def run() -> None:
        store = MemoryStore(max_entries=3, max_bytes=100)
        for name in "abc":
            await store.put(name, name.encode())
        await store.get("a")
        await store.put("d", b"d")  # beyond the entries
        assert [await store.get(name) for name in "abcd"] == [b"a", None, b"c", b"d"]
        await store.put("e", bytes(99))  # beyond the bytes
        assert [await store.get(name) for name in "acd"] == [None, None, b"d"]
        await store.put("d", bytes(101))
        assert [await store.get(name) for name in "de"] == [None, bytes(99)]

    asyncio.run(run())


def test_a_shared_store(tmp_path: Path) -> None:
    async def run() -> None:
        address = f"ipc://{tmp_path / 'store'}"
        server = StoreServer(MemoryStore(3, 100), address)
        first, second = StoreClient(address), StoreClient(address)
        await first.put("a", b"content")
        assert await second.get("a") == b"content"
        changed = asyncio.ensure_future(first.changed("a"))
        await first.get("a")
        assert not changed.done()
        await second.put("a", b"other")
        await changed
        assert [await second.delete("a"), await first.delete("a")] == [True, False]
        for one in (first, second, server):
            one.close()

    asyncio.run(run())
