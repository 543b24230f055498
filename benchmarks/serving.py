"""Throughput over HTTP as a share of the offline engine's, in one run: many streams of one server.

    python benchmarks/serving.py [--model M] [--streams 1000] [--max-tokens 64] [--api-server-count N] [engine flags]

The client counts bytes without parsing them, because it has the same cores. docs/benchmarks.md explains the result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from fleetfoot.config import env

NUM_IDLE = 30
"""Requests to an idle server, for the time to the first token."""


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


class Server:
    """``fleetfoot serve`` in a child process."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "fleetfoot", "serve", "--port", "0", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if match := re.search(r"listening on http://[^:]*:(\d+)", line):
                self.port = int(match[1])
                break
        else:
            raise RuntimeError("the server has not started")
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def cpu_seconds(self) -> Counter[str]:
        """Of the engine's process, and of all API servers together."""
        parent, seconds = self._process.pid, Counter[str]()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in [str(parent), *children]:
            is_engine = "fleetfoot.engine.process" in Path(f"/proc/{pid}/cmdline").read_text()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            seconds["engine" if is_engine else "api_servers"] += ticks / os.sysconf("SC_CLK_TCK")  # type: ignore[assignment]
        return seconds

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def server(flags: list[str]) -> Iterator[Server]:
    running = Server(flags)
    try:
        yield running
    finally:
        running.stop()


def offline(flags: list[str], prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """The engine without a server, in a process of its own, with the environment of a server's engine."""
    program = f"""
import json, statistics, sys, time
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
        idle = [llm.generate(inputs[:1], params, use_tqdm=False)[0].metrics for _ in range({NUM_IDLE})]
        llm.llm_engine.stats_collector.clear_samples()
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate(inputs, params, use_tqdm=False)
        cpu = time.process_time() - cpu
        tokens = len(prompts) * {max_tokens}
        result = {{"tokens_per_s": tokens / (time.perf_counter() - begin), "cpu_us_per_token": 1e6 * cpu / tokens}}
        gaps = list(llm.llm_engine.stats_collector.itl)
        result["gap_median_ms"] = 1e3 * statistics.median(gaps)
        result["gap_p99_ms"] = 1e3 * statistics.quantiles(gaps, n=100)[98]
        result["ttft_idle_ms"] = 1e3 * statistics.median(one.first_token_ts - one.queued_ts for one in idle)
        print(json.dumps(result))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=env.for_engine(),
    )
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return {name: round(value, 2) for name, value in result.items()}


def gap_times(streams: list[Stream]) -> dict[str, float]:
    """Times between chunks of a stream, in ms: of all, and of the window in which every stream decodes."""
    begin, end = max(one.times[0] for one in streams), min(one.times[-1] for one in streams)
    pairs = [pair for stream in streams for pair in zip(stream.times, stream.times[1:], strict=False)]
    windows = {"gap": pairs, "steady_gap": [pair for pair in pairs if begin <= pair[0] and pair[1] <= end]}
    result = {}
    for name, chosen in windows.items():
        gaps = [1e3 * (later - earlier) for earlier, later in chosen]
        if len(gaps) > 1:
            result[f"{name}_median_ms"] = round(statistics.median(gaps), 2)
            result[f"{name}_p99_ms"] = round(statistics.quantiles(gaps, n=100)[98], 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--api-server-count", type=int, help="default: the server's")
    arguments, flags = parser.parse_known_args()
    prompts = [
        [1 + (7 * index + 13 * place) % 200 for place in range(arguments.prompt_tokens)]
        for index in range(arguments.streams)
    ]
    reference = offline(flags, prompts, arguments.max_tokens)
    fields = {"max_tokens": arguments.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["return_token_ids"] = True  # an event for each token, also where it has no text
    bodies = [json.dumps({**fields, "prompt": prompt}).encode() for prompt in prompts]
    num_tokens = arguments.streams * arguments.max_tokens
    gc.freeze()
    count = arguments.api_server_count
    with server([*flags, *(["--api-server-count", str(count)] if count else [])]) as running:
        uvloop.run(load("127.0.0.1", running.port, bodies[:8]))
        before, client_before = running.cpu_seconds(), time.process_time()
        seconds, streams = uvloop.run(load("127.0.0.1", running.port, bodies))
        cpu = {**(running.cpu_seconds() - before), "client": time.process_time() - client_before}
        idle = [uvloop.run(load("127.0.0.1", running.port, bodies[:1]))[1][0] for _ in range(NUM_IDLE)]
    over_http = num_tokens / seconds
    cpu_us = {name: round(1e6 * value / num_tokens, 1) for name, value in cpu.items()}
    result = {
        "streams": arguments.streams,
        "offline": reference,
        "http_tokens_per_s": round(over_http, 1),
        "share": round(over_http / reference["tokens_per_s"], 3),
        "cpu_us_per_token": cpu_us,
        "cpu_share": round(reference["cpu_us_per_token"] / sum(cpu_us.values()), 3),
        "chunks_per_token": round(sum(len(one.times) for one in streams) / num_tokens, 3),
        **gap_times(streams),
        "ttft_idle_ms": round(1e3 * statistics.median(one.times[0] - one.sent for one in idle), 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
