"""What other clients wait for while one sends requests of a client's size, and the memory that they leave.

    python benchmarks/hostile_load.py [--attacks NAME ...] [--repeats 3] [--streams 4] [server flags]

Each attack is sent by several connections at once, after one that is not measured. Beside it, stopwatches ask for
`/health`, `/metrics` and a completion of one token, each in a process of its own with real-time priority, and the
attack has the least priority, and an address of its own: clients are on other machines. The control is the same
stopwatch before a server that does nothing, so it shows what the machine itself adds. One JSON line for each attack:
the slowest answer of each in milliseconds and how many took longer than `LIMIT_MS`, the statuses and the slowest answer
of the attack itself, and the resident memory of the API server's process afterwards. Compare two commits on one
machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
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
    "metadata-400000": (COMPLETIONS, lambda: {**SMALL, "metadata": {str(number): [] for number in range(400_000)}}),
}


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": content}}


@contextmanager
def server(flags: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process."""
    words = [sys.executable, "-m", "fleetfoot", "serve", "--port", "0", "--served-model-name", "m", *flags]
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


LIMIT_MS = 50.0
_INTERVAL_S = 0.005
_SPAWN = multiprocessing.get_context("spawn")


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
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
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


def measure(url: str, pid: int, control: str, name: str, repeats: int, streams: int) -> dict[str, Any]:
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
    arguments, flags = parser.parse_known_args()
    _, pipe = start(answer_nothing)
    control = pipe.recv()
    with server(flags) as (url, pid):
        for name in arguments.attacks:
            report = measure(url, pid, control, name, arguments.repeats, arguments.streams)
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
