"""``--on-error restart`` of a server: an engine step fails, requests go on, and its state is visible."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.failing_steps import BEGUN, END, EVERY
from tests.helpers.server import RunningServer

BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
ROOT = Path(__file__).parents[2]
"""The folder in which a server finds the logits processor."""
FLAGS = (
    "--dtype",
    "float32",
    "--on-error",
    "restart",
    "--logits-processors",
    "tests.helpers.failing_steps:FailingSteps",
)


@pytest.fixture
def pipes(tmp_path: Path) -> dict[str, str]:
    found = {name: str(tmp_path / name) for name in (BEGUN, END)}
    for path in found.values():
        os.mkfifo(path)
    return found


def streamed(url: str) -> Iterator[str]:
    with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def test_a_stream_goes_on_after_a_restart(pipes: dict[str, str]) -> None:
    with RunningServer(*FLAGS, env=pipes, cwd=ROOT) as server, ThreadPoolExecutor(1) as pool:

        def get(path: str) -> httpx.Response:
            return httpx.get(server.url + path, timeout=60)

        text = pool.submit(lambda: "".join(streamed(server.url)))
        with open(pipes[BEGUN]) as begun:
            assert begun.read() == "begun"
        while get("/health").status_code == 200:  # until the message of the engine has arrived
            pass
        error = get("/health").json()["error"]
        assert (error["code"], get("/ready").status_code) == ("engine_interrupted", 503)
        with open(pipes[END], "w") as end:
            end.write("go on")
        assert text.result() == "".join(streamed(server.url))
        assert get("/health").status_code == get("/ready").status_code == 200
        assert 'fleetfoot:engine_restarts_total{engine="0",model_name=' in server.stats()
        assert server.stop() == 0
    assert any("restarts its workers (1 of at most 16 times" in line for line in server.log)


def test_an_engine_that_fails_again_and_again_ends_the_server() -> None:
    with RunningServer(*FLAGS, "--max-restarts", "1", env={EVERY: "1"}, cwd=ROOT) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert server.wait() == 1
