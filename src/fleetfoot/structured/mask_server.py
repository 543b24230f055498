"""A process that computes token masks: matchers of some of an engine's sequences.

Grammars come by standard input, steps through shared memory, in which both sides look for changes for a moment before
they block: waking up a thread takes as long as several masks. Masks are written where the runner reads them.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from fleetfoot.native.loading import watch
from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.bits import clear_bits, fill_masks
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.strings import with_strings
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.utils.shared_words import SharedWords

NUM_COMMANDS = 1 << 16
"""int32 of a step's commands."""
TASK = 7
"""int32 of a task, before its tokens, drafts and bans."""
_HEADER = 64
POSTED, OFFSET, DONE, SLEEPS, IS_READY, NUM_FAILED, NUM_READ = 0, 1, 16, 17, 18, 19, 20
"""Places in the header: a step's number and where its masks begin, written by the engine, and what its process writes,
in another cache line."""
NUM_READY = 1024
"""Places for the numbers of grammars that have been compiled."""
LOOK_NS = 20_000
"""How long both sides look at a word before they look at something else."""
_SPIN_S = 0.002
"""How long a process looks for the next step before it blocks."""
_SLEEP_S = 0.05
"""How long it blocks at most: a step can be posted while it falls asleep."""
_MAX_ITEMS = 8000
"""Most items of a parser's row: an object has four for each property that is not required."""
PIPE_BYTES = 1 << 20
WRAP = 1 << 31
SETTLE = "settle"


