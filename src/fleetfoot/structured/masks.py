"""The token masks of a step, and the state of each sequence under its grammar: matchers consume the tokens that are
known, and masks are computed, in processes of their own where that is faster."""

from __future__ import annotations

import logging
import os
import platform
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput, TokenMasks
from fleetfoot.structured.grammars import GrammarText
from fleetfoot.structured.mask_space import MaskMemory, clear_bits, fill_masks, set_only
from fleetfoot.structured.processes import MaskProcesses, ProcessError, Replica, StepTasks
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.utils.process import num_cores

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 8
_MOST_CORES = 3, 8  # the share of the cores that processes for masks may keep busy
_FEWEST_CORES = 8


def num_mask_processes(device: str) -> int:
    """How many processes an engine has for masks. They look for work between steps, which takes their cores, so there
    are none beside a model on the CPU or with few cores."""
    cores = num_cores()
    # writes of one process must be seen by others in their order
    is_supported = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")
    if device == "cpu" or cores < _FEWEST_CORES or not is_supported:
        return 0
    return min(_MOST_PROCESSES, cores * _MOST_CORES[0] // _MOST_CORES[1])


# --- a sequence -------------------------------------------------------------------------------------------------------


class ReasoningEnd:
    """Finds the text after which a grammar begins. The tokens ``begin`` are forced at first, and ``end`` after
    ``num_tokens`` more. ``texts``: that of each token."""

    def __init__(
        self, marker: bytes, texts: Mapping[int, bytes | str], num_tokens: int = 0, begin: Sequence[int] = (),
        end: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._marker, self._texts = marker, texts
        self._begin, self._end, self._limit = begin, end, len(begin) + num_tokens

    def forced(self, position: int) -> int | None:
        """The token that must be at a position of the output, which is before the end; None: any."""
        if position < len(self._begin):
            return self._begin[position]
        place = position - self._limit
        return self._end[place] if 0 <= place < len(self._end) else None

    def find(self, tail: bytes, token_id: int) -> tuple[bytes, bytes | None]:
        """Read a token after ``tail``, the text that may begin the marker. Returns the new tail, and the rest of the
        token's text after the marker; None: it is not there yet."""
        text = self._texts[token_id]
        tail += text if isinstance(text, bytes) else text.encode()
        before, found, rest = tail.partition(self._marker)
        return (b"", rest) if found else (before[max(0, len(before) - len(self._marker) + 1) :], None)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled constraint."""

    matcher: Any
    """An `llguidance.LLMatcher` at the beginning; sequences get copies."""
    text: GrammarText
    tokenizer: Any
    """An `llguidance.LLTokenizer`. Ids after the tokenizer's own, up to the model's vocabulary, are never allowed."""
    reasoning: ReasoningEnd | None
    """None: the constraint begins at once."""


def _error_of(matcher: Any) -> str:
    error, _, _ = matcher.get_error().partition("\n<state>")  # of its parser
    return f"{error:.300}"


class GrammarState:
    """One sequence. The state follows from its output tokens, so preemptions and restarts need nothing else.

    A matcher consumes the prefix, which is what the last token of reasoning has of the answer, and the output after
    it: `tokens` has those that it lacks.

    Args:
        banned: tokens that are never allowed where another one is: the end tokens, with ``ignore_eos``.
        min_tokens: end tokens and ``stop_token_ids`` are not allowed before, where another token is.
    """

    def __init__(self, grammar: Grammar, banned: Sequence[int], min_tokens: int) -> None:
        self.grammar = grammar
        self.replica: Replica | None = None
        """A matcher in another process."""
        self._reasoning = grammar.reasoning
        self._banned, self._min_tokens = banned, min_tokens
        self._num_read = 0
        self._begin = 0
        self._prefix: Sequence[int] = ()
        self._tail = b""
        self.has_begun = grammar.reasoning is None
        """Whether the grammar applies to the next token."""
        self.drafts: list[int] = []
        """Those that the next step verifies, as its runner has reported them; -1: none."""
        # of the step: the first row of logits, the first mask among those of the step, and the number of masks
        self.first_row = self.first_mask = self.num_masks = 0
        self.begin = 0  # the first of its rows that the grammar applies to
        self._ahead: Any = None  # a matcher for that row; None: that of the sequence
        self.step_drafts: Sequence[int] = ()  # after that row
        self.is_restricted = False  # whether `restrict` has something to do
        self._restart()

    def _restart(self) -> None:
        self.matcher = self.grammar.matcher.deep_copy()  # a reset could keep a mask; see `fill_masks`
        """It has consumed what `catch_up` was called with last."""
        self._num_taken = 0

    def read(self, output_token_ids: Sequence[int]) -> None:
        """Note the tokens that are new. An output may have become shorter: its last tokens were lost with a worker."""
        num_tokens = len(output_token_ids)
        if self._reasoning is not None and (not self.has_begun or num_tokens < self._begin):
            if num_tokens < self._num_read:
                self._num_read, self._tail, self.has_begun = 0, b"", False
            for place in range(self._num_read, num_tokens):
                self._tail, rest = self._reasoning.find(self._tail, output_token_ids[place])
                if rest is not None:
                    self.has_begun, self._begin, self._prefix = True, place + 1, self._start(rest)
                    break
        self._num_read = num_tokens

    def _start(self, text: bytes) -> Sequence[int]:
        """Begin again. Returns the tokens of the beginning of the answer, which is in the last token of reasoning;
        none, if it is white space that the grammar does not have."""
        self._restart()
        token_ids: list[int] = self.grammar.tokenizer.tokenize_bytes(text)
        return token_ids if self.matcher.validate_tokens(token_ids) == len(token_ids) else ()

    def tokens(self, output_token_ids: Sequence[int], num_taken: int) -> tuple[bool, Sequence[int]]:
        """The tokens up to the last `read` that a matcher lacks which has consumed ``num_taken``, and whether it has to
        begin again."""
        is_reset = self._begin + num_taken - len(self._prefix) > self._num_read
        num_taken = 0 if is_reset else num_taken
        begin = self._begin + max(0, num_taken - len(self._prefix))
        return is_reset, [*self._prefix[num_taken:], *output_token_ids[begin : self._num_read]]

    def catch_up(self, output_token_ids: Sequence[int]) -> str:
        """Let `matcher` consume the tokens that it lacks. Returns why one is refused; empty: none is."""
        is_reset, token_ids = self.tokens(output_token_ids, self._num_taken)
        if is_reset:
            self._restart()
        for token_id in token_ids:
            self._num_taken += 1
            if not self.matcher.consume_token(token_id):
                return f"the grammar refuses token {token_id} of the output: {_error_of(self.matcher)}"
        return ""

    def walk(self, num_drafts: int) -> tuple[int, Any, list[int]]:
        """The first of ``1 + num_drafts`` positions that the grammar applies to, counted from the next token, a matcher
        for it, and the drafts from there on. None as the matcher: that of the sequence. Beyond the last position: it
        applies to none."""
        drafts = self.drafts[:num_drafts]
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        if self.has_begun:
            return 0, None, drafts
        tail = self._tail
        assert self._reasoning is not None
        for place, token_id in enumerate(drafts, start=1):
            tail, rest = self._reasoning.find(tail, token_id)
            if rest is not None:
                prefix = self._start(rest)
                matcher = self.matcher.deep_copy()
                matcher.consume_tokens(prefix)
                return place, matcher, drafts[place:]
        return num_drafts + 1, None, []

    def enter(self, output: SchedulerOutput, index: int, output_token_ids: Sequence[int]) -> bool:
        """Begin a step in which it is at ``index``. Returns whether it needs masks; else every token is allowed."""
        self.read(output_token_ids)
        is_decode = index < output.num_decodes
        num_drafts = output.num_drafts if is_decode else 0
        self.first_row = index * (1 + num_drafts) if is_decode else index + output.num_decodes * output.num_drafts
        self.num_masks = 1 + num_drafts
        is_plain = self.has_begun and not num_drafts
        self.begin, self._ahead, self.step_drafts = (0, None, ()) if is_plain else self.walk(num_drafts)
        self.is_restricted = self.begin > 0 or self.has_bans
        return (
            self.begin <= num_drafts
            or self.has_bans
            or any(self._forced(place) is not None for place in range(self.num_masks))
        )

    def masks_of(self, masks: np.ndarray) -> np.ndarray:
        """Its own among the masks of the step, ``[num_masks, words]``."""
        return masks[self.first_mask : self.first_mask + self.num_masks]

    def fill(self, output_token_ids: Sequence[int], masks: np.ndarray) -> str:
        """Fill its masks in this thread. Returns why that fails; empty: it does not. ``masks``: as of `masks_of`."""
        masks[: self.begin].fill(-1)
        if self.begin >= self.num_masks:
            return ""
        error = self.catch_up(output_token_ids) if self._ahead is None else ""
        if not error:
            matcher = fill_masks(self._ahead or self.matcher, self.step_drafts, masks[self.begin :])
            error = f"the grammar cannot go on: {_error_of(matcher)}" if matcher.is_error() else ""
        if error:
            masks.fill(-1)
        return error

    def restrict(self, masks: np.ndarray, stop_token_ids: Iterable[int]) -> None:
        """Apply what is beside the grammar: tokens that may not be there, and those that must be."""
        for place, mask in enumerate(masks):
            token_id = self._forced(place) if place < self.begin else None
            if token_id is not None:
                set_only(mask, token_id)
            elif bans := self.bans(place, stop_token_ids):
                clear_bits(mask.data, bans)

    def _forced(self, place: int) -> int | None:
        """The token that must be at a position before the grammar, counted from the next token; None: any."""
        return None if self._reasoning is None else self._reasoning.forced(self._num_read + place)

    @property
    def has_final_bans(self) -> bool:
        """Whether `bans` returns the same for all later positions."""
        return self._num_read >= self._min_tokens

    @property
    def has_bans(self) -> bool:
        """Whether `bans` may return a token for the next positions."""
        return bool(self._banned) or not self.has_final_bans

    def bans(self, place: int, stop_token_ids: Iterable[int]) -> Sequence[int]:
        """The tokens that may not be at a position, counted from the next token, if another one may."""
        return self._banned if self._num_read + place >= self._min_tokens else [*self._banned, *stop_token_ids]


# --- a step -----------------------------------------------------------------------------------------------------------


class _Repeatable:
    """A step of decodes with all of its masks from processes. If the next one has the same requests, each with one more
    token, as is the rule, their tasks are made at once: one by one they take a tenth of a step."""

    def __init__(self, structured: list[int], requests: Sequence[Request], groups: list[list[Request]]) -> None:
        self.groups = groups
        self.rows = [request.grammar.first_row for request in requests]  # as of `TokenMasks`
        self._structured, self._requests = structured, requests
        self._lengths = [len(request.output_token_ids) for request in requests]
        self._tasks: StepTasks | None = None  # made when the step is first repeated
        self._places: list[tuple[array[int], int]] = []  # of each sequence's token

    def is_repeated(self, output: SchedulerOutput, requests: Sequence[Request]) -> bool:
        """Whether a step differs by one more token of each request."""
        if output.num_drafts or output.structured != self._structured or max(self._structured) >= output.num_decodes:
            return False
        if requests != self._requests or any([request.is_finished for request in requests]):
            return False
        return [len(request.output_token_ids) - 1 for request in requests] == self._lengths

    def advance(self, num_processes: int) -> StepTasks:
        """The tasks of the next step, with its tokens."""
        if self._tasks is None:
            self._tasks = StepTasks(num_processes)
            for place, request in enumerate(self._requests):
                replica, bans = request.grammar.replica, request.grammar.bans(0, ())
                begin = self._tasks.add(replica, (place, 1), False, (0,), (), bans)
                self._places.append((self._tasks.words[replica.process], begin))
        for (words, begin), request in zip(self._places, self._requests, strict=True):
            words[begin] = request.output_token_ids[-1]
            request.grammar.replica.num_sent += 1
        self._lengths = [length + 1 for length in self._lengths]
        return self._tasks


class TokenMasker:
    """Computes the masks of steps. Until ``num_processes`` processes have compiled the grammar of a request, and
    without them, the thread that steps computes its masks itself."""

    def __init__(self, memory: MaskMemory, num_processes: int = 0) -> None:
        self._memory = memory
        self._num_processes = num_processes
        self._processes = MaskProcesses()
        self._last: _Repeatable | None = None

    def start(self, vocabulary: VocabularySource) -> None:
        """Start the processes, in a thread. Called once, in any thread, before the first request has a grammar."""
        if self._num_processes:
            self._processes = MaskProcesses(self._num_processes, vocabulary, self._memory.file.descriptor)

    def close(self) -> None:
        """End the processes. `compute` goes on without them."""
        self._num_processes = 0
        self._processes.close()
        self._processes = MaskProcesses()

    def settle(self) -> None:
        """Wait until the processes have compiled the grammars of all earlier steps, as tests and benchmarks do."""
        self._processes.settle()

    def compute(
        self, output: SchedulerOutput, requests: Sequence[Request]
    ) -> tuple[TokenMasks | None, list[tuple[Request, str]]]:
        """The masks of a step, and the requests that fail, with the reason. ``requests``: those of
        ``output.structured``, with all their earlier tokens; ended ones get no mask."""
        if (last := self._last) is not None and last.is_repeated(output, requests):
            masks, offset = self._memory.next(len(last.rows))
            self._processes.post(offset, last.advance(self._num_processes))
            failed = self._collect(last.groups, masks)
            return TokenMasks(last.rows, masks, self._memory.file.words, offset), failed
        self._last = None
        every = [
            request
            for index, request in zip(output.structured, requests, strict=True)
            if not request.is_finished
            and isinstance(request.grammar, GrammarState)
            and request.grammar.enter(output, index, request.output_token_ids)
        ]
        if not every:
            return None, []
        numbers: list[int] = []
        for state in (request.grammar for request in every):
            state.first_mask = len(numbers)
            numbers.extend(range(state.first_row, state.first_row + state.num_masks))
        masks, offset = self._memory.next(len(numbers))
        groups = self._post(every, offset)
        failed = _filled(groups[-1], masks) + self._collect(groups, masks)
        for request in every:
            if request.grammar.is_restricted:
                request.grammar.restrict(request.grammar.masks_of(masks), request.stop_token_ids)
        is_even = len(every) == len(requests) and not output.num_drafts and max(output.structured) < output.num_decodes
        states = [request.grammar for request in every]
        if is_even and not groups[-1] and all([state.replica and state.has_final_bans for state in states]):
            self._last = _Repeatable(output.structured, every, groups)
        return TokenMasks(numbers, masks, self._memory.file.words, offset), failed

    def _post(self, every: Sequence[Request], offset: int) -> list[list[Request]]:
        """Let processes begin with the step. Returns the requests of each process, and after them those of this
        thread."""
        groups: list[list[Request]] = [[] for _ in range(self._num_processes + 1)]
        tasks, has_processes = StepTasks(self._num_processes), self._num_processes > 0 and len(every) > 1
        for request in every:
            process = self._add(request, tasks) if has_processes and not request.grammar.begin else -1
            groups[process].append(request)
        if any(groups[:-1]):
            self._processes.post(offset, tasks)
        return groups

    def _add(self, request: Request, tasks: StepTasks) -> int:
        """Add a request to the tasks of the process that has a matcher of its sequence; -1: none has yet."""
        state: GrammarState = request.grammar
        replica = state.replica
        if replica is None:
            replica = state.replica = self._processes.open(state.grammar.text)
        if replica is None or not replica.is_ready:
            return -1
        is_reset, token_ids = state.tokens(request.output_token_ids, replica.num_sent)
        replica.num_sent = len(token_ids) + (0 if is_reset else replica.num_sent)
        is_single = state.num_masks == 1  # the process excludes what is banned
        bans = state.bans(0, request.stop_token_ids) if is_single and state.is_restricted else ()
        if tasks.add(replica, (state.first_mask, state.num_masks), is_reset, token_ids, state.step_drafts, bans):
            state.is_restricted &= not is_single
            return replica.process
        state.replica = None  # it has missed the tokens
        return -1

    def _collect(self, groups: Sequence[Sequence[Request]], masks: np.ndarray) -> list[tuple[Request, str]]:
        """Wait for the masks of all processes, and compute here what they could not. Returns the requests that fail."""
        left: list[Request] = []
        for process, group in enumerate(groups[:-1]):
            try:
                left += [group[number] for number in self._processes.wait(process)] if group else ()
            except ProcessError as ended:
                logger.warning("%s; the engine computes token masks itself", ended)
                self.close()
                left += group
        for request in left:
            state: GrammarState = request.grammar
            state.replica = self._last = None
            state.read(request.output_token_ids)
            state.is_restricted = state.has_bans
        return _filled(left, masks)


def _filled(requests: Sequence[Request], masks: np.ndarray) -> list[tuple[Request, str]]:
    """Compute the masks of requests in this thread. Returns those that fail, with the reason."""
    errors = ((one, one.grammar.fill(one.output_token_ids, one.grammar.masks_of(masks))) for one in requests)
    return [(request, error) for request, error in errors if error]
