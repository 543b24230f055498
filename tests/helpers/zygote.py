"""Processes of tests that are forked from one that has imported torch, which takes an interpreter two seconds.

A forked process has what a started one has: it is a child of the process that asked for it, with its own arguments,
environment, working directory, descriptors, session and signals, it runs its command as ``__main__``, and it ends as
interpreters end. What `ForkedPopen` has run can do the same: it has a zygote of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

READ_AT_START = ("KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
"""Beginnings of the names of variables that interpreters and libraries read when they start. (libgomp's own matter to
several threads, which tests do not have, and Triton is not imported.)"""
OPTIONS = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
"""Of this interpreter."""
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
"""Of prctl(2)."""
NAME = "zygote"
"""Of these processes in ``/proc/PID/comm``. Others have the last two parts of their module's name there, or ``python``;
their command lines are those of the zygote."""
_ROOT = Path(__file__).parents[2]
_HIGH = 512
"""Numbers of descriptors from here on are not those of other processes."""
_SIZE = struct.Struct("!I")


@dataclass(frozen=True)
class Command:
    """What a process is to run, and where. Its descriptors are sent beside it."""

    words: list[str]
    """``-c CODE``, ``-m MODULE`` or a path, and arguments."""
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    """The numbers that they get."""
    starts_session: bool
    has_zygote: bool
    blocked_signals: set[int]

    def enter(self, received: Sequence[int]) -> None:
        """In the new process: take over all but the command itself."""
        _set_name(".".join(self.words[1].split(".")[-2:]) if self.words[0] == "-m" else "python")
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        _renumber(received, self.descriptors, ZYGOTE.descriptors)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)

    def run(self) -> None:
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        kind, *sys.argv = self.words
        if kind == "-m":
            sys.path[0] = self.folder
            if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
                sys.modules.pop(sys.argv[0], None)  # it is run as ``__main__``, and imported by that name only then
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.path[0], code, sys.argv[0] = "", sys.argv[0], "-c"
            exec(compile(code, "<string>", "exec"), main.__dict__)
        else:
            sys.path[0], main.__file__, sys.argv = str(Path(kind).parent), kind, self.words
            exec(compile(Path(kind).read_text(), kind, "exec"), main.__dict__)


def _set_name(name: str) -> None:
    """Of this process; the system keeps 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _renumber(received: Sequence[int], numbers: Sequence[int], others: Iterable[int]) -> None:
    """Give received descriptors their numbers, and close all but those and ``others``, which have high ones."""
    beyond = max((*received, *numbers)) + 1
    copies = [os.dup2(descriptor, beyond + index) for index, descriptor in enumerate(received)]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in numbers and descriptor not in others:
            with contextlib.suppress(OSError):  # that of the folder
                os.close(descriptor)


class Zygote:
    """The process with the imports, as its user sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    @property
    def descriptors(self) -> list[int]:
        return [] if self._channel is None else [self._channel.fileno()]

    def can_run(self, words: Sequence[str], environment: dict[str, str]) -> bool:
        """Whether a forked process can take the place of this one: nothing that is read at its start differs. On Linux
        only: elsewhere no process can become the parent of another one's child."""
        if (
            sys.platform != "linux"
            or words[0] != sys.executable
            or not (words[1] in ("-c", "-m") or words[1].endswith(".py"))
        ):
            return False
        own = dict(os.environ) if self._channel is None else self._environment
        return _read_at_start(environment) == _read_at_start(own)

    def fork(
        self, words: Sequence[str], environment: dict[str, str], folder: str, descriptors: dict[int, int], *,
        starts_session: bool = False, has_zygote: bool = False,
    ) -> int:  # fmt: skip
        """Run a command in a process; ``descriptors``: its number of each -> that in this process. Returns its id."""
        blocked = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
        command = Command(list(words[1:]), environment, folder, list(descriptors), starts_session, has_zygote, blocked)
        content = pickle.dumps(command)
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            channel = self._channel or self._start()
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the process becomes a child of this one when its parent ends
            try:
                socket.send_fds(channel, [_SIZE.pack(len(content))], list(descriptors.values()))
                channel.sendall(content)
                reply = channel.recv(_SIZE.size, socket.MSG_WAITALL)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return int(_SIZE.unpack(reply)[0])

    def _start(self) -> socket.socket:
        channel, other = socket.socketpair()
        with other:
            command = [sys.executable, *OPTIONS, "-m", __name__, str(other.fileno())]
            self._process = subprocess.Popen(command, cwd=_ROOT, pass_fds=[other.fileno()])
        self.use(channel)
        atexit.register(self._close)
        return channel

    def use(self, channel: socket.socket) -> None:
        """Use one that runs, with the environment of this process."""
        self._channel, self._environment = channel, dict(os.environ)

    def _close(self) -> None:
        assert self._channel is not None and self._process is not None
        self._channel.close()
        self._process.wait()