def plain_matcher(tokenizer: Any, text: str) -> Any:
    """An `llguidance.LLMatcher` at the beginning, or with an error. ``tokenizer``: an `llguidance.LLTokenizer`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(max_items_in_row=_MAX_ITEMS))


def new_matcher(tokenizer: Any, grammar: GrammarText, plain: Any = None) -> Any:
    """The matcher of a grammar. ``plain``: the `plain_matcher` of its text, if there is one already."""
    return with_strings(tokenizer, grammar, plain or plain_matcher(tokenizer, grammar.text), plain_matcher)


class StepMemory:
    """What a process shares with the engine beside masks: a header, compiled grammars, and commands; all int32."""

    def __init__(self, descriptor: int = -1) -> None:
        sizes = (_HEADER, NUM_READY, NUM_COMMANDS)
        self.file = SharedWords(sum(sizes), descriptor=descriptor, name="fleetfoot-mask-steps")
        ends, view = accumulate(sizes, initial=0), self.file.words.data
        self.header, self.ready, self.commands = (view[begin:end] for begin, end in pairwise(ends))

    def address(self, place: int) -> int:
        """The address of a word of the header."""
        return int(self.file.words.ctypes.data) + 4 * place


class _Server:
    """Serves one engine: reads grammars from standard input, and steps from shared memory."""

    def __init__(self, memory: StepMemory, masks: SharedWords) -> None:
        self._memory = memory
        self._masks = masks.words
        self._lines: deque[bytes] = deque()
        self._buffer = b""  # after the last line
        self._tokenizer: Any = None
        self._num_words = 0  # of a mask
        # of slots, with the numbers of their grammars, and at the beginning
        self._matchers: dict[int, tuple[Any, int, Any]] = {}
        self._grammars: dict[int, Any] = {}  # compiled, by number
        self._threads: list[threading.Thread] = []  # that compile

    def run(self) -> None:
        """Serve until standard input ends."""
        while not self._lines:
            self._read_lines()
        source = VocabularySource(*json.loads(self._lines.popleft()))
        self._tokenizer = source.read()
        self._num_words = mask_size(self._tokenizer.vocab_size)
        gc.collect()
        gc.disable()  # steps make no circles
        header = self._memory.header
        is_posted = watch(self._memory.address(POSTED))
        header[IS_READY] = 1
        done = 0
        while True:
            deadline = time.perf_counter() + _SPIN_S
            while not is_posted(done, LOOK_NS):
                self._take_messages(0.0)
                if time.perf_counter() > deadline:
                    header[SLEEPS] = 1
                    if header[POSTED] == done:
                        self._take_messages(_SLEEP_S)
                    header[SLEEPS] = 0
            done = header[POSTED]
            failed = self._compute(header[OFFSET])
            self._memory.commands[: len(failed)] = memoryview(array("i", failed))
            header[NUM_FAILED] = len(failed)
            header[DONE] = done
            self._take_messages(0.0)

    def _compute(self, offset: int) -> list[int]:
        """Compute the masks of the posted step. Returns the numbers of tasks that have failed."""
        commands, num_words = self._memory.commands, self._num_words
        words = self._masks.data
        address, row_bytes = self._masks.ctypes.data + 4 * offset, 4 * num_words
        place, failed = 1, []
        for number in range(commands[0]):
            slot, begins, row, num_masks, num_tokens, num_drafts, num_bans = commands[place : place + TASK]
            begin = place + TASK
            drafts_at = begin + num_tokens
            bans_at = drafts_at + num_drafts
            place = bans_at + num_bans
            matcher = self._begin(slot, begins) if begins else self._matchers[slot][0]
            if matcher is None:
                failed.append(number)
                continue
            for index in range(begin, drafts_at):
                matcher.consume_token(commands[index])
            if num_masks == 1 and not num_drafts:
                matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
            else:
                drafts = commands[drafts_at:bans_at].tolist()
                matcher = fill_masks(matcher, drafts, self._mask(offset, row, num_masks))
            if num_bans and _allows_any(words, offset + row * num_words, commands[bans_at:place]):
                clear_bits(self._mask(offset, row)[0], commands[bans_at:place])
            if matcher.is_error():
                failed.append(number)
        return failed

    def _mask(self, offset: int, row: int, num_masks: int = 1) -> np.ndarray:
        """Masks of the step, ``[num_masks, num_words]``."""
        begin = offset + row * self._num_words
        return self._masks[begin : begin + num_masks * self._num_words].reshape(num_masks, -1)

    def _begin(self, slot: int, number: int) -> Any:
        """The matcher of a slot at the beginning of a grammar. None: the grammar is not kept any more."""
        _, former, beginning = self._matchers.get(slot, (None, 0, None))
        if former != number:
            beginning = self._grammars.get(number)
        if beginning is None:
            return None
        matcher = beginning.deep_copy()  # a reset could keep a mask; see `fill_masks`
        self._matchers[slot] = matcher, number, beginning
        return matcher

    def _take_messages(self, seconds: float) -> None:
        """Take what is there, or what comes within so many seconds."""
        if select.select([0], [], [], 0.0 if self._lines else seconds)[0]:
            self._read_lines()
        while self._lines:
            message = json.loads(self._lines.popleft())
            if message == SETTLE:
                for thread in self._threads:
                    thread.join()
                os.write(1, b"\n")
            elif message is not None:
                self._keep(*message)

    def _keep(self, number: int, grammar: list[Any], dropped: int | None) -> None:
        if dropped is not None:
            self._grammars.pop(dropped, None)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        arguments = number, GrammarText(*grammar)
        self._threads.append(threading.Thread(target=self._compile, args=arguments, daemon=True))
        self._threads[-1].start()

    def _compile(self, number: int, grammar: GrammarText) -> None:
        self._grammars[number] = new_matcher(self._tokenizer, grammar)
        self._memory.ready[number % NUM_READY] = number

    def _read_lines(self) -> None:
        """Read the lines of standard input that are there; wait for a part of one."""
        text = os.read(0, PIPE_BYTES)
        if not text:
            os._exit(0)  # the engine has ended
        header = self._memory.header
        header[NUM_READ] = (header[NUM_READ] + len(text)) % WRAP
        *lines, self._buffer = (self._buffer + text).split(b"\n")
        self._lines.extend(lines)


def _allows_any(words: memoryview, begin: int, token_ids: Iterable[int]) -> bool:
    """Whether the mask that begins at ``begin`` allows one of the tokens; `clear_bits` takes ten times as long."""
    return any(words[begin + token_id // 32] >> token_id % 32 & 1 for token_id in token_ids)


def main() -> None:
    memory, masks = (int(text) for text in sys.argv[1:])
    _Server(StepMemory(memory), SharedWords(descriptor=masks)).run()


if __name__ == "__main__":
    main()
