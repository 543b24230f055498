"""What other clients wait for while one sends requests of a client's size, and the memory that they leave.

    python benchmarks/hostile_load.py [--attacks NAME ...] [--repeats 3] [--streams 4] [--json FILE] [server flags]

Each attack is sent by several connections at once, after one that is not measured. Beside it, stopwatches ask for
`/health`, `/metrics` and a completion of one token, each in a process of its own with real-time priority, and the
attack has the least priority, and an address of its own: clients are on other machines. The control is the same
stopwatch before a server that does nothing, so it shows what the machine itself adds. One JSON line for each attack:
the slowest answer of each in milliseconds and how many took longer than `LIMIT_MS`, the statuses and the slowest answer
of the attack itself, and the resident memory of the API server's process afterwards. At the end follows a table; with
``--json`` all is written to a file, too. Compare two commits on one machine.

What depends on no other process of the machine: ``loop_ms`` is the most processor time that the API server's event loop
took for other work while a timer of it was due, and ``held_ms`` that of any thread while another one waited for the
interpreter. ``at`` has the stacks of the longest of these, ``collections`` the times and generations of the longest
collections of garbage, which are among them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SMALL: dict[str, Any] = {"prompt": "Once", "max_tokens": 1}
PART = {"type": "text", "text": "a"}
WORDS = "the quick brown fox jumps over a lazy dog, "


def tools(count: int, num_properties: int = 0) -> list[Any]:
    properties = {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}} for number in range(count)
    ]


def text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def nested(depth: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": ' + b"[" * depth + b"]" * depth + b"}]}"


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ATTACKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "nothing": (COMPLETIONS, lambda: SMALL),
    "tools-3000-required": (CHATS, lambda: {**CHAT, "tools": tools(3000), "tool_choice": "required"}),
    "tools-1000-required": (CHATS, lambda: {**CHAT, "tools": tools(1000), "tool_choice": "required"}),
    "tools-10000-auto": (CHATS, lambda: {**CHAT, "tools": tools(10000)}),
    "tools-200-auto": (CHATS, lambda: {**CHAT, "tools": tools(200, 10)}),
    "prompts-2000000": (COMPLETIONS, lambda: {**SMALL, "prompt": ["a"] * 2_000_000}),
    "prompts-2000-of-500": (COMPLETIONS, lambda: {**SMALL, "prompt": [[5 + n % 200] * 500 for n in range(2000)]}),
    "prompts-2048": (COMPLETIONS, lambda: {**SMALL, "prompt": ["a"] * 2048}),
    "token-ids-1000000": (COMPLETIONS, lambda: {**SMALL, "prompt": [5] * 1_000_000}),
    "logit-bias-900000": (COMPLETIONS, lambda: {**SMALL, "logit_bias": {str(one): 1 for one in range(900_000)}}),
    "logit-bias-16000": (COMPLETIONS, lambda: {**SMALL, "logit_bias": {str(one % 256): 1 for one in range(16_000)}}),
    "stop-strings-400000": (COMPLETIONS, lambda: {**SMALL, "stop": ["a"] * 400_000}),
    "messages-400000": (CHATS, lambda: {**CHAT, "messages": CHAT["messages"] * 400_000}),
    "messages-16000": (CHATS, lambda: {**CHAT, "messages": CHAT["messages"] * 16_000}),
    "parts-300000": (CHATS, lambda: {"messages": [{"role": "user", "content": [PART] * 300_000}]}),
    "tokenize-14m": ("/tokenize", lambda: {"prompt": text(14 << 20)}),
    "tokenize-4m": ("/tokenize", lambda: {"prompt": text(4 << 20)}),
    "detokenize-1000000": ("/detokenize", lambda: {"tokens": [5] * 1_000_000}),
    "text-8m": (COMPLETIONS, lambda: {**SMALL, "prompt": text(8 << 20)}),
    "truncated-3-of-5m": (COMPLETIONS, lambda: {**SMALL, "prompt": [text(5 << 20)] * 3, "truncate_prompt_tokens": 64}),
    "deep-json": (CHATS, lambda: nested(1_000_000)),
    "schema-properties-40000": (
        CHATS,
        lambda: {**CHAT, "response_format": schema({f"p{number}": {} for number in range(40_000)})},
    ),
    "schema-properties-5000": (
        CHATS,
        lambda: {**CHAT, "response_format": schema({f"p{number}": {"type": "string"} for number in range(5000)})},
    ),
    "choices-100000": (COMPLETIONS, lambda: {**SMALL, "guided_choice": [f"c{number}" for number in range(100_000)]}),
    "responses-300000": ("/v1/responses", lambda: {"input": [{"role": "user", "content": "a"}] * 300_000}),
    "anthropic-300000": ("/v1/messages", lambda: {**CHAT, "model": "m", "messages": CHAT["messages"] * 300_000}),
    "streams-1024-logprobs": (
        COMPLETIONS,
        lambda: {**SMALL, "n": 1024, "logprobs": 20, "max_tokens": 32, "temperature": 1, "stream": True},
    ),
    "arguments-60000": (CHATS, lambda: {**CHAT, "messages": [*CHAT["messages"], call_of(60_000)]}),
    "metadata-400000": (COMPLETIONS, lambda: {**SMALL, "metadata": {str(number): [] for number in range(400_000)}}),
}


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": content}}


def call_of(num_values: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"a": [0] * num_values})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


class Probe:
    """Measures, in the process of the API server, what keeps its event loop and its interpreter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop_ms: list[float] = []
        self._held: list[tuple[float, str]] = []
        self._collections: list[tuple[float, int]] = []
        self._begun = 0.0
        gc.callbacks.append(self._note_collection)

    def start(self) -> None:
        """Begin in the thread of the event loop. SIGUSR1 writes the report, and begins anew."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._write)
        self._task = loop.create_task(self._beat())
        threading.Thread(target=self._wait, daemon=True).start()

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self._collections.append((1000 * (time.thread_time() - self._begun), info["generation"]))

    async def _beat(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(_BEAT_S)
            now = time.thread_time()
            self._loop_ms.append(1000 * (now - last))
            last = now

    def _wait(self) -> None:
        be_first()
        while True:
            before, begin = thread_times(), time.monotonic()
            time.sleep(_BEAT_S)
            if (waited := time.monotonic() - begin - _BEAT_S) > 2 * _BEAT_S:
                used = {ident: spent - before.get(ident, spent) for ident, spent in thread_times().items()}
                ident = max(used, key=lambda one: used[one])
                frames = traceback.extract_stack(sys._current_frames().get(ident))[-_FRAMES:]
                places = " < ".join(f"{one.name} {Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
                self._held.append((1000 * min(waited, used[ident]), places))

    def _write(self) -> None:
        held = sorted(self._held, reverse=True)
        report = {"loop_ms": round(max(self._loop_ms, default=0), 1), "held_ms": round(held[0][0], 1) if held else 0}
        new = self._path.with_suffix(".new")
        collections = sorted(self._collections, reverse=True)[:3]
        new.write_text(json.dumps({**report, "at": held[:3], "collections": collections}))
        self._collections.clear()
        new.rename(self._path)
        self._loop_ms.clear()
        self._held.clear()


_BEAT_S = 0.001
_FRAMES = 4


def thread_times() -> dict[int, float]:
    """The processor time of each thread, in seconds."""
    found = {}
    for thread in threading.enumerate():
        with suppress(OSError, TypeError):  # it has ended, or has not begun
            found[thread.ident or 0] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))  # type: ignore[arg-type]
    return found


def serve_with_probe(path: str, flags: list[str]) -> int:
    """``fleetfoot serve``, with a probe in its process."""
    from fleetfoot.cli.main import main
    from fleetfoot.server import api_server

    run = api_server.ApiServer.run

    async def run_with_probe(self: Any) -> None:
        Probe(Path(path)).start()
        await run(self)

    api_server.ApiServer.run = run_with_probe  # type: ignore[method-assign]
    return main(["serve", *flags])


def report_of(pid: int, path: Path) -> dict[str, Any]:
    """The report of the probe since the last one."""
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        time.sleep(0.01)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@contextmanager
def server(flags: list[str], path: Path) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process. ``path``: of the reports of its probe."""
    words = [sys.executable, __file__, _PROBE, str(path), "--port", "0", "--served-model-name", "m", *flags]
    process = subprocess.Popen([*words, "--api-server-count", "1"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r'listening on ([^\s"]+)', line):
                break
        yield match[1], process.pid  # type: ignore[index]
    finally:
        process.terminate()
        process.communicate()


def memory_mib(pid: int, field: str = "VmRSS") -> int:
    match = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) >> 10 if match else 0