ZYGOTE = Zygote()


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, with the process forked where that is possible."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (
            executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, stdin, stdin_writer,
            stdout_reader, stdout, stderr_reader, stderr, restore_signals, gid, gids, uid, umask,
            starts_session, *group,
        ) = rest  # fmt: skip
        environment = dict(os.environ if env is None else env)
        is_plain = (executable, preexec_fn, close_fds, shell, restore_signals) == (None, None, True, False, True)
        is_plain = is_plain and (gid, gids, uid, umask, group) == (None, None, None, -1, [-1] * len(group))
        if not (is_plain and ZYGOTE.can_run(args, environment)):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        ends = {number: number if end == -1 else end for number, end in enumerate((stdin, stdout, stderr))}
        ends.update((descriptor, descriptor) for descriptor in pass_fds)
        folder = str(cwd or os.getcwd())
        self.pid = ZYGOTE.fork(args, environment, folder, ends, starts_session=starts_session, has_zygote=True)
        self._child_created = True
        pipes = stdin, stdin_writer, stdout_reader, stdout, stderr_reader, stderr
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def _spawn_forked(path: str, words: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`."""
    command = [sys.executable, *map(os.fsdecode, words[-3:])]  # without options, which are those of this process
    if command[-1] == "--multiprocessing-fork" and ZYGOTE.can_run(command, dict(os.environ)):
        return ZYGOTE.fork(command, dict(os.environ), os.getcwd(), {one: one for one in (0, 1, 2, *descriptors)})
    return _spawn(path, words, descriptors)


def fork_processes(replace: Callable[[Any, str, Any], object] = setattr) -> None:
    """From now on, processes of `multiprocessing`, and engines in processes of their own, are forked."""
    from fleetfoot.engine import child_process

    _keep_code(replace)
    replace(multiprocessing.util, "spawnv_passfds", _spawn_forked)
    replace(child_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedPopen}))


def _keep_code(replace: Callable[[Any, str, Any], object] = setattr) -> None:
    """Workers that start one after the other execute the same code: of what each gives back, the next one maps every
    page again, which takes longer than all else at its start."""
    from fleetfoot.executor import worker

    replace(worker, "release_code", lambda: None)


# --- in the process with the imports ----------------------------------------------------------------------------------


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def _serve(channel: socket.socket) -> tuple[Command, list[int]] | None:
    """Fork a process for each command. Returns the command in the new process, and None at the end."""
    while True:
        size, received, _, _ = socket.recv_fds(channel, _SIZE.size, 64)
        if not size:
            return None
        command: Command = pickle.loads(channel.recv(_SIZE.unpack(size)[0], socket.MSG_WAITALL))
        pid_reader, pid_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        middle = os.fork()
        if not middle:
            if pid := os.fork():
                os.write(pid_writer, _SIZE.pack(pid))
                os._exit(0)
            os.close(go_writer)
            os.read(go_reader, 1)  # until the process has its parent
            channel.close()
            if command.starts_session:
                os.setsid()
            if not command.has_zygote:
                return command, received
            own, other = socket.socketpair()
            if os.fork():
                other.close()
                ZYGOTE.use(socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, _HIGH)))
                fork_processes()
                return command, received
            own.close()
            channel = other
        else:
            os.waitpid(middle, 0)
            channel.sendall(os.read(pid_reader, _SIZE.size))
            os.close(go_writer)
        for descriptor in (pid_reader, pid_writer, go_reader, *received):
            os.close(descriptor)


def _main() -> None:
    import fleetfoot.cli.main
    import fleetfoot.engine.process
    import fleetfoot.executor.worker_loop
    import fleetfoot.server.serve  # noqa: F401

    _keep_code()
    _set_name(NAME)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    found = _serve(socket.socket(fileno=int(sys.argv[1])))
    if found is None:
        os._exit(0)
    command, received = found
    command.enter(received)
    command.run()


if __name__ == "__main__":
    from tests.helpers import zygote  # commands are pickled by this name

    zygote._main()
