"""A process of `fleetfoot bench serve` that sends requests and keeps the times at which their tokens arrive.

It reads a `Load` from standard input, answers one byte, and reads when to begin. It writes a `Progress` every half
second and a `Finished` to standard output. Messages come after their length. Events are counted and not parsed, so that
a process takes tens of thousands in a second. No torch.
"""

from __future__ import annotations

import asyncio
import gc
import re
import ssl
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

REPORT_S = 0.5
"""Seconds between two `Progress`."""
_TIMER_S = 0.02
_FIRST_TEXT = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|arguments|finish_reason|delta)": ?"[^"]|"token_ids": ?\[ ?\d'
)
"""In the first event that has a token. The event before it, which has the role alone, has none. Tokens may have no
text: then the first event is the one that ends the choice."""
_ERROR = re.compile(
    rb'^(?:event: ?error\b.*\r?\n?|error: ?\{|(?:data: ?)?\{(?:"error": ?[^n]|.*"(?:error": ?[{"]|object": ?"error"|'
    rb'finish_reason": ?"error"))).*', re.M
)  # fmt: skip
"""What a stream that fails says: an event of this type, a line of llama.cpp's, or an event with an error in it."""
_TOKENS = re.compile(rb'"completion_tokens": ?[1-9]')
_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)": ?(\d+)')
_TAIL = 16
"""Parts of the end of a stream that are kept: usage is in the last event but one."""
_EVENT = re.compile(rb"data: ?[\[{]")
_EVENT_BYTES = 7  # at most
_NO_CHOICES = re.compile(rb'"choices": ?\[\]')


class Turn(msgspec.Struct, array_like=True):
    """One request."""

    body: bytes
    """Its JSON. Of later turns of a conversation, without the messages before: see `Conversation.messages`."""
    max_tokens: int
    num_prompt_tokens: int = 0
    """0: the prompt is a text, and the server alone knows."""


class Conversation(msgspec.Struct, array_like=True):
    """Requests one after the other: each begins when the one before has ended."""

    number: int
    turns: list[Turn]
    due_s: float | None = None
    """Seconds after the begin; None: as soon as the concurrency allows."""
    messages: list[str] = []
    """The user's message of each turn, if there are several: the answers so far come before it."""


class Load(msgspec.Struct):
    """What a process sends."""

    url: str
    headers: dict[str, str]
    concurrency: int
    """Most requests at once; 0: as many as are due."""
    conversations: list[Conversation]
    timeout_s: float


class Sample(msgspec.Struct, array_like=True):
    """One request that has ended. Times are in seconds after the begin of the load."""

    number: int
    turn: int
    due: float
    sent: float
    first: float = 0.0
    """0: there was no token."""
    end: float = 0.0
    num_prompt_tokens: int = 0
    """As the server reports them, else as they were sent; 0: not known."""
    num_output_tokens: int = 0
    """As the server reports them, else events with tokens."""
    num_cached_tokens: int = 0
    num_events: int = 0
    """Events that have tokens; fewer than tokens where the server has merged some."""
    arrivals: bytes = b""
    """Seconds from the first token to each later event, float32."""
    error: str = ""
    has_usage: bool = False
    """Whether the server reports numbers of tokens."""


class Progress(msgspec.Struct, tag=True):
    """What has happened since the last report."""

    sent: int
    running: int
    events: int
    ended: list[Sample]
    """Without their arrivals."""


class Finished(msgspec.Struct, tag=True):
    """All samples, and what the process has used."""

    samples: list[Sample]
    cpu_s: float
    wall_s: float
    loop_lags: list[float]
    """Seconds that a timer of the process was late: what it measures may be too long by as much."""


