"""Processes that compute token masks beside the thread that steps: the engine's side.

A mask takes 10 to 20 us, and threads of one process hold each other up within the library, so that eight take longer
than one. Each process has matchers of its own for some of the sequences (`mask_server`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleetfoot.config import env
from fleetfoot.native.loading import watch
from fleetfoot.structured import mask_server
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.mask_server import (
    DONE,
    IS_READY,
    LOOK_NS,
    NUM_COMMANDS,
    NUM_FAILED,
    NUM_READ,
    NUM_READY,
    OFFSET,
    PIPE_BYTES,
    POSTED,
    SETTLE,
    SLEEPS,
    TASK,
    WRAP,
    StepMemory,
)
from fleetfoot.structured.vocabulary import VocabularySource

logger = logging.getLogger(__name__)

_NUM_SLOTS = 1024
"""Sequences of a process."""
_MAX_GRAMMARS = 256
"""Grammars that a process keeps."""
_MAX_GRAMMAR = 1 << 17
"""Bytes of a grammar that is sent through a pipe. Larger ones stay with the thread that steps."""
_F_SETPIPE_SZ = 1031


class ProcessError(RuntimeError):
    """A process that computes masks has ended."""


class Replicas:
    """Matchers of sequences, in other processes; here there are none.

    A step: `add` for each sequence, `post`, `wait` for each process that has tasks.
    """

    num_processes = 0

    def open(self, grammar: GrammarText) -> Replica | None:
        """A matcher at the beginning of a grammar; None: there is no room, or no process is ready."""
        return None

    def add(
        self,
        replica: Replica,
        place: tuple[int, int],
        is_reset: bool,
        token_ids: Sequence[int],
        drafts: Sequence[int],
        bans: Sequence[int],
    ) -> bool:
        """Add a task to the step: the masks of a sequence's next token, and of those after its drafts.

        Args:
            place: the first of the masks of the step that are written, and their number.
            is_reset: the matcher begins again before it consumes tokens.
            token_ids: consumed first.
            bans: tokens that the first mask does not allow, if it allows others.

        Returns whether there is room.
        """
        return False

    def repeated(self, replicas: Sequence[Replica], bans: Sequence[Sequence[int]]) -> RepeatedTasks:
        """Tasks for one token and one mask of each sequence, in their order; see `add`."""
        raise ProcessError("there is no process")

    def post(self, offset: int, repeated: RepeatedTasks | None = None) -> None:
        """Begin to compute the step: what was added, or ``repeated``. ``offset``: int32 before its masks, in the file
        of masks."""

    def wait(self, process: int) -> list[int]:
        """Wait until a process that has tasks has written its masks. Returns the numbers of those tasks that have
        failed, in the order of `add`. Raises ProcessError: it has ended."""
        raise ProcessError("there is no process")

    def settle(self) -> None:
        """Wait until all grammars are compiled that were opened."""

    def close(self) -> None:
        """End the processes."""


@dataclass(slots=True)
class _Grammar:
    """A grammar that a process keeps."""

    number: int
    is_compiled: bool = False


class Replica:
    """A matcher in another process, which is given back when the object is collected."""

    __slots__ = ("_freed", "_ready", "grammar", "has_begun", "num_sent", "process", "slot")

    def __init__(self, process: int, slot: int, grammar: _Grammar, ready: memoryview, freed: deque[int]) -> None:
        self.process, self.slot, self.grammar = process, slot, grammar
        self.num_sent = 0
        """Tokens that it has consumed, or that are posted."""
        self.has_begun = False
        """Whether a step has been posted for it."""
        self._ready, self._freed = ready, freed

    @property
    def is_ready(self) -> bool:
        """Whether its grammar is compiled there."""
        grammar = self.grammar
        if not grammar.is_compiled:
            grammar.is_compiled = self._ready[grammar.number % NUM_READY] == grammar.number
        return grammar.is_compiled

    def __del__(self) -> None:
        self._freed.append(self.slot)


class RepeatedTasks:
    """The tasks of a step with one token and one mask of each sequence."""

    def __init__(self, num_processes: int) -> None:
        self.tasks = [array("i", [0]) for _ in range(num_processes)]
        """Tasks of each process: their number, and each one."""
        self._places: list[tuple[array[int], int]] = []  # of each sequence's token

    def add(self, replica: Replica, row: int, bans: Sequence[int]) -> None:
        tasks = self.tasks[replica.process]
        self._places.append((tasks, len(tasks) + TASK))
        tasks.extend((replica.slot, 0, row, 1, 1, 0, len(bans), 0, *bans))
        tasks[0] += 1

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """The token of each sequence."""
        for (tasks, place), token_id in zip(self._places, token_ids, strict=True):
            tasks[place] = token_id


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    memory: StepMemory
    is_done: Callable[[int, int], bool]
    """`watch` of the step that is done."""
    free: list[int] = field(default_factory=lambda: [*reversed(range(_NUM_SLOTS))])
    """Slots without a sequence. The one used last is taken first, since a slot keeps its matcher."""
    freed: deque[int] = field(default_factory=deque)
    """Numbers of replicas that were collected, in any thread."""
    grammars: OrderedDict[str, _Grammar] = field(default_factory=OrderedDict)
    """Those that it keeps, the one used last at the end."""
    tasks: array[int] = field(default_factory=lambda: array("i", [0]))
    """Tasks of the next step: their number, and each one."""
    num_written: int = 0
    """Bytes, modulo 2**31."""

    def send(self, message: object) -> bool:
        """Returns whether the pipe has room, so that no step waits for a process that reads it late."""
        line = json.dumps(message).encode() + b"\n"
        unread = (self.num_written - self.memory.header[NUM_READ]) % WRAP
        if unread + len(line) > PIPE_BYTES // 2:
            return False
        self.num_written = (self.num_written + len(line)) % WRAP
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the next `wait` finds that it has ended
            self.process.stdin.write(line)
            self.process.stdin.flush()
        return True

    def collect(self) -> None:
        """Take back the slots of replicas that were collected."""
        while self.freed:
            self.free.append(self.freed.popleft())


class MaskProcesses(Replicas):
    """The engine's side of ``num_processes`` processes, which start in a thread. Ended processes are not replaced.

    One thread at a time calls its methods; replicas may be collected in others. ``masks``: the descriptor of the file
    that masks are written to.
    """

    def __init__(self, num_processes: int, source: VocabularySource, masks: int) -> None:
        self.num_processes = num_processes
        self._source = source
        self._masks = masks
        self._step = 0
        self._number = 1
        self._processes: list[_Process] = []
        self._starting = threading.Thread(target=self._start, name="fleetfoot-mask-processes", daemon=True)
        self._end = weakref.finalize(self, _end, self._processes)
        self._starting.start()

    def _start(self) -> None:
        started = [_start(self._masks) for _ in range(self.num_processes)]
        source = self._source
        settings = json.dumps([source.tokenizer, source.vocab_size, list(source.eos_token_ids)]).encode() + b"\n"
        for process in started:
            assert process.process.stdin is not None
            with contextlib.suppress(OSError):
                process.process.stdin.write(settings)
                process.process.stdin.flush()
                process.num_written = len(settings)
        self._processes.extend(started)

    @property
    def is_ready(self) -> bool:
        """Whether all processes have read the vocabulary."""
        processes = self._processes
        return len(processes) == self.num_processes and all(one.memory.header[IS_READY] for one in processes)

    def open(self, grammar: GrammarText) -> Replica | None:
        if len(grammar.text) > _MAX_GRAMMAR or not self.is_ready:
            return None
        for one in self._processes:
            one.collect()
        number = max(range(self.num_processes), key=lambda index: len(self._processes[index].free))
        chosen = self._processes[number]
        known = self._keep(chosen, grammar) if chosen.free else None
        return None if known is None else Replica(number, chosen.free.pop(), known, chosen.memory.ready, chosen.freed)

    def _keep(self, chosen: _Process, grammar: GrammarText) -> _Grammar | None:
        """A grammar that a process keeps, or begins to compile. None: it has too much to read at this time."""
        known = chosen.grammars.get(grammar.text)
        if known is None:
            oldest = next(iter(chosen.grammars)) if len(chosen.grammars) == _MAX_GRAMMARS else None
            dropped = None if oldest is None else chosen.grammars[oldest].number
            if not chosen.send([self._number, grammar, dropped]):
                return None
            if oldest is not None:
                del chosen.grammars[oldest]
            known = chosen.grammars[grammar.text] = _Grammar(self._number)
            self._number = _next(self._number)
        chosen.grammars.move_to_end(grammar.text)
        return known

    def add(
        self,
        replica: Replica,
        place: tuple[int, int],
        is_reset: bool,
        token_ids: Sequence[int],
        drafts: Sequence[int],
        bans: Sequence[int],
    ) -> bool:
        tasks = self._processes[replica.process].tasks
        num_tokens, num_drafts, num_bans = len(token_ids), len(drafts), len(bans)
        if len(tasks) + TASK + num_tokens + num_drafts + num_bans > NUM_COMMANDS:
            return False
        begin = 0 if replica.has_begun and not is_reset else replica.grammar.number
        task = replica.slot, begin, *place, num_tokens, num_drafts, num_bans, *token_ids, *drafts, *bans
        tasks.extend(task)
        tasks[0] += 1
        replica.has_begun = True
        return True

    def repeated(self, replicas: Sequence[Replica], bans: Sequence[Sequence[int]]) -> RepeatedTasks:
        tasks = RepeatedTasks(self.num_processes)
        for place, (replica, banned) in enumerate(zip(replicas, bans, strict=True)):
            tasks.add(replica, place, banned)
        return tasks

    def post(self, offset: int, repeated: RepeatedTasks | None = None) -> None:
        self._step = _next(self._step)
        for number, process in enumerate(self._processes):
            tasks = process.tasks if repeated is None else repeated.tasks[number]
            if tasks[0]:
                memory = process.memory
                memory.commands[: len(tasks)] = memoryview(tasks)
                memory.header[OFFSET] = offset
                memory.header[POSTED] = self._step
                self._wake(process)
                if repeated is None:
                    process.tasks = array("i", [0])

    def _wake(self, process: _Process) -> None:
        if process.memory.header[SLEEPS]:
            process.send(None)

    def wait(self, process: int) -> list[int]:
        one = self._processes[process]
        header = one.memory.header
        num_looks = 0
        while (done := header[DONE]) != self._step and not one.is_done(done, LOOK_NS):
            num_looks += 1
            if num_looks % 16 == 0:
                if one.process.poll() is not None:
                    raise ProcessError(f"a process that computes token masks has ended ({one.process.returncode})")
                self._wake(one)
                time.sleep(0)
        return one.memory.commands[: header[NUM_FAILED]].tolist()

    def settle(self) -> None:
        self._starting.join()
        for one in self._processes:
            one.send(SETTLE)
            assert one.process.stdout is not None
            one.process.stdout.readline()

    def close(self) -> None:
        self._starting.join()
        self._end()


def _next(number: int) -> int:
    """The number after another one, from 1 to the largest int32."""
    return number % (WRAP - 1) + 1


def is_supported() -> bool:
    """Whether memory can be shared as it is here: writes of one process are seen by others in their order."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def _start(masks: int) -> _Process:
    import fcntl

    memory = StepMemory()
    process = subprocess.Popen(
        [sys.executable, "-m", mask_server.__name__, str(memory.file.descriptor), str(masks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[memory.file.descriptor, masks],
        env=env.for_child({}),
        start_new_session=True,  # Ctrl-C in a terminal is for the engine's process alone
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        fcntl.fcntl(process.stdin, _F_SETPIPE_SZ, PIPE_BYTES)
    return _Process(process, memory, watch(memory.address(DONE)))


def _end(processes: list[_Process]) -> None:
    while processes:
        process = processes.pop().process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
