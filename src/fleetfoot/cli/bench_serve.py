"""`fleetfoot bench serve`: the load of clients on an OpenAI server, its latencies, and how they grow with the load.

The requests are sent by processes of `fleetfoot.cli.bench_client`. docs/benchmarks.md describes the results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import pickle
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from fleetfoot.cli import command
from fleetfoot.cli.arguments import add_engine_arguments, engine_config, given_settings, json_object
from fleetfoot.cli.bench_client import Conversation, Finished, Load, Progress, Sample, Turn, gaps
from fleetfoot.cli.bench_load import BenchRequest, Lengths, Samples, distribution, ratio, run_load, tails_chart
from fleetfoot.cli.drawing import Chart, Curve, check_plot_file, draw
from fleetfoot.config import env
from fleetfoot.utils.process import num_cores, raise_file_limit, write_to

if TYPE_CHECKING:
    import numpy as np

_EPILOG = """\
Load the embedded model's server, or another one:

  fleetfoot bench serve --num-prompts 200 --max-concurrency 1,4,16,64 --plot load.svg
  fleetfoot bench serve --base-url http://127.0.0.1:8000 --request-rate 1,2,4,8 --duration 60 --goodput ttft:500 tpot:50

With one rate and one concurrency the result is one JSON object with the keys of `vllm bench serve`, with several one
object on each line. docs/benchmarks.md describes them."""

_METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "latency",
}
_PERCENTILES = (50, 90, 95, 99)
_BLOCK = 512
"""Tokens of a prompt that one of a trace's ``hash_ids`` stands for."""
_SEEDS = 1_000_003
"""Between the seeds of two loads."""
_OWN_FIELDS = {
    "max_tokens": "--output-len",
    "stream": "the benchmark",
    "prompt": "the benchmark",
    "messages": "the benchmark",
}
"""Fields that each request has, and what they come from."""
_WORDS = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot word but what
some we can out other were all there when up use your how said an each she which do their time if will way
""".split()  # noqa: SIM905
"""Words of prompts of chats; most tokenizers have one token for each."""
_START_S = 600
_BUSY = 0.9
"""Share of a core from which on a client's process may be the limit."""
_LATE_MS = 20
"""The same of the time that it wakes up late."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like."""

    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    """Tokens that the prompts of a group begin with."""
    num_prefixes: int = 1
    """Groups, one of which each conversation is in."""
    num_turns: int = 1
    vocab_size: int = 200
    is_chat: bool = False
    seed: int = 0


def make_conversations(shape: Shape, fields: dict[str, Any], count: int) -> list[Conversation]:
    """Random prompts: of token ids, or of words in a chat. ``fields``: of each body besides. The same for a seed."""
    rng, prefix_rng = _rng(shape.seed, 1), _rng(shape.seed, 2)
    prefixes = [_random(prefix_rng, shape, shape.prefix_len) for _ in range(shape.num_prefixes)]
    conversations = []
    for number in range(count):
        turns, messages = [], []
        for turn in range(shape.num_turns):
            (length,), (output_len,) = shape.input_len.draw(rng, 1), shape.output_len.draw(rng, 1)
            prefix = prefixes[number % len(prefixes)] if turn == 0 else []
            prompt = prefix + _random(rng, shape, max(1, length - len(prefix)))
            body = _body(fields, prompt, output_len, is_chat=shape.is_chat)
            turns.append(Turn(body, output_len, 0 if shape.is_chat else len(prompt)))
            messages.append(" ".join(map(str, prompt)))
        conversations.append(Conversation(number, turns, messages=messages if shape.num_turns > 1 else []))
    return conversations


