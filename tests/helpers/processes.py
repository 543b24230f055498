"""Processes of tests: whether they have ended, without asking again and again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.helpers.gate import HANG


class Watched:
    """Processes, anybody's children, that are to end. Made while they run: their ids may be reused later."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def wait(self) -> None:
        """Return when all have ended; a test that waits in vain fails."""
        for pid, descriptor in self._descriptors.items():
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            assert poller.poll(HANG * 1000), f"process {pid} has not ended"
            os.close(descriptor)
        self._descriptors = {}

    def kill(self, pid: int) -> None:
        signal.pidfd_send_signal(self._descriptors[pid], signal.SIGKILL)


@contextmanager
def running_child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, whose output is read; it is killed if it is still there in the end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