class _Connection(asyncio.Protocol):
    """A connection that stays open between requests."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self.is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def begin(self, head: bytes, body: bytes, sample: Sample, keeps_text: bool) -> asyncio.Future[None]:
        """Send a request; the future is done at the end of the response."""
        self._parser = httptools.HttpResponseParser(self)
        self._sample, self._keeps, self._parts = sample, keeps_text, list[bytes]()
        self._arrivals = array("f")
        self._tail = deque[bytes]((b"",), maxlen=_TAIL)
        self._ends_by_closing = False
        self._done = asyncio.get_running_loop().create_future()
        sample.sent = time.monotonic() - self._client.begin
        self._transport.write(head + b"%d\r\n\r\n" % len(body) + body)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic() - self._client.begin
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is no HTTP: {error}")

    def on_message_begin(self) -> None:
        self._ends_by_closing = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_closing = False

    def on_body(self, data: bytes) -> None:
        before = self._tail[-1]
        self._tail.append(data)
        if self._keeps:
            self._parts.append(data)
        sample = self._sample
        if sample.first:
            tail = before[1 - _EVENT_BYTES :]  # an event may begin at the end of the part before
            number = sum(found.end() > len(tail) for found in _EVENT.finditer(tail + data))
        else:
            joined = before[-200:] + data
            if (found := _FIRST_TEXT.search(joined)) is None:
                return
            sample.first, number = self._now, 1 + len(_EVENT.findall(joined, found.end()))
        if number:
            sample.num_events += number
            self._client.num_events += number
            since = self._now - sample.first
            for _ in range(number):
                self._arrivals.append(since)

    def on_message_complete(self) -> None:
        sample, kept = self._sample, self._kept()
        if (status := self._parser.get_status_code()) != 200:
            sample.error = f"status {status}: {kept[:500].decode('utf-8', 'replace')}"
        elif failure := _ERROR.search(kept):
            sample.error = failure[0][:500].decode("utf-8", "replace")
        elif not sample.first and _TOKENS.search(kept):
            sample.first = self._now  # no event has said more
        elif not sample.first:
            sample.error = "the response has no token"
        self._end(not self._ends_by_closing and self._parser.should_keep_alive())

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._done is not None and not self._done.done() and self._ends_by_closing:
            self._now = time.monotonic() - self._client.begin
            self.on_message_complete()  # of a response without a length
        self._fail(f"the connection has ended: {error or 'closed by the server'}")

    def _fail(self, reason: str) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._sample.error = reason
            self._now = time.monotonic() - self._client.begin
            self._end(False)

    def _end(self, stays_open: bool) -> None:
        sample = self._sample
        sample.end = self._now
        kept = self._kept()
        others = len(_NO_CHOICES.findall(kept)) + kept.count(b"[DONE]")  # events without a token
        without = min(others, sample.num_events)
        sample.num_events -= without
        del self._arrivals[sample.num_events :]
        sample.num_output_tokens = sample.num_events
        for name, value in _USAGE.findall(kept):
            setattr(sample, f"num_{_FIELDS[name]}_tokens", int(value))
            sample.has_usage = True
        sample.arrivals = self._arrivals[1:].tobytes()
        if not stays_open:
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _kept(self) -> bytes:
        return b"".join(self._tail)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def text(self) -> str:
        """What the events say, of a stream of chat or of completions."""
        words = []
        for line in b"".join(self._parts).split(b"\n"):
            if line.startswith(b"data:") and b"[DONE]" not in line:
                event = msgspec.json.decode(line[len(b"data:") :])
                choices = event.get("choices") if isinstance(event, dict) else None
                words += [one.get("text") or (one.get("delta") or {}).get("content") or "" for one in choices or ()]
        return "".join(words)


_FIELDS = {b"prompt_tokens": "prompt", b"completion_tokens": "output", b"cached_tokens": "cached"}


class _Client:
    """Sends the conversations of a load."""

    def __init__(self, load: Load, begin: float) -> None:
        self._load = load
        self.begin = begin  # on the machine's monotonic clock
        self.num_events = self._num_sent = self._num_running = 0
        self.samples: list[Sample] = []
        self.loop_lags: list[float] = []
        parts = urlsplit(load.url)
        is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if is_tls else 80)
        self._ssl = ssl.create_default_context() if is_tls else None
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": parts.netloc, "Content-Type": "application/json", **load.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f"POST {path} HTTP/1.1\r\n{lines}Content-Length: ".encode()
        self._idle: list[_Connection] = []

    async def run(self) -> None:
        """Send all, each when it is due and the concurrency allows."""
        waiting = deque(self._load.conversations)
        limit = self._load.concurrency or len(waiting)
        running: set[asyncio.Task[None]] = set()
        beside = [asyncio.ensure_future(self._report()), asyncio.ensure_future(self._watch_loop())]
        while waiting:
            now = time.monotonic() - self.begin
            due = max(0.0, waiting[0].due_s or 0.0)
            if due > now:
                await asyncio.sleep(due - now)
            elif len(running) >= limit:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            else:
                task = asyncio.ensure_future(self._converse(waiting.popleft()))
                running.add(task)
                task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        for task in beside:
            task.cancel()

    async def _converse(self, conversation: Conversation) -> None:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(conversation.turns):
            body = turn.body
            if conversation.messages:
                messages.append({"role": "user", "content": conversation.messages[number]})
                body = msgspec.json.encode({**msgspec.json.decode(body), "messages": messages})
            due = conversation.due_s if number == 0 and conversation.due_s is not None else None
            sample = Sample(conversation.number, number, -1.0 if due is None else due, 0.0)
            sample.num_prompt_tokens = turn.num_prompt_tokens
            is_last = number + 1 == len(conversation.turns)
            text = await self._send(body, sample, keeps_text=not is_last)
            self.samples.append(sample)
            if sample.error:
                return
            messages.append({"role": "assistant", "content": text})

    async def _send(self, body: bytes, sample: Sample, *, keeps_text: bool) -> str:
        self._num_running += 1
        self._num_sent += 1
        connection = None
        try:
            async with asyncio.timeout(self._load.timeout_s):
                connection = await self._connection()
                await connection.begin(self._head, body, sample, keeps_text)
            if connection.is_open:
                self._idle.append(connection)
            return connection.text() if keeps_text and not sample.error else ""
        except (OSError, ValueError) as error:  # a connection's own time limit, too
            late = f"no end after {self._load.timeout_s:g} s"
            sample.error = f"{type(error).__name__}: {error}" if str(error) else late
            if connection is not None:
                connection.close()
        finally:
            if sample.due < 0:
                sample.due = sample.sent
            self._num_running -= 1
        return ""

    async def _connection(self) -> _Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        connect = asyncio.get_running_loop().create_connection
        _, connection = await connect(lambda: _Connection(self), self._host, self._port, ssl=self._ssl)
        return connection

    async def _watch_loop(self) -> None:
        while True:
            due = time.monotonic() + _TIMER_S
            await asyncio.sleep(_TIMER_S)
            self.loop_lags.append(time.monotonic() - due)

    async def _report(self) -> None:
        num_reported = num_events = num_sent = 0
        while True:
            await asyncio.sleep(REPORT_S)
            ended = [msgspec.structs.replace(one, arrivals=b"") for one in self.samples[num_reported:]]
            num_reported += len(ended)
            new = self._num_sent - num_sent, self._num_running, self.num_events - num_events
            num_sent, num_events = self._num_sent, self.num_events
            write_message(Progress(*new, ended))


def write_message(message: Progress | Finished) -> None:
    data = msgspec.msgpack.encode(message)
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


def gaps(sample: Sample) -> Iterator[float]:
    """Seconds between two arrivals of tokens."""
    before = 0.0
    for since in array("f", sample.arrivals):
        yield since - before
        before = since


def main() -> None:
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    (size,) = struct.unpack("<I", given.read(4))
    load = msgspec.msgpack.decode(given.read(size), type=Load)
    gc.freeze()
    gc.disable()  # samples are bytes and numbers, and end with the process
    answers.write(b".")
    answers.flush()
    (begin,) = struct.unpack("<d", given.read(8))
    client, cpu = _Client(load, begin), time.process_time()
    uvloop.run(client.run())
    write_message(Finished(client.samples, time.process_time() - cpu, time.monotonic() - begin, client.loop_lags))


if __name__ == "__main__":
    main()