def read_trace(file: str, shape: Shape, fields: dict[str, Any], speed: float) -> list[Conversation]:
    """The requests of a trace in the format of Mooncake: on each line ``timestamp`` (ms), ``input_length``,
    ``output_length``, and ``hash_ids``, of which each stands for 512 tokens that are the same wherever it is; or in
    place of the lengths ``prompt`` or ``messages``. The first request comes at once. ``speed``: above 1, requests come
    faster. Raises UsageError."""
    conversations = []
    for number, (where, entry) in enumerate(command.read_json_lines("--trace", file)):
        given = {name: entry[name] for name in ("prompt", "messages") if name in entry}
        try:
            for name in ("timestamp", "input_length", "output_length"):
                if name in entry and (not _is_finite(entry[name]) or entry[name] < (name != "timestamp")):
                    least = "" if name == "timestamp" else ", at least 1"
                    raise ValueError(f"{name} is {entry[name]!r}; it must be a number{least}")
            if ("messages" in given) != shape.is_chat and given:
                raise ValueError(
                    f"it has {next(iter(given))}; --endpoint chat takes messages, and completions a prompt"
                )
            if not given and "input_length" not in entry:
                raise ValueError("it has no input_length, prompt or messages")
            output_len = int(entry.get("output_length", shape.output_len.low))
            due = float(entry.get("timestamp", 0.0)) / 1e3 / speed
            prompt: Any = given.get("prompt", "")
            if given:
                body = msgspec.json.encode(fields | given | {"max_tokens": output_len})
            else:
                length = int(entry["input_length"])
                ids = entry.get("hash_ids") or []
                prompt = [one for name in ids for one in _random(_rng(shape.seed, 3, int(name)), shape, _BLOCK)]
                prompt += _random(_rng(shape.seed, 4, number), shape, max(0, length - len(prompt)))
                prompt = prompt[: max(1, length)]
                body = _body(fields, prompt, output_len, is_chat=shape.is_chat)
        except (KeyError, TypeError, ValueError) as error:
            raise command.UsageError(f"{where} is no request of a trace: {error}") from error
        num_tokens = 0 if shape.is_chat or isinstance(prompt, str) else len(prompt)
        conversations.append(Conversation(number, [Turn(body, output_len, num_tokens)], due))
    first = min((one.due_s or 0.0 for one in conversations), default=0.0)
    moved = [msgspec.structs.replace(one, due_s=(one.due_s or 0.0) - first) for one in conversations]
    return sorted(moved, key=lambda one: one.due_s or 0.0)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_arrivals(
    conversations: Sequence[Conversation], rate: float, seed: int, burstiness: float = 1.0
) -> list[Conversation]:
    """The times of a process of ``rate`` conversations per second; none for an infinite rate. ``burstiness``: shape of
    the gamma distribution of the times between; 1: a Poisson process."""
    if math.isinf(rate):
        return [*conversations]
    times = _rng(seed, 5).gamma(burstiness, 1.0 / (rate * burstiness), size=len(conversations)).cumsum().tolist()
    return [msgspec.structs.replace(one, due_s=due) for one, due in zip(conversations, times, strict=True)]


