"""The beginning of a worker's process. Nothing heavy is imported before it is certain that it ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fleetfoot.executor.specs import WorkerSpec

if TYPE_CHECKING:
    pass

_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def run_worker(spec: WorkerSpec, lifeline: Connection) -> None:
    """The whole life of a worker's process.

    Args:
        lifeline: the reading end of a pipe that is closed, by whatever means, when the parent ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the engine decides
    _end_with_parent(spec, lifeline)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(name)s (worker {spec.rank}): %(message)s"))
    logger = logging.getLogger("fleetfoot")
    logger.addHandler(handler)
    logger.setLevel(spec.log_level)
    from fleetfoot.executor.worker_loop import serve

    exit_code = 0
    try:
        serve(spec)
    except BaseException:
        logger.exception("not everything could be given back")
        exit_code = 1
    # all is given back; taking Python and torch apart as well would take the engine's shutdown seconds
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _end_with_parent(spec: WorkerSpec, lifeline: Connection) -> None:
    """By a thread that waits for the end of the pipe, and by the kernel too: whatever the process is stuck in, it ends.

    The kernel's signal comes when the thread ends that has started this process, so it is asked for only where that
    is when the parent ends.
    """
    threading.Thread(target=_wait_for_end, args=(lifeline,), name="fleetfoot-lifeline", daemon=True).start()
    if spec.ends_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spec.parent:  # it has ended before it could be asked for
            os._exit(1)


def _wait_for_end(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
