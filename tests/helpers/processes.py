"""Processes of tests, and waiting for their end without polling."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from tests.helpers.gate import HANG

SILENT = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
"""The command of a process that writes nothing, and ends with its input."""


class Watched:
    """Processes that are expected to end. Made while they run: their ids may be reused later."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def wait(self) -> None:
        """Return when all have ended."""
        for pid, descriptor in self._descriptors.items():
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            assert poller.poll(HANG * 1000), f"process {pid} has not ended"
            os.close(descriptor)
        self._descriptors = {}

    def kill(self, pid: int) -> None:
        signal.pidfd_send_signal(self._descriptors[pid], signal.SIGKILL)


@contextmanager
def running_child(*command: str, stdin: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, whose output is read; it is killed in the end."""
    with subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