def _rng(*stream: int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng(stream)


def _random(rng: np.random.Generator, shape: Shape, count: int) -> list[Any]:
    """Token ids, or words."""
    if shape.is_chat:
        return [_WORDS[index] for index in rng.integers(0, len(_WORDS), size=count)]
    drawn: list[Any] = rng.integers(1, shape.vocab_size, size=count).tolist()
    return drawn


def _body(fields: dict[str, Any], prompt: list[Any], output_len: int, *, is_chat: bool) -> bytes:
    content = {"messages": [{"role": "user", "content": " ".join(prompt)}]} if is_chat else {"prompt": prompt}
    return msgspec.json.encode({**fields, **content, "max_tokens": output_len})


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    base_url: str
    path: str
    headers: dict[str, str]
    timeout_s: float
    num_processes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the processes of one load have measured."""

    samples: list[Sample]
    duration_s: float
    """From the first request to the last token."""
    cpu_s: tuple[float, ...]
    """CPU time of each process."""
    wall_s: float
    loop_lags: list[float]
    """Seconds that processes woke up late."""


def run_processes(
    target: Target, conversations: Sequence[Conversation], concurrency: int, on_progress: Callable[[Progress], object]
) -> Outcome:
    """Send conversations from several processes. ``concurrency``: of all together; 0: no limit. ``on_progress`` is
    called in other threads."""
    count = min(target.num_processes, len(conversations), concurrency or len(conversations))
    url = target.base_url + target.path
    loads = [
        Load(url, target.headers, most, part, target.timeout_s)
        for most, part in divided(conversations, concurrency, count)
    ]
    words, pipe = [sys.executable, "-m", "fleetfoot.cli.bench_client"], subprocess.PIPE
    processes = [subprocess.Popen(words, stdin=pipe, stdout=pipe) for _ in loads]
    try:
        for process, load in zip(processes, loads, strict=True):
            data = msgspec.msgpack.encode(load)
            write_to(process, struct.pack("<I", len(data)) + data)
        for process in processes:
            _read(process, 1)
        begin = time.monotonic() + 0.05
        for process in processes:
            write_to(process, struct.pack("<d", begin))
        with ThreadPoolExecutor(count) as threads:
            try:
                finished = list(threads.map(lambda process: _follow(process, on_progress), processes))
            finally:
                for process in processes:
                    process.kill()  # after SIGTERM, too: the threads read to the end
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    samples = sorted((one for part in finished for one in part.samples), key=lambda one: (one.number, one.turn))
    first, last = min(one.sent for one in samples), max(one.end or one.sent for one in samples)
    lags = [lag for one in finished for lag in one.loop_lags]
    cpu, wall = tuple(one.cpu_s for one in finished), max(one.wall_s for one in finished)
    return Outcome(samples, last - first, cpu, wall, lags)


def divided(
    conversations: Sequence[Conversation], concurrency: int, count: int
) -> list[tuple[int, list[Conversation]]]:
    """The concurrency of each process, and its conversations: in proportion, so that all end together."""
    parts: list[list[Conversation]] = [[] for _ in range(count)]
    for place, one in enumerate(conversations):
        parts[place % (concurrency or count) % count].append(one)
    return [(concurrency // count + (index < concurrency % count), part) for index, part in enumerate(parts)]


def _follow(process: subprocess.Popen[bytes], on_progress: Callable[[Progress], object]) -> Finished:
    decode = msgspec.msgpack.Decoder(Progress | Finished).decode
    while True:
        (size,) = struct.unpack("<I", _read(process, 4))
        message = decode(_read(process, size))
        if isinstance(message, Finished):
            return message
        on_progress(message)


def _read(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    data = process.stdout.read(size)
    if len(data) < size:
        raise RuntimeError("a process that sends requests has ended before its requests")
    return data


def results(outcome: Outcome, goodput: dict[str, float], concurrency: int = 0) -> dict[str, Any]:
    """The measurements, by the keys of `vllm bench serve`. ``goodput``: limits in ms, by metric."""
    good = [one for one in outcome.samples if not one.error]
    duration, times = outcome.duration_s, _times(good)
    num_output = sum(one.num_output_tokens for one in good)
    num_input = sum(one.num_prompt_tokens for one in good) if all(one.num_prompt_tokens for one in good) else None
    found: dict[str, Any] = {
        "duration": outcome.duration_s,
        "completed": len(good),
        "failed": len(outcome.samples) - len(good),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(one.num_cached_tokens for one in good),
        "without_usage": sum(not one.has_usage for one in good),
        "total_output_tokens": num_output,
        "request_throughput": ratio(len(good), duration),
        "request_goodput": ratio(sum(_is_good(one, goodput) for one in good), duration) if goodput else None,
        "output_throughput": ratio(num_output, duration),
        "total_token_throughput": None if num_input is None else ratio(num_input + num_output, duration),
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_running(outcome.samples),
        "events_per_token": ratio(sum(one.num_events for one in good), num_output),
        "rtfx": 0.0,  # of audio
    }
    if concurrency:
        times["client_queue_time"] = [one.sent - one.due for one in good]
        times["e2el_including_client_queue"] = [one.end - one.due for one in good]
    for name, values in times.items():
        summary = distribution(values, 1e3)
        found |= {f"mean_{name}_ms": summary["mean"], f"median_{name}_ms": summary["p50"]}
        found[f"std_{name}_ms"] = 1e3 * statistics.pstdev(values) if values else None
        found |= {f"p{percent}_{name}_ms": summary[f"p{percent}"] for percent in _PERCENTILES}
    busiest = max(outcome.cpu_s) / outcome.wall_s
    lags = {
        "send": distribution([one.sent - one.due for one in outcome.samples], 1e3)["p99"],
        "loop": distribution(outcome.loop_lags, 1e3)["p99"],
    }
    found["client"] = {
        "processes": len(outcome.cpu_s),
        "cpu_us_per_token": ratio(1e6 * sum(outcome.cpu_s), num_output),
        "busiest_cpu_share": busiest,
        **{f"p99_{name}_lag_ms": lag for name, lag in lags.items()},
        "is_limit": busiest > _BUSY or (lags["loop"] or 0.0) > _LATE_MS,
    }
    found["error_counts"] = dict(Counter(one.error for one in outcome.samples if one.error).most_common(5))
    return found


def count_short(samples: Sequence[Sample], conversations: Sequence[Conversation]) -> int:
    """Outputs with fewer tokens than were asked for."""
    asked = {(one.number, turn): of.max_tokens for one in conversations for turn, of in enumerate(one.turns)}
    return sum(one.num_output_tokens < asked[one.number, one.turn] for one in samples if not one.error)


def _times(good: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds, by the names of metrics."""
    return {
        "ttft": [one.first - one.sent for one in good],
        "tpot": [_tpot(one) for one in good if one.num_output_tokens > 1],
        "itl": [gap for one in good for gap in gaps(one)],
        "e2el": [one.end - one.sent for one in good],
    }


def _tpot(sample: Sample) -> float:
    """Up to the last token: a server may end the response later."""
    *_, last = (sample.end - sample.first, *array("f", sample.arrivals))
    return last / (sample.num_output_tokens - 1)


def _is_good(sample: Sample, limits: dict[str, float]) -> bool:
    found = {"ttft": sample.first - sample.sent, "e2el": sample.end - sample.sent}
    found["tpot"] = _tpot(sample) if sample.num_output_tokens > 1 else 0.0
    return all(1e3 * found[name] <= limit for name, limit in limits.items())


def _peak_rate(samples: Sequence[Sample]) -> float:
    """Most tokens of a second."""
    counts = Counter[int]()
    for sample in samples:
        weight = sample.num_output_tokens / max(1, sample.num_events)
        at = sample.first
        counts[int(at)] += weight  # type: ignore[assignment]
        for gap in gaps(sample):
            at += gap
            counts[int(at)] += weight  # type: ignore[assignment]
    return float(max(counts.values(), default=0))


def _peak_running(samples: Sequence[Sample]) -> int:
    changes = sorted([(one.sent, 1) for one in samples] + [(one.end, -1) for one in samples])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


# --- the live table ---------------------------------------------------------------------------------------------------


class LiveTable:
    """Rows of loads on a terminal: those that have ended, and the one that runs. Nothing where it is not shown."""

    _HEADS = ("load", "done", "running", "failed", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "good")

    def __init__(self, *, is_shown: bool, goodput: dict[str, float]) -> None:
        self._goodput = goodput
        self._rows: list[tuple[str, ...]] = []
        self._lock = threading.Lock()
        self._begin_load("", 0)
        self._live: Any = None
        if is_shown:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _begin_load(self, name: str, total: int) -> None:
        self._name, self._total, self._events, self._begin = name, total, 0, time.monotonic()
        self._running = 0
        self._ended: list[Sample] = []

    def begin(self, name: str, total: int) -> None:
        self._begin_load(name, total)
        self._draw()

    def update(self, progress: Progress) -> None:
        """A process has reported; the rate is that since the begin of the load."""
        with self._lock:
            self._events += progress.events
            self._ended += progress.ended
            self._running = progress.running
            self._draw()

    def end(self, outcome: Outcome) -> str:
        """The row of a load that has ended, as text."""
        self._ended, self._running = outcome.samples, 0
        tokens = sum(one.num_output_tokens for one in outcome.samples if not one.error)
        self._rows.append(self._row(tokens / (outcome.duration_s or math.nan)))
        self._name = ""
        self._draw()
        return ", ".join(f"{head} {cell}" for head, cell in zip(self._HEADS, self._rows[-1], strict=True) if cell)

    def _row(self, rate: float) -> tuple[str, ...]:
        good = [one for one in self._ended if not one.error]
        times = [
            distribution([one.first - one.sent for one in good], 1e3),
            distribution([_tpot(one) for one in good if one.num_output_tokens > 1], 1e3),
        ]
        cells = [f"{one[key]:.2f} ms" if one["count"] else "" for one in times for key in ("p50", "p99")]
        share = sum(_is_good(one, self._goodput) for one in good) / len(good) if good and self._goodput else None
        counts = f"{len(self._ended)}/{self._total}", str(self._running), str(len(self._ended) - len(good))
        return (self._name, *counts, f"{rate:,.0f}", *cells, "" if share is None else f"{share:.0%}")

    def _draw(self) -> None:
        if self._live is None:
            return
        from rich.table import Table

        table = Table(*self._HEADS, box=None, padding=(0, 1))
        seconds = time.monotonic() - self._begin
        for row in [*self._rows, *([self._row(self._events / seconds)] if self._name else [])]:
            table.add_row(*row)
        self._live.update(table, refresh=True)


# --- pictures ---------------------------------------------------------------------------------------------------------


def plot(points: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], goodput: dict[str, float], file: str) -> None:
    """Latencies and throughput over the load: over the rate of requests, or over the concurrency where that differs. Of
    one load the tails of its times."""
    title = f"{points[0]['model_id']}, {points[0]['label']}"
    if len(points) == 1:
        times = _times([one for one in outcomes[0].samples if not one.error])
        draw(title, [tails_chart({_METRICS[name]: values for name, values in times.items()})], file)
        return
    by_rate = len({one["request_rate"] for one in points}) > 1
    name, unit = ("request_rate", "requests/s") if by_rate else ("max_concurrency", "requests at once")
    places = [float(one[name] or 0) if one[name] != "inf" else math.inf for one in points]
    charts = []
    for metric, metric_name in _METRICS.items():
        curves = [
            Curve(label, [(x, one[key]) for x, one in zip(places, points, strict=True) if one[key]], "marked")
            for label, key in (("p50", f"median_{metric}_ms"), ("p99", f"p99_{metric}_ms"))
        ]
        if (limit := goodput.get(metric)) and all(map(math.isfinite, places)):
            curves.append(Curve("limit", [(x, limit) for x in places], "dashed"))
        charts.append(Chart(f"{metric_name}, ms", unit, curves, y_is_log=True))
    rates = {"request_throughput": "all", "request_goodput": "within the limits"}
    curves = [
        Curve(label, [(x, one[key]) for x, one in zip(places, points, strict=True) if one[key] is not None], "marked")
        for key, label in rates.items()
        if goodput or key == "request_throughput"
    ]
    charts.append(Chart("requests/s that were answered", unit, curves))
    tokens = [(x, one["output_throughput"]) for x, one in zip(places, points, strict=True)]
    charts.append(Chart("output tokens/s", unit, [Curve("", tokens, "marked")]))
    draw(title, charts, file)


