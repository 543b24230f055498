"""The output items of a response, and the events that add them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fleetfoot.parsers.base import MessageDelta, ToolCallDelta
from fleetfoot.server.http import ENCODER
from fleetfoot.server.openai.protocol import TokenLogprob
from fleetfoot.server.openai.responses_items import ID_PREFIXES, encrypted
from fleetfoot.server.openai.responses_protocol import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    SummaryText,
)


class Events:
    """Numbers and encodes events."""

    def __init__(self) -> None:
        self._number = 0
        self._encoded: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        event = ResponseEvent(type=kind, sequence_number=self._number, **fields)
        self._number += 1
        self._encoded.append(b"event: " + kind.encode() + b"\ndata: " + ENCODER.encode(event) + b"\n\n")

    def take(self) -> bytes:
        """Those since the last call."""
        encoded = b"".join(self._encoded)
        self._encoded.clear()
        return encoded

    def recorded(self) -> list[bytes]:
        """All events, if they are kept."""
        return []


class EventLog(Events):
    """Keeps events, for readers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[bytes] = []
        self._is_ended = False
        self._added = asyncio.Event()

    def take(self) -> bytes:
        self._log += self._encoded
        self._added.set()
        self._added = asyncio.Event()
        return super().take()

    def end(self) -> None:
        """There are no further events."""
        self._is_ended = True
        self.take()

    def recorded(self) -> list[bytes]:
        return self._log + self._encoded

    async def read(self, begin: int) -> AsyncIterator[bytes]:
        """The events from this number on."""
        while begin < len(self._log) or not self._is_ended:
            if begin >= len(self._log):
                await self._added.wait()
            for event in self._log[begin:]:
                yield event
                begin += 1


class NoEvents(Events):
    """The events of a response that is not streamed: none."""

    def add(self, kind: str, **fields: Any) -> None:
        pass


class _MessageBlock:
    """An output item that grows. `close` emits the events of its end."""

    def __init__(self, events: Events, name: str, index: int) -> None:
        self.item = MessageItem(id=name)
        self._part = OutputText(logprobs=[])
        self._events = events
        self._place = {"item_id": name, "output_index": index, "content_index": 0}
        events.add("response.output_item.added", output_index=index, item=self.item)
        events.add("response.content_part.added", **self._place, part=self._part)
        self.item.content = [self._part]

    def append(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self._part.text += text
        self._part.logprobs += logprobs
        self._events.add("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def close(self) -> None:
        part = self._part
        self._events.add("response.output_text.done", **self._place, text=part.text, logprobs=part.logprobs)
        self._events.add("response.content_part.done", **self._place, part=part)


class _ReasoningBlock:
    """Reasoning as content, or as a summary."""

    def __init__(self, events: Events, name: str, index: int, *, as_summary: bool, encrypts: bool) -> None:
        self.item = ReasoningItem(id=name)
        self._encrypts = encrypts
        self._part: ReasoningText | SummaryText = SummaryText() if as_summary else ReasoningText()
        self._events = events
        self._part_event, self._text_event, field = (
            ("response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index")
            if as_summary
            else ("response.content_part", "response.reasoning_text", "content_index")
        )
        self._place = {"item_id": name, "output_index": index, field: 0}
        events.add("response.output_item.added", output_index=index, item=self.item)
        events.add(f"{self._part_event}.added", **self._place, part=self._part)
        if isinstance(self._part, SummaryText):
            self.item.summary = [self._part]
        else:
            self.item.content = [self._part]

    def append(self, text: str) -> None:
        self._part.text += text
        self._events.add(f"{self._text_event}.delta", **self._place, delta=text)

    def close(self) -> None:
        self._events.add(f"{self._text_event}.done", **self._place, text=self._part.text)
        self._events.add(f"{self._part_event}.done", **self._place, part=self._part)
        if self._encrypts:
            self.item.encrypted_content = encrypted(self._part.text)


class _CallBlock:
    def __init__(self, events: Events, name: str, index: int, call: ToolCallDelta) -> None:
        self.item = FunctionCallItem(
            id=name, call_id=call.id or f"call_{secrets.token_hex(12)}", name=call.name or "", arguments=""
        )
        self._events = events
        self._place = {"item_id": name, "output_index": index}
        events.add("response.output_item.added", output_index=index, item=self.item)

    def append(self, arguments: str) -> None:
        self.item.arguments += arguments
        self._events.add("response.function_call_arguments.delta", **self._place, delta=arguments)

    def close(self) -> None:
        fields = {"name": self.item.name, "arguments": self.item.arguments}
        self._events.add("response.function_call_arguments.done", **self._place, **fields)


class OutputBuilder:
    """Makes items of a message's deltas. The next item begins when the one before has ended.

    Args:
        key: of the response, in the ids of items.
        as_summary: reasoning is returned as its summary.
        encrypts: reasoning is returned as ``encrypted_content``, too.
    """

    def __init__(self, key: str, events: Events, *, as_summary: bool = False, encrypts: bool = False) -> None:
        self.items: list[OutputItem] = []
        self._key = key
        self._events = events
        self._options = {"as_summary": as_summary, "encrypts": encrypts}
        self._open: Any = None  # a block
        self._call_index = -1
        self._logprobs: list[TokenLogprob] = []

    def add(self, delta: MessageDelta, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """The next delta, and the logprobs of its tokens. Those of tokens without text wait for the next text."""
        if delta.reasoning:
            is_open = isinstance(self._open, _ReasoningBlock)
            block = self._open if is_open else self._begin(_ReasoningBlock, "reasoning", **self._options)
            block.append(delta.reasoning)
        self._logprobs += logprobs
        if delta.content:
            is_open = isinstance(self._open, _MessageBlock)
            block = self._open if is_open else self._begin(_MessageBlock, "message")
            block.append(delta.content, self._logprobs)
        for call in delta.tool_calls:
            is_open = isinstance(self._open, _CallBlock) and call.index == self._call_index
            block = self._open if is_open else self._begin(_CallBlock, "function_call", call)
            self._call_index = call.index
            if call.arguments:
                block.append(call.arguments)
        if delta:
            self._logprobs = []

    def finish(self, status: str) -> None:
        """End the last item, as ``completed`` or ``incomplete``. A response without items gets an empty message."""
        if self._open is None and not self.items:
            self._begin(_MessageBlock, "message")
        self._end(status)

    def _begin(self, block: Any, kind: str, *arguments: Any, **options: Any) -> Any:
        self._end("completed")
        index = len(self.items)
        self._open = block(self._events, f"{ID_PREFIXES[kind]}_{self._key}{index}", index, *arguments, **options)
        self.items.append(self._open.item)
        return self._open

    def _end(self, status: str) -> None:
        if self._open is not None:
            self._open.close()
            self._open.item.status = status
            self._events.add("response.output_item.done", output_index=len(self.items) - 1, item=self._open.item)
            self._open = None
