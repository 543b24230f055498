"""Routers of other projects, as their wheels install them, in front of engines on loopback."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx

MODEL = "story"


def tool(name: str) -> str:
    """The path of a command that a wheel has installed: beside this interpreter, or in the PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is not installed: `make test-contracts` installs it"
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Router:
    """A router in a child process; ``client`` sends it requests.

    ``program``: the command with its first arguments. ``flags``: of all routers, and further ones. ``ready``: a pattern
    of the log, and how often it is there once the router has its workers.
    """

    def __init__(self, *program: str, flags: tuple[str, ...], ready: tuple[str, int]) -> None:
        port, metrics = free_ports(2)
        places = "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)
        # else they send the same request to a lost worker, again and again; 1 would be an invalid request's refusal
        retries = "--worker-startup-check-interval", "1", "--cb-failure-threshold", "2"
        self.process = subprocess.Popen(
            [tool(program[0]), *program[1:], *places, *retries, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._wait(*ready)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        transport = httpx.HTTPTransport(retries=3)  # its socket may be open a moment later
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, transport=transport)

    def _wait(self, pattern: str, count: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            count -= bool(re.search(pattern, line))
            if count <= 0:
                return
        raise AssertionError("the router has ended: " + "".join(self.log))

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.log += self.process.stdout

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(60)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def vllm_router(*flags: str) -> Router:
    """``vllm-router`` before workers that the flags name."""
    return Router("vllm-router", flags=flags, ready=("Starting server on", 1))


def sglang_router(*urls: str, policy: str) -> Router:
    """``sglang-router`` before workers at ``urls``."""
    flags = "--policy", policy, "--worker-urls", *urls
    return Router("smg", "launch", flags=flags, ready=("Activated 1 worker", len(urls)))