# --- a server of its own ----------------------------------------------------------------------------------------------


class OwnServer:
    """``fleetfoot serve`` with the flags of the engine, in a child process."""

    _PROGRAM = (
        "import pickle, sys; from fleetfoot.server.serve import serve; sys.exit(serve(*pickle.load(sys.stdin.buffer)))"
    )

    def __init__(self, arguments: argparse.Namespace) -> None:
        from fleetfoot.cli.serve import add_server_arguments, server_settings

        parser = argparse.ArgumentParser()
        parser.set_defaults(verbose=arguments.verbose)
        add_server_arguments(parser)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        count = arguments.api_server_count or max(1, min(4, num_cores() // 4))
        flags = ["--port", str(port), "--api-server-count", str(count), "--max-queue", str(1 << 16)]
        with command.usage_errors():
            config = engine_config(arguments)
            settings = server_settings(parser.parse_args(flags), default_names=(config.model,))
        self.url = f"http://127.0.0.1:{port}"
        log = None if arguments.verbose else subprocess.DEVNULL
        self._process = subprocess.Popen([sys.executable, "-c", self._PROGRAM], stdin=subprocess.PIPE, stderr=log)
        assert self._process.stdin is not None
        pickle.dump((config, settings), self._process.stdin)
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        """Raises RuntimeError: the server has ended, or is not ready in time."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError("the server has not started; --verbose shows its log")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready after {_START_S} s")

    def cpu_s(self) -> dict[str, float]:
        """Seconds of the engine's process, and of all API servers together; {} where there is no /proc."""
        parent, seconds = self._process.pid, Counter[str]()
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            for pid in [str(parent), *children]:
                is_engine = "fleetfoot.engine.process" in Path(f"/proc/{pid}/cmdline").read_text()
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                seconds["engine" if is_engine else "api_servers"] += ticks  # type: ignore[assignment]
        return dict(seconds)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def measure_offline(arguments: argparse.Namespace, conversations: Sequence[Conversation]) -> dict[str, float]:
    """The same requests in this process, all at once and without a server."""
    requests = []
    for conversation in conversations:
        for turn in conversation.turns:
            prompt = msgspec.json.decode(turn.body)["prompt"]
            requests.append(BenchRequest({"prompt_token_ids": prompt}, turn.max_tokens))
    with env.defaults(env.engine_defaults()), command.started_engine(arguments) as (engine, _):
        run_load(engine, requests[:8], Samples())
        engine.reset_prefix_cache()
        samples, cpu = Samples(), time.process_time()
        run_load(engine, requests, samples)
        cpu = time.process_time() - cpu
    num_tokens = sum(work.num_output_tokens for work in samples.work)
    rate = num_tokens / sum(samples.load_duration)
    return {"tokens_per_s": rate, "cpu_us_per_token": 1e6 * cpu / num_tokens}


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    add = group.add_argument
    add(
        "--base-url", metavar="URL", help="an OpenAI server that runs (default: one is started with the engine's flags)"
    )
    add("--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)")
    add("--request-model", metavar="NAME", help="model of the requests (default: MODEL, or the first of --base-url)")
    add("--header", action="append", default=[], metavar="NAME:VALUE", help="a header of requests; may be repeated")
    add("--target-key", metavar="KEY", help="API key of the target, or OPENAI_API_KEY")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of each request")
    command.add_number(add, "--api-server-count", None, "of the server that is started (default: as of serve)")
    add("--timeout", type=command.finite, default=3600.0, metavar="S", help="seconds of one request (default: 3600)")
    group = parser.add_argument_group("load")
    add = group.add_argument
    text = (
        "conversations that arrive in a second, in a Poisson process; several with commas: one load each (default: inf)"
    )
    add("--request-rate", type=_rates, default=(math.inf,), metavar="X[,X]", help=text)
    text = "evenness of arrivals: 1 is a Poisson process, below come bursts (default: 1)"
    add("--burstiness", type=command.finite, default=1.0, metavar="X", help=text)
    text = "most requests at once; several with commas: one load each (default: no limit)"
    add("--max-concurrency", type=_counts, default=(0,), metavar="N[,N]", help=text)
    command.add_number(add, "--num-prompts", None, "conversations of each load (default: 100, or all of a trace)")
    text = "as many as the rate has in these seconds on average, not --num-prompts"
    add("--duration", type=command.finite, metavar="S", help=text)
    command.add_number(add, "--num-warmup", 2, "conversations before, which do not count", least=0)
    command.add_number(add, "--client-processes", None, "that send requests (default: one for each 4 cores, up to 4)")
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--input-len", type=Lengths.parse, default=Lengths(128, 128), metavar="N[:M]", help="tokens (default: 128)")
    add("--output-len", type=Lengths.parse, default=Lengths(128, 128), metavar="N[:M]", help="tokens (default: 128)")
    command.add_number(add, "--prefix-len", 0, "first tokens that prompts have in common", least=0)
    command.add_number(add, "--num-prefixes", 1, "different ones of these, in turn")
    command.add_number(add, "--turns", 1, "requests of a conversation, with all before")
    add("--trace", metavar="FILE", help="requests and their times, in the format of Mooncake's traces (.jsonl)")
    add("--trace-speed", type=command.finite, default=1.0, metavar="X", help="how much faster (default: 1)")
    command.add_number(add, "--vocab-size", 200, "token ids of prompts are below", least=2)
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    add("--allow-eos", action="store_true", help="outputs may end before --output-len")
    command.add_number(add, "--seed", 0, "of prompts, lengths and times", least=0)
    group = parser.add_argument_group("result")
    add = group.add_argument
    text = "limits in ms of ttft, tpot or e2el: requests within all of them are good"
    add("--goodput", nargs="+", type=_limit, default=[], metavar="NAME:MS", help=text)
    add("--plot", metavar="FILE", help="draw latencies and throughput over the load, or the tails of one, .svg or .png")
    add("--offline", action="store_true", help="measure the same requests without a server before, and compare")
    add("--label", default="fleetfoot", metavar="TEXT", help="a name of the target in the result (default: fleetfoot)")
    add("--save-detailed", action="store_true", help="add the times of each request to the result")
    text = "POST /start_profile before the loads and /stop_profile after, with the key FLEETFOOT_ADMIN_KEY if it is set"
    add("--profile", action="store_true", help=text)
    add("--output", metavar="FILE", help="write the JSON there, not to standard output")
    add_engine_arguments(parser, takes_model=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure each load, and print the results."""
    _check(arguments)
    raise_file_limit()  # a connection for each request at once
    shape = Shape(
        *(arguments.input_len, arguments.output_len, arguments.prefix_len, arguments.num_prefixes, arguments.turns),
        *(arguments.vocab_size, arguments.endpoint == "chat", arguments.seed),
    )
    with contextlib.ExitStack() as stack:
        offline = server = None
        if arguments.offline:
            offline = measure_offline(arguments, make_conversations(shape, {}, arguments.num_prompts or 100))
        if arguments.base_url is None:
            server = OwnServer(arguments)
            stack.callback(server.stop)
            server.wait_ready()
        url = (arguments.base_url or (server.url if server else "")).rstrip("/").removesuffix("/v1")
        headers = _headers(arguments)
        named = arguments.request_model or (arguments.base_url and given_settings(arguments).get("model"))
        model = named or _first_model(url, headers)
        path = "/v1/chat/completions" if shape.is_chat else "/v1/completions"
        count = arguments.client_processes or max(1, min(4, num_cores() // 4))
        target = Target(url, path, headers, arguments.timeout, count)
        fields = {
            "model": model, "stream": True, "stream_options": {"include_usage": True},
            "temperature": arguments.temperature, **({} if arguments.allow_eos else {"ignore_eos": True}),
            **arguments.extra_body,
        }  # fmt: skip
        if arguments.profile:
            _profile(f"{url}/start_profile", headers)
            stack.callback(_profile, f"{url}/stop_profile", headers)
        points, outcomes = _run_loads(arguments, target, shape, fields, server, offline)
    if arguments.plot is not None:
        plot(points, outcomes, dict(arguments.goodput), arguments.plot)
    text = command.dump_object(points[0]) if len(points) == 1 else "\n".join(json.dumps(one) for one in points)
    if arguments.output is None:
        print(text)
    else:
        Path(arguments.output).write_text(text + "\n", encoding="utf-8")
    return 1 if any(one["failed"] for one in points) else 0


def _run_loads(
    arguments: argparse.Namespace,
    target: Target,
    shape: Shape,
    fields: dict[str, Any],
    server: OwnServer | None,
    offline: dict[str, float] | None,
) -> tuple[list[dict[str, Any]], list[Outcome]]:
    goodput, points, outcomes = dict(arguments.goodput), [], []
    loads = [(rate, most) for rate in arguments.request_rate for most in arguments.max_concurrency]
    if arguments.num_warmup:
        others = replace(shape, seed=shape.seed + len(loads) * _SEEDS)
        warm_up = make_conversations(others, fields, arguments.num_warmup)
        outcome = run_processes(target, warm_up, 1, lambda progress: None)
        if all(one.error for one in outcome.samples):
            raise command.UsageError(f"{target.base_url} answers no request: {outcome.samples[0].error}")
    with LiveTable(is_shown=sys.stderr.isatty(), goodput=goodput) as table:
        for number, (rate, concurrency) in enumerate(loads):
            own = replace(shape, seed=shape.seed + number * _SEEDS)  # no load finds prompts of another one in a cache
            conversations = _conversations(arguments, own, fields, rate)
            name = "trace" if arguments.trace else f"{rate:g}/s"
            name += f", {concurrency} at once" if concurrency else ""
            table.begin(name, sum(len(one.turns) for one in conversations))
            before, drafts = {} if server is None else server.cpu_s(), _drafts(target.base_url)
            outcome = run_processes(target, conversations, concurrency, table.update)
            point = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
                **dict.fromkeys(("endpoint_type", "backend"), "openai-chat" if shape.is_chat else "openai"),
                "label": arguments.label,
                "model_id": fields["model"],
                "tokenizer_id": None,
                "num_prompts": len(outcome.samples),
                "request_rate": rate if math.isfinite(rate) else "inf",
                "burstiness": arguments.burstiness,
                "max_concurrency": concurrency or None,
                **results(outcome, goodput, concurrency),
                "short_outputs": count_short(outcome.samples, conversations),
                **_acceptance(drafts, _drafts(target.base_url)),
            }
            if server is not None:
                point["server"] = _compared(point, before, server.cpu_s(), offline)
            if arguments.save_detailed:
                point |= _details(outcome)
            points.append(point)
            outcomes.append(outcome)
            row = table.end(outcome)
            if not sys.stderr.isatty():
                command.print_status(f"[{row}]")
            _warn(point, allows_eos=arguments.allow_eos)
    return points, outcomes


def _conversations(
    arguments: argparse.Namespace, shape: Shape, fields: dict[str, Any], rate: float
) -> list[Conversation]:
    if arguments.trace is not None:
        return read_trace(arguments.trace, shape, fields, arguments.trace_speed)[: arguments.num_prompts]
    count = arguments.num_prompts or 100
    if arguments.duration is not None:
        count = max(1, round(rate * arguments.duration))
    return with_arrivals(make_conversations(shape, fields, count), rate, shape.seed, arguments.burstiness)


def _compared(
    point: dict[str, Any], before: dict[str, float], after: dict[str, float], offline: dict[str, float] | None
) -> dict[str, Any]:
    """CPU times of the server for each token, and shares of the offline engine's rate."""
    tokens = point["total_output_tokens"] or 1
    cpu = {name: 1e6 * (value - before.get(name, 0.0)) / tokens for name, value in after.items()}
    found: dict[str, Any] = {"cpu_us_per_token": cpu}
    if offline is not None:
        found |= {"offline": offline, "share": ratio(point["output_throughput"], offline["tokens_per_s"])}
        everything = sum(cpu.values()) + (point["client"]["cpu_us_per_token"] or 0.0)
        found["cpu_share"] = offline["cpu_us_per_token"] / everything if cpu else None
    return found


_DRAFTS = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$", re.M
)


def _drafts(url: str) -> dict[tuple[str, int], float]:
    """What the target's metrics count of drafts, of all engines together; positions of the last kind are told apart."""
    counts: dict[tuple[str, int], float] = defaultdict(float)
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        for kind, labels, value in _DRAFTS.findall(response.read().decode("utf-8", "replace")):
            position = re.search(r'position="(\d+)"', labels)
            counts[kind, int(position[1]) if position else 0] += float(value)
    return counts


def _acceptance(before: dict[tuple[str, int], float], after: dict[tuple[str, int], float]) -> dict[str, Any]:
    """Acceptance of drafts in a load, by the keys of `vllm bench serve`; empty without drafts."""
    count = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts, drafted, accepted = (count.get((kind, 0), 0.0) for kind in ("drafts", "draft_tokens", "accepted_tokens"))
    if not drafted or not drafts:
        return {}
    by_position = sorted((place, value) for (kind, place), value in count.items() if kind == "accepted_tokens_per_pos")
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [value / drafts for _, value in by_position],
    }


def _details(outcome: Outcome) -> dict[str, Any]:
    samples = outcome.samples
    return {
        "input_lens": [one.num_prompt_tokens or None for one in samples],
        "output_lens": [one.num_output_tokens for one in samples],
        "start_times": [one.sent for one in samples],
        "ttfts": [max(0.0, one.first - one.sent) for one in samples],
        "itls": [[*gaps(one)] for one in samples],
        "latencies": [max(0.0, one.end - one.sent) for one in samples],
        "queue_times": [one.sent - one.due for one in samples],
        "errors": [one.error for one in samples],
    }


def _warn(point: dict[str, Any], *, allows_eos: bool) -> None:
    client = point["client"]
    if client["is_limit"]:
        command.print_status(
            f"warning: the client may be the limit (a process uses {client['busiest_cpu_share']:.0%} of a core, and is "
            f"{client['p99_loop_lag_ms']:.0f} ms late); give more --client-processes, or free cores"
        )
    if (number := point["short_outputs"]) and not allows_eos:
        command.print_status(
            f"warning: {number} of {command.count(point['completed'], 'output')} ended before --output-len: the target "
            "does not know ignore_eos, or limits outputs; --allow-eos accepts it"
        )
    if number := point["without_usage"]:
        prompts = "are not known" if point["total_input_tokens"] is None else "are counted as they were sent"
        command.print_status(
            f"warning: {number} of {command.count(point['completed'], 'response')} report no usage: tokens of outputs "
            f"are events, and those of prompts {prompts}"
        )
    for reason, number in point["error_counts"].items():
        command.print_status(f"warning: {command.count(number, 'request')} failed: {reason}")


def _check(arguments: argparse.Namespace) -> None:
    """Raises UsageError: flags do not fit together."""
    if arguments.output is not None:
        command.check_output_file("--output", arguments.output)
    check_plot_file("--plot", arguments.plot)
    if arguments.offline and (arguments.base_url is not None or arguments.trace or arguments.endpoint == "chat"):
        raise command.UsageError(
            "--offline goes with completions of random prompts, and without --base-url and --trace"
        )
    if arguments.base_url is not None and not re.match(r"https?://[^/]", arguments.base_url):
        raise command.UsageError(f"--base-url is {arguments.base_url!r}; it must begin with http:// or https://")
    if arguments.base_url is not None:
        _check_url(arguments.base_url)
    if arguments.trace is None and arguments.trace_speed != 1:
        raise command.UsageError(f"--trace-speed is {arguments.trace_speed:g}, and there is no --trace")
    if arguments.num_prefixes > 1 and not arguments.prefix_len:
        raise command.UsageError(f"--num-prefixes is {arguments.num_prefixes}, and there is no --prefix-len")
    if own := sorted(arguments.extra_body.keys() & _OWN_FIELDS.keys()):
        raise command.UsageError(f"--extra-body has {own[0]}, which {_OWN_FIELDS[own[0]]} gives; leave it out")
    engine = sorted(given_settings(arguments).keys() - {"model"})
    if arguments.base_url is not None and engine:
        raise command.UsageError(
            f"--{engine[0].replace('_', '-')} is for an engine that is started, and the server at --base-url runs; "
            "leave one of them out"
        )
    if arguments.turns > 1 and arguments.endpoint != "chat":
        raise command.UsageError("--turns needs --endpoint chat")
    if arguments.duration is not None and (
        arguments.num_prompts or not all(map(math.isfinite, arguments.request_rate))
    ):
        raise command.UsageError("--duration goes with --request-rate, and in place of --num-prompts")
    if arguments.prefix_len > arguments.input_len.low:
        raise command.UsageError(f"--prefix-len {arguments.prefix_len} is more than --input-len {arguments.input_len}")
    if arguments.trace is not None and arguments.request_rate != (math.inf,):
        raise command.UsageError("--trace has the times of its requests; leave out --request-rate")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise command.UsageError(f"--base-url is {url!r}; its port must be 1 to 65535") from error
    if port == 0 or not parts.hostname:
        raise command.UsageError(f"--base-url is {url!r}; it must have a host, and a port of 1 to 65535")
    if parts.username is not None or parts.query or parts.fragment:
        text = "it can be a host, a port and a path; give a key with --target-key, other headers with --header"
        raise command.UsageError(f"--base-url is {url!r}; {text}")


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    headers = {}
    for given in arguments.header:
        name, colon, value = given.partition(":")
        if not colon:
            raise command.UsageError(f"--header {given!r} has no colon; write NAME:VALUE")
        headers[name.strip()] = value.strip()
    if key := arguments.target_key or env.openai_key():
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _profile(url: str, headers: dict[str, str]) -> None:
    """Begin or end a profile of the target. Raises UsageError: it refuses."""
    own = {"Authorization": f"Bearer {key}"} if (key := env.admin_key()) else {}
    try:
        request = urllib.request.Request(url, method="POST", headers=headers | own)
        with urllib.request.urlopen(request, timeout=600) as response:
            files = (json.loads(response.read() or b"{}") or {}).get("files", ())
    except (OSError, ValueError) as error:
        text = error.read().decode("utf-8", "replace") if isinstance(error, urllib.error.HTTPError) else str(error)
        raise command.UsageError(f"--profile: {url}: {text:.500}") from error
    for file in files:
        command.print_status(f"profile: {file}")


def _first_model(url: str, headers: dict[str, str]) -> str:
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        advice = "--target-key, or OPENAI_API_KEY" if error.code in (401, 403) else "--request-model"
        raise command.UsageError(f"{url}/v1/models answers {error.code}; give {advice}") from error
    except OSError as error:
        raise command.UsageError(f"{url} cannot be reached: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise command.UsageError(f"{url}/v1/models lists no model ({error}); give --request-model") from error


def _rates(text: str) -> tuple[float, ...]:
    return tuple(map(command.positive, text.split(",")))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(command.at_least(1), text.split(",")))


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in ("ttft", "tpot", "e2el") and float(limit) > 0:
            return name, float(limit)
    raise argparse.ArgumentTypeError(f"{text!r} is no limit; write ttft:500, tpot:50 or e2el:5000, in ms")


COMMAND = command.Command("serve", "measure a server under load", add_arguments, run, _EPILOG, "[MODEL] ")
