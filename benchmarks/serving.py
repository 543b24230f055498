"""Throughput over HTTP as a share of the offline engine's, in one run: many streams of one server.

    python benchmarks/serving.py [--model M] [--streams 1000] [--max-tokens 64] [--api-server-count 1] [engine flags]

The client counts bytes without parsing them, because it has the same cores. It reports throughput, the time to the
first token and the time between chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvloop


class Stream(asyncio.Protocol):
    """One request on a connection of its own; keeps the times at which data arrives."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self.times: list[float] = []
        self.sent = 0.0
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b'"text":' in data:
            self.times.append(time.perf_counter())
        self.tail = (self.tail + data)[-64:]
        if b"[DONE]" in self.tail and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"a stream has ended early: {self.tail!r}"))


async def load(host: str, port: int, bodies: list[bytes]) -> tuple[float, list[Stream]]:
    """Seconds for all requests at once, and their streams."""
    loop = asyncio.get_running_loop()
    streams, waits = [], []
    begin = time.perf_counter()
    for body in bodies:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        done = loop.create_future()
        stream = Stream(head.encode() + body, done)
        await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]
        streams.append(stream)
        waits.append(done)
    await asyncio.gather(*waits)
    return time.perf_counter() - begin, streams


@contextlib.contextmanager
def server(flags: list[str]) -> Iterator[int]:
    """The port of ``fleetfoot serve`` in a child process."""
    command = [sys.executable, "-m", "fleetfoot", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"listening on http://[^:]*:(\d+)", line):
                yield int(match[1])
                return
        raise RuntimeError("the server has not started")
    finally:
        process.terminate()
        process.wait()


def offline(flags: list[str], prompts: list[list[int]], max_tokens: int) -> float:
    """Tokens a second of the engine without a server, in a process of its own."""
    program = f"""
import json, sys, time
from fleetfoot import LLM, SamplingParams
from fleetfoot.engine.arg_utils import EngineArgs
from fleetfoot.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
if __name__ == "__main__":
    prompts = json.load(sys.stdin)
    with LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args({flags!r}))) as llm:
        params = SamplingParams(temperature=0, max_tokens={max_tokens}, ignore_eos=True)
        inputs = [{{"prompt_token_ids": prompt}} for prompt in prompts]
        llm.generate(inputs[:8], params, use_tqdm=False)
        begin = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        print(len(prompts) * {max_tokens} / (time.perf_counter() - begin))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(prompts), capture_output=True, text=True, check=True
    )
    return float(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--api-server-count", type=int, default=1)
    arguments, flags = parser.parse_known_args()
    prompts = [
        [1 + (7 * index + 13 * place) % 200 for place in range(arguments.prompt_tokens)]
        for index in range(arguments.streams)
    ]
    reference = offline(flags, prompts, arguments.max_tokens)
    fields = {"max_tokens": arguments.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["return_token_ids"] = True  # an event for each token, also where it has no text
    bodies = [json.dumps({**fields, "prompt": prompt}).encode() for prompt in prompts]
    with server([*flags, "--api-server-count", str(arguments.api_server_count)]) as port:
        uvloop.run(load("127.0.0.1", port, bodies[:8]))
        seconds, streams = uvloop.run(load("127.0.0.1", port, bodies))
        idle = [uvloop.run(load("127.0.0.1", port, bodies[:1]))[1][0] for _ in range(10)]
    gaps = [
        later - earlier for stream in streams for earlier, later in zip(stream.times, stream.times[1:], strict=False)
    ]
    over_http = arguments.streams * arguments.max_tokens / seconds
    result = {
        "streams": arguments.streams,
        "offline_tokens_per_s": round(reference, 1),
        "http_tokens_per_s": round(over_http, 1),
        "share": round(over_http / reference, 3),
        "chunks_per_token": round(
            sum(len(one.times) for one in streams) / (arguments.streams * arguments.max_tokens), 3
        ),
        "gap_median_ms": round(1e3 * statistics.median(gaps), 2),
        "gap_p99_ms": round(1e3 * statistics.quantiles(gaps, n=100)[98], 2),
        "ttft_idle_ms": round(1e3 * statistics.median(one.times[0] - one.sent for one in idle), 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
