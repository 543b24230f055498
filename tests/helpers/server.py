"""``fleetfoot serve`` in a child process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.helpers.zygote import ForkedPopen


class RunningServer:
    """A server on a free port of loopback; its log is kept. ``flags``: of ``fleetfoot serve``, or of ``command``.

    There is one API server, whatever the machine, unless a flag has another number. ``is_forked``: see
    `tests.helpers.zygote`. ``program``: arguments of Python in place of ``-m fleetfoot``.
    """

    def __init__(
        self,
        *flags: str,
        port: int = 0,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        command: str = "serve",
        is_forked: bool = True,
        program: tuple[str, ...] = (),
    ) -> None:
        words = [
            sys.executable,
            *(program or ("-m", "fleetfoot")),
            command,
            "--port",
            str(port),
            "--api-server-count",
            "1",
            *flags,
        ]
        self.process: subprocess.Popen[str] = (ForkedPopen if is_forked else subprocess.Popen)(
            words, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}, cwd=cwd, start_new_session=True
        )
        self.log: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r'listening on ([^\s"]+)', line):
                self.url = match[1]
                break
        self._has_more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_more:
                self.log.append(line)
                self._has_more.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until a line of the log has the text."""
        with self._has_more:
            self._has_more.wait_for(lambda: any(text in line for line in self.log))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        return code

    def stats(self) -> str:
        return httpx.get(f"{self.url}/metrics").text

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


def refusal_of_full_queue(client: httpx.Client) -> httpx.Response:
    """The answer to more requests than a queue of 64 has room for beside as many of the same client. The queue is empty
    when this returns: a connection that is closed frees its places some time later."""
    body = {"prompt": ["a"] * 64, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as full:
        refusal = client.post("/v1/completions", json={"prompt": ["a"] * 9})
        full.read()
    return refusal
