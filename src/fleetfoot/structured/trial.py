"""Compiles a grammar for trial in a process of its own, with limits of time and memory.

The library's compiler cannot be interrupted, and recursion without a limit ends its process: a constraint of one
request must not do that to an engine. A process is kept for the next grammar, and ends with this one.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fleetfoot.config import env
from fleetfoot.utils.process import write_to

_MAX_MEMORY = 2 << 30
_STACK_BYTES = 4 << 20  # half of what a thread of an engine has, so that what passes here has room there
_PATIENCE_S = 600.0  # how long a process may take by the clock: on a busy machine, time of a core is much less
_SHORTEST_S = 1e-6


class GrammarTrial:
    """Processes that compile grammars; as many as there are threads that call `run` at once. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, end_children, self._idle)
        """End the idle processes."""

    def run(self, grammar: str, timeout_s: float) -> str:
        """Compile a grammar, without a vocabulary, in at most ``timeout_s`` seconds of a core. Returns the error that
        the compiler finds; empty: there is none. Raises ValueError: it exceeds the limits."""
        process = None
        with contextlib.suppress(IndexError):
            process = self._idle.pop()
        if process is None or process.poll() is not None:
            process = start_child(__name__, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        write_to(process, json.dumps([grammar, max(timeout_s, _SHORTEST_S)]).encode() + b"\n")
        reply = process.stdout.readline() if select.select([process.stdout], [], [], _PATIENCE_S)[0] else b""
        if not reply:  # it has ended, or is too slow
            end_children([process])
            raise ValueError(
                f"structured_outputs cannot be compiled in {timeout_s:g} seconds of a core, with {_MAX_MEMORY >> 30} "
                "GiB, and within the depth of recursion; simplify it"
            )
        self._idle.append(process)
        return str(json.loads(reply))


def start_child(module: str, *arguments: int, **options: Any) -> subprocess.Popen[bytes]:
    """A process that runs a module. ``options``: of `subprocess.Popen`."""
    words, pipe = [sys.executable, "-m", module, *map(str, arguments)], subprocess.PIPE
    # in a session of its own: Ctrl-C in a terminal is for this process alone
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, env=env.for_child({}), start_new_session=True, **options)


def end_children(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        process = processes.pop()
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()


def _answer(find_error: Callable[[str], str]) -> None:
    """Compile each grammar of standard input, and answer with its error. A signal ends the process at the limit."""
    for line in sys.stdin:
        grammar, timeout_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        error = find_error(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    from llguidance import LLMatcher

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_answer, args=[LLMatcher.validate_grammar]).start()
