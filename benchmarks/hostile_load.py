"""What other clients wait for while one sends requests of a client's size, and the memory that they leave.

    python benchmarks/hostile_load.py [--attacks NAME ...] [--repeats 3] [--streams 4] [server flags]

Each attack is sent by several connections at once, beside a stopwatch on `/health`, `/metrics` and a completion of one
token. One JSON line for each attack: the slowest answer of each in milliseconds, the statuses and the slowest answer of
the attack itself, and the resident memory of the API server's process afterwards. Compare two commits on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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


async def watch(
    url: str, send: Callable[[httpx.AsyncClient], Any], slowest: list[float], others: Counter[int], end: asyncio.Event
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while not end.is_set():
            begin = time.perf_counter()
            response = await send(client)
            slowest.append(1000 * (time.perf_counter() - begin))
            others[response.status_code] += 1
            await asyncio.sleep(0.005)


def attack_all(url: str, name: str, repeats: int, streams: int, results: Any) -> None:
    """Attack from a process of its own; put the statuses and the slowest answer."""
    path, make = ATTACKS[name]
    content = make()
    body = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    results.put(len(body) >> 10)
    answers: Counter[int] = Counter()

    async def run() -> list[float]:
        return await asyncio.gather(*(attack(url, path, body, repeats, answers) for _ in range(streams)))

    slowest = max(asyncio.run(run()))
    results.put((dict(answers), slowest))


async def attack(url: str, path: str, body: bytes, repeats: int, answers: Counter[int]) -> float:
    slowest = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for _ in range(repeats):
            begin = time.perf_counter()
            try:
                response = await client.post(path, content=body, headers={"content-type": "application/json"})
                answers[response.status_code] += 1
            except httpx.HTTPError:
                answers[0] += 1
            slowest = max(slowest, time.perf_counter() - begin)
    return 1000 * slowest


async def measure(url: str, pid: int, name: str, repeats: int, streams: int) -> dict[str, Any]:
    end, waits = asyncio.Event(), {"health": [0.0], "metrics": [0.0], "completion": [0.0]}
    others: Counter[int] = Counter()
    watched = [
        asyncio.create_task(watch(url, lambda client: client.get("/health"), waits["health"], others, end)),
        asyncio.create_task(watch(url, lambda client: client.get("/metrics"), waits["metrics"], others, end)),
        asyncio.create_task(
            watch(url, lambda client: client.post(COMPLETIONS, json=SMALL), waits["completion"], others, end)
        ),
    ]
    results: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=attack_all, args=(url, name, repeats, streams, results))
    process.start()
    body_kib = await asyncio.to_thread(results.get)
    for one in waits.values():
        one[:] = [0.0]
    answers, slowest = await asyncio.to_thread(results.get)
    end.set()
    await asyncio.gather(*watched)
    process.join()
    await asyncio.sleep(1.5)
    return {
        "attack": name,
        "body_kib": body_kib,
        **{f"{one}_ms": round(max(values)) for one, values in waits.items()},
        "others_refused": {status: count for status, count in others.items() if status != 200},
        "statuses": answers,
        "attack_ms": round(slowest),
        "memory_mib": memory_mib(pid),
        "peak_mib": memory_mib(pid, "VmHWM"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="of each connection")
    parser.add_argument("--streams", type=int, default=4, help="connections that attack at once")
    arguments, flags = parser.parse_known_args()
    with server(flags) as (url, pid):
        for name in arguments.attacks:
            print(json.dumps(asyncio.run(measure(url, pid, name, arguments.repeats, arguments.streams))), flush=True)


if __name__ == "__main__":
    main()
