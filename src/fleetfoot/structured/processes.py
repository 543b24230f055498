"""Processes that compute token masks beside the thread that steps, each for some of an engine's sequences.

Grammars come by a process's standard input, steps through shared memory, in which both sides look for changes for a
moment before they block: waking up a thread takes as long as several masks, which take 10 to 20 us each.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import sys
import threading
import time
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

from fleetfoot.native.loading import watch
from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.mask_space import clear_bits, fill_masks
from fleetfoot.structured.strings import new_matcher
from fleetfoot.structured.trial import end_children, start_child
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.utils.process import write_to
from fleetfoot.utils.shared_words import SharedWords

_NUM_COMMANDS = 1 << 16  # int32 of a step's commands
_TASK = 7  # int32 of a task, before its tokens, drafts and bans
_HEADER = 64
# Places in the header: a step's number and where its masks begin, written by the engine, and, in another cache line,
# what its process writes.
_POSTED, _OFFSET, _DONE, _SLEEPS, _IS_READY, _NUM_FAILED = 0, 1, 16, 17, 18, 19
_NUM_SLOTS = 1024  # sequences of a process
_NUM_PLACES = 256  # for the numbers of compiled grammars: the place of a grammar is its number's remainder
_MAX_GRAMMARS = _NUM_PLACES
_MAX_GRAMMAR = 1 << 17  # bytes of a grammar that is sent through a pipe; larger ones stay with the thread that steps
_LOOK_NS = 20_000  # how long both sides look at a word before they look at something else
_SPIN_S = 0.002  # how long a process looks for the next step before it blocks
_SLEEP_S = 0.05  # how long it blocks at most: a step can be posted while it falls asleep
_PIPE_BYTES = 1 << 20
_WRAP = 1 << 31


class ProcessError(RuntimeError):
    """A process that computes masks has ended."""


class _StepMemory:
    """What a process shares with the engine beside masks: a header, compiled grammars, and commands; all int32."""

    def __init__(self, descriptor: int = -1) -> None:
        sizes = (_HEADER, _NUM_PLACES, _NUM_COMMANDS)
        self.file = SharedWords(sum(sizes), descriptor=descriptor, name="fleetfoot-mask-steps")
        ends, view = accumulate(sizes, initial=0), self.file.words.data
        self.header, self.ready, self.commands = (view[begin:end] for begin, end in pairwise(ends))

    def watch(self, place: int) -> Callable[[int, int], bool]:
        """`watch` of a word of the header."""
        return watch(int(self.file.words.ctypes.data) + 4 * place)


# --- the engine's side ------------------------------------------------------------------------------------------------


class Replica:
    """A matcher in another process, which is given back when the object is collected."""

    def __init__(self, process: int, slot: int, grammar: int, ready: memoryview, free: list[int]) -> None:
        self.process, self.slot = process, slot
        self.num_sent = 0  # tokens that it has consumed, or that are posted
        self.has_begun = False  # a step has been posted for it
        self.grammar, self._ready, self._free = grammar, ready, free

    @property
    def is_ready(self) -> bool:
        """Whether its grammar is compiled there."""
        return self.has_begun or self._ready[self.grammar % _NUM_PLACES] == self.grammar

    def __del__(self) -> None:
        self._free.append(self.slot)


class StepTasks:
    """The tasks of a step: the masks of a sequence's next token, and of those after its drafts."""

    def __init__(self, num_processes: int) -> None:
        self.words = [array("i", [0]) for _ in range(num_processes)]  # of each process: their number, and each one

    def add(self, replica: Replica, place: tuple[int, int], is_reset: bool, *tokens: Sequence[int]) -> int:
        """Add a task: write so many masks of the step from a ``place`` on. ``tokens``: those that are consumed first,
        by a matcher that begins again if ``is_reset``; drafts; and those that the first mask does not allow, if it
        allows others. Returns where its tokens are among the words of its process; 0: there is no room."""
        words = self.words[replica.process]
        begin, lengths = len(words) + _TASK, [len(some) for some in tokens]
        if begin + sum(lengths) > _NUM_COMMANDS:
            return 0
        grammar = 0 if replica.has_begun and not is_reset else replica.grammar  # 0: it goes on
        words.extend((replica.slot, grammar, *place, *lengths, *chain(*tokens)))
        replica.has_begun = True
        words[0] += 1
        return begin