_PROBE = "--probe"
LIMIT_MS = 50.0
_INTERVAL_S = 0.005
_SPAWN = multiprocessing.get_context("spawn")


def be_first() -> None:
    """Give this thread real-time priority, where that is allowed."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def send(connection: http.client.HTTPConnection, path: str, body: bytes | None) -> int:
    """The status of a request; 0: the connection was closed."""
    try:
        connection.request("GET" if body is None else "POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return 0
    return response.status


def watch(address: str, path: str, body: bytes | None, pipe: Any) -> None:
    """Time requests until the pipe has data; then send all ``(begin, end, status)``."""
    be_first()
    connection = http.client.HTTPConnection(address, timeout=300)
    times = []
    while not pipe.poll(_INTERVAL_S):
        begin = time.perf_counter()
        status = send(connection, path, body)
        times.append((begin, time.perf_counter(), status))
    pipe.recv()
    pipe.send(times)


def answer_nothing(pipe: Any) -> None:
    """The server of the control."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(f"127.0.0.1:{listener.getsockname()[1]}")
        while True:
            connection, _ = listener.accept()
            while connection.recv(65536):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def attack_all(address: str, name: str, repeats: int, streams: int, pipe: Any) -> None:
    """Send the begin and the size of the attack, then its statuses and its slowest answer in milliseconds."""
    os.nice(19)
    path, make = ATTACKS[name]
    content = make()
    body = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    answers: Counter[int] = Counter()
    slowest = [0.0]

    def attack(repeats: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=300, source_address=("127.0.0.2", 0))
        for _ in range(repeats):
            begin = time.perf_counter()
            answers[send(connection, path, body)] += 1
            slowest.append(time.perf_counter() - begin)

    attack(1)
    answers.clear()
    slowest.clear()
    time.sleep(1)
    pipe.send((time.perf_counter(), len(body) >> 10))
    threads = [threading.Thread(target=attack, args=(repeats,)) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((time.perf_counter(), dict(answers), 1000 * max(slowest)))


def measure(url: str, pid: int, path: Path, control: str, name: str, repeats: int, streams: int) -> dict[str, Any]:
    address, small = urlsplit(url).netloc, json.dumps(SMALL).encode()
    targets = {
        "health": (address, "/health", None),
        "metrics": (address, "/metrics", None),
        "completion": (address, COMPLETIONS, small),
        "control": (control, "/", None),
    }
    stopwatches = {one: start(watch, *target) for one, target in targets.items()}
    process, pipe = start(attack_all, address, name, repeats, streams)
    begin, body_kib = pipe.recv()
    report_of(pid, path)
    end, answers, slowest = pipe.recv()
    process.join()
    refused: Counter[int] = Counter()
    waits = {}
    for one, (stopwatch, times) in stopwatches.items():
        times.send(None)
        measured = [(last - first, status) for first, last, status in times.recv() if last > begin and first < end]
        stopwatch.join()
        refused.update(status for _, status in measured if status != 200)
        milliseconds = [1000 * seconds for seconds, _ in measured]
        late = sum(one > LIMIT_MS for one in milliseconds)
        waits[one] = {"max_ms": round(max(milliseconds)), "late": late, "of": len(milliseconds)}
    time.sleep(1.5)
    return {
        "attack": name,
        "body_kib": body_kib,
        **waits,
        **report_of(pid, path),
        "others_refused": dict(refused),
        "statuses": answers,
        "attack_ms": round(slowest),
        "memory_mib": memory_mib(pid),
        "peak_mib": memory_mib(pid, "VmHWM"),
    }


def start(function: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """A process that runs a function, and a pipe to it."""
    mine, other = _SPAWN.Pipe()
    process = _SPAWN.Process(target=function, args=(*arguments, other), daemon=True)
    process.start()
    return process, mine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="of each connection")
    parser.add_argument("--streams", type=int, default=4, help="connections that attack at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports, too")
    arguments, flags = parser.parse_known_args()
    _, pipe = start(answer_nothing)
    control = pipe.recv()
    reports = []
    with tempfile.TemporaryDirectory() as folder, server(flags, path := Path(folder) / "probe") as (url, pid):
        for name in arguments.attacks:
            report = measure(url, pid, path, control, name, arguments.repeats, arguments.streams)
            print(json.dumps(report), flush=True)
            reports.append(report)
    print(table(reports))
    if arguments.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[2]}
        arguments.json.write_text(json.dumps({"machine": machine, "reports": reports}, indent=1))


def table(reports: list[dict[str, Any]]) -> str:
    """All reports in Markdown: of each the slowest answers in milliseconds, those of the control last."""
    columns = "health", "metrics", "completion", "control"
    lines = ["| attack | " + " | ".join(columns) + " | loop | held | MiB |", "| --- |" + " --- |" * 7]
    for one in reports:
        slowest = " | ".join(str(one[name]["max_ms"]) for name in columns)
        lines.append(f"| {one['attack']} | {slowest} | {one['loop_ms']} | {one['held_ms']} | {one['memory_mib']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == [_PROBE]:
        sys.exit(serve_with_probe(sys.argv[2], sys.argv[3:]))
    main()
