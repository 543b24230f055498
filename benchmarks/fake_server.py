"""An OpenAI server that streams tokens at a set rate and computes nothing: how much `fleetfoot bench serve` can load.

    python benchmarks/fake_server.py --port 8900 --processes 2 [--step-ms 4]
    fleetfoot bench serve --base-url http://127.0.0.1:8900 --max-concurrency 256 --output-len 512 --num-prompts 1024

Every ``--step-ms`` each request gets a token, as from an engine with a step of that time: 256 requests and 4 ms are
64,000 tokens/s. Each event is a write of its own, and as long as one of Fleetfoot's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
from typing import Any

import uvloop

_EVENT = (
    b'data: {"id":"cmpl-5d1c6e7f0a9b4c3d8e2f1a0b","object":"text_completion","created":1764331200,"model":"fake",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Stream(asyncio.Protocol):
    """One connection."""

    running: set[_Stream]

    def __init__(self, running: set[_Stream]) -> None:
        self.running = running
        self._transport: Any = None
        self._given = b""
        self.left = self._total = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._given += data
        head, end, body = self._given.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        if not end or len(body) < size:
            return
        self._given = body[size:]
        if head.startswith(b"GET"):
            listed = json.dumps({"data": [{"id": "fake"}]}).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(listed), listed))
            return
        self.left = self._total = json.loads(body[:size])["max_tokens"]
        self._transport.write(_HEAD)
        self.running.add(self)

    def step(self) -> None:
        """Send one token, and the end after the last one."""
        self._transport.write(_CHUNK)
        self.left -= 1
        if not self.left:
            usage = {"prompt_tokens": 1, "completion_tokens": self._total, "total_tokens": 1 + self._total}
            last = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % json.dumps(usage).encode()
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
            self.running.discard(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.running.discard(self)


async def serve(listener: socket.socket, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[_Stream] = set()
    await loop.create_server(lambda: _Stream(running), sock=listener)
    due = loop.time()
    while True:
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        for stream in list(running):
            stream.step()


def run(port: int, step_s: float) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(4096)
    uvloop.run(serve(listener, step_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=4.0)
    arguments = parser.parse_args()
    for _ in range(arguments.processes - 1):
        multiprocessing.Process(target=run, args=(arguments.port, arguments.step_ms / 1e3), daemon=True).start()
    run(arguments.port, arguments.step_ms / 1e3)


if __name__ == "__main__":
    main()