class _Process:
    """A process, what it keeps, and what it has got. ``masks``: descriptor of the file that masks are written to."""

    def __init__(self, masks: int) -> None:
        self.memory = _StepMemory()
        descriptors = self.memory.file.descriptor, masks
        self.process = start_child(__name__, *descriptors, pass_fds=descriptors)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # so much room that no step waits for a process that reads late
            fcntl.fcntl(self.process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.is_done = self.memory.watch(_DONE)
        # slots without a sequence: the one used last is taken first, since a slot keeps its matcher
        self.free = [*reversed(range(_NUM_SLOTS))]  # replicas are collected in any thread
        self.grammars: OrderedDict[str, int] = OrderedDict()  # numbers of those that it keeps, the last used at the end

    def send(self, message: object) -> None:
        write_to(self.process, json.dumps(message).encode() + b"\n")  # the next `wait` finds whether it has ended

    def keep(self, grammar: GrammarText) -> int:
        """The number of a grammar that it keeps, or begins to compile."""
        if grammar.text not in self.grammars:
            is_full = len(self.grammars) == _MAX_GRAMMARS
            former = self.grammars.popitem(last=False)[1] if is_full else len(self.grammars)
            self.grammars[grammar.text] = number = (former + _NUM_PLACES) % _WRAP or _NUM_PLACES
            self.send([number, grammar.content, grammar.is_schema, grammar.marks])
        self.grammars.move_to_end(grammar.text)
        return self.grammars[grammar.text]


class MaskProcesses:
    """The engine's side of ``num_processes`` processes, which start in a thread. Ended processes are not replaced.

    One thread at a time calls its methods; replicas may be collected in others. A step: `post`, and `wait` for each
    process that has tasks. ``masks``: descriptor of the file that masks are written to.
    """

    def __init__(self, num_processes: int = 0, source: VocabularySource | None = None, masks: int = -1) -> None:
        self._step = 0
        self._processes: list[_Process] = []
        arguments = self._processes, num_processes, source, masks
        self._starting = threading.Thread(target=_start, args=arguments, name="fleetfoot-mask-processes", daemon=True)
        self._end = weakref.finalize(self, lambda each: end_children([one.process for one in each]), self._processes)
        if source is not None:
            self._starting.start()

    def open(self, grammar: GrammarText) -> Replica | None:
        """A matcher at the beginning of a grammar; None: there is no room, or no process is ready."""
        number, chosen = max(enumerate(self._processes), key=lambda one: len(one[1].free), default=(0, None))
        is_ready = all([one.memory.header[_IS_READY] for one in self._processes])
        if chosen is None or not is_ready or not chosen.free or len(grammar.text) > _MAX_GRAMMAR:
            return None
        return Replica(number, chosen.free.pop(), chosen.keep(grammar), chosen.memory.ready, chosen.free)

    def post(self, offset: int, tasks: StepTasks) -> None:
        """Begin to compute a step. ``offset``: int32 before its masks, in the file of masks."""
        self._step = self._step % (_WRAP - 1) + 1
        for process, words in zip(self._processes, tasks.words, strict=True):
            if words[0]:
                header = process.memory.header
                process.memory.commands[: len(words)] = memoryview(words)
                header[_OFFSET] = offset
                header[_POSTED] = self._step
                if header[_SLEEPS]:
                    process.send(None)

    def wait(self, number: int) -> list[int]:
        """Wait until a process that has tasks has written its masks. Returns the numbers of those tasks that have
        failed, in the order of `StepTasks.add`. Raises ProcessError: it has ended."""
        if not self._processes:
            raise ProcessError("the processes that compute token masks have been ended")
        one = self._processes[number]
        header = one.memory.header
        num_looks = 0
        while (done := header[_DONE]) != self._step and not one.is_done(done, _LOOK_NS):
            num_looks += 1
            if num_looks % 16 == 0:
                if one.process.poll() is not None:
                    raise ProcessError(f"a process that computes token masks has ended ({one.process.returncode})")
                if header[_SLEEPS]:
                    one.send(None)
                time.sleep(0)
        return one.memory.commands[: header[_NUM_FAILED]].tolist()

    def settle(self) -> None:
        """Wait until all processes have begun, and compiled the grammars that were opened."""
        self._join()
        for one in self._processes:
            header, ready, numbers = one.memory.header, one.memory.ready, one.grammars.values()
            while not (header[_IS_READY] and all([ready[number % _NUM_PLACES] == number for number in numbers])):
                if one.process.poll() is not None:
                    break
                time.sleep(0.001)

    def close(self) -> None:
        """End the processes."""
        self._join()
        self._end()

    def _join(self) -> None:
        if self._starting.is_alive():
            self._starting.join()


def _start(processes: list[_Process], num_processes: int, source: VocabularySource, masks: int) -> None:
    started = [_Process(masks) for _ in range(num_processes)]
    for one in started:
        one.send([source.tokenizer, source.vocab_size, [*source.eos_token_ids]])
    processes.extend(started)


# --- the other side ---------------------------------------------------------------------------------------------------


class _Server:
    """Serves one engine: reads grammars from standard input, and steps from shared memory."""

    def __init__(self, memory: _StepMemory, masks: SharedWords) -> None:
        self._memory = memory
        self._masks = masks.words
        self._lines: deque[bytearray] = deque()
        self._buffer = bytearray()  # after the last line
        while not self._lines:
            self._read_lines()
        self._tokenizer = VocabularySource(*json.loads(self._lines.popleft())).read()
        self._num_words = mask_size(self._tokenizer.vocab_size)  # of a mask
        # of slots, with the numbers of their grammars, and at the beginning
        self._matchers: dict[int, tuple[Any, int, Any]] = {}
        self._grammars: dict[int, tuple[int, Any]] = {}  # by place: number, and the matcher at the beginning

    def run(self) -> None:
        """Serve until standard input ends."""
        gc.collect()
        gc.disable()  # steps make no circles
        header = self._memory.header
        is_posted = self._memory.watch(_POSTED)
        header[_IS_READY] = 1
        done = 0
        while True:
            deadline = time.perf_counter() + _SPIN_S
            while not is_posted(done, _LOOK_NS):
                self._take_messages(0.0)
                if time.perf_counter() > deadline:
                    header[_SLEEPS] = 1
                    if header[_POSTED] == done:
                        self._take_messages(_SLEEP_S)
                    header[_SLEEPS] = 0
            done = header[_POSTED]
            failed = self._compute(header[_OFFSET])
            self._memory.commands[: len(failed)] = memoryview(array("i", failed))
            header[_NUM_FAILED] = len(failed)
            header[_DONE] = done
            self._take_messages(0.0)

    def _compute(self, offset: int) -> list[int]:
        """Compute the masks of the posted step. Returns the numbers of tasks that have failed."""
        commands, num_words = self._memory.commands, self._num_words
        words = self._masks.data
        address = self._masks.ctypes.data
        place, failed = 1, []
        for number in range(commands[0]):
            slot, begins, row, num_masks, num_tokens, num_drafts, num_bans = commands[place : place + _TASK]
            begin = place + _TASK
            drafts_at = begin + num_tokens
            bans_at = drafts_at + num_drafts
            place = bans_at + num_bans
            first = offset + row * num_words
            matcher = self._begin(slot, begins) if begins else self._matchers[slot][0]
            if matcher is None:
                failed.append(number)
                continue
            for index in range(begin, drafts_at):
                matcher.consume_token(commands[index])
            if num_masks == 1 and not num_drafts:
                matcher.unsafe_compute_mask_ptr(address + 4 * first, 4 * num_words)
            else:
                masks = self._masks[first : first + num_masks * num_words].reshape(num_masks, -1)
                matcher = fill_masks(matcher, commands[drafts_at:bans_at].tolist(), masks)
            if num_bans:
                clear_bits(words[first : first + num_words], commands[bans_at:place])
            if matcher.is_error():
                failed.append(number)
        return failed

    def _begin(self, slot: int, number: int) -> Any:
        """The matcher of a slot at the beginning of a grammar. None: the grammar is not kept any more."""
        _, former, beginning = self._matchers.get(slot, (None, 0, None))
        if former != number:
            former, beginning = self._grammars.get(number % _NUM_PLACES, (0, None))
        if former != number or beginning is None:
            return None
        matcher = beginning.deep_copy()  # a reset could keep a mask; see `fill_masks`
        self._matchers[slot] = matcher, number, beginning
        return matcher

    def _take_messages(self, seconds: float) -> None:
        """Take what is there, or what comes within so many seconds."""
        if select.select([0], [], [], 0.0 if self._lines else seconds)[0]:
            self._read_lines()
        while self._lines:
            if (message := json.loads(self._lines.popleft())) is not None:
                self._grammars[message[0] % _NUM_PLACES] = message[0], None
                threading.Thread(target=self._compile, args=message, daemon=True).start()

    def _compile(self, number: int, *grammar: Any) -> None:
        matcher, place = new_matcher(self._tokenizer, GrammarText(*grammar)), number % _NUM_PLACES
        if self._grammars[place][0] == number:  # else a newer one has its place
            self._grammars[place] = number, matcher
            self._memory.ready[place] = number

    def _read_lines(self) -> None:
        """Read the lines of standard input that are there; wait for a part of one."""
        text = os.read(0, _PIPE_BYTES)
        if not text:
            os._exit(0)  # the engine has ended
        self._buffer += text
        if b"\n" in text:
            *lines, self._buffer = self._buffer.split(b"\n")
            self._lines.extend(lines)


if __name__ == "__main__":
    _Server(_StepMemory(int(sys.argv[1])), SharedWords(descriptor=int(sys.argv[2]))).run()
