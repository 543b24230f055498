"""The token masks of a step: matchers consume the tokens that are known, and masks are computed, in processes of their
own where that is faster."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput, TokenMasks
from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.mask_space import MaskMemory, clear_bits, fill_masks, set_only
from fleetfoot.structured.processes import MaskProcesses, ProcessError, StepTasks, is_supported
from fleetfoot.structured.state import GrammarState, matcher_error
from fleetfoot.structured.vocabulary import VocabularySource
from fleetfoot.utils.process import num_cores

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 8
_MOST_CORES = 3, 8
"""The share of the cores that processes for masks may keep busy."""
_FEWEST_CORES = 8


def num_mask_processes(device: str) -> int:
    """How many processes an engine has for masks. They look for work between steps, which takes their cores, so there
    are none beside a model on the CPU or with few cores."""
    cores = num_cores()
    if device == "cpu" or cores < _FEWEST_CORES or not is_supported():
        return 0
    return min(_MOST_PROCESSES, cores * _MOST_CORES[0] // _MOST_CORES[1])


@dataclass(slots=True)
class _Rows:
    """The masks of a request in a step."""

    request: Request
    state: GrammarState
    first_row: int
    """Its first row of logits."""
    num_masks: int
    begin: int
    """The first of its rows that the grammar applies to."""
    matcher: Any
    """The matcher for this row; None: that of the sequence."""
    drafts: Sequence[int]
    """After this row."""
    is_restricted: bool
    """Whether `_restrict` has something to do."""
    place: int = 0
    """The first of its masks among those of the step."""


class _Repeatable:
    """A step of decodes with all of its masks from processes, and its rows. If the next one has the same requests, each
    with one more token, as is the rule, their tasks are made at once: one by one they take a tenth of a step."""

    def __init__(self, structured: list[int], every: Sequence[_Rows], groups: list[list[_Rows]]) -> None:
        self.groups = groups
        self.rows = [rows.first_row for rows in every]
        """As of `TokenMasks`."""
        self._structured, self._every = structured, every
        self._requests = [rows.request for rows in every]
        self._lengths = [len(request.output_token_ids) for request in self._requests]
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
            self._tasks = tasks = StepTasks(num_processes)
            for place, rows in enumerate(self._every):
                if (replica := rows.state.replica) is not None:
                    begin = tasks.add(replica, (place, 1), False, (0,), (), rows.state.bans(0, ()))
                    self._places.append((tasks.words[replica.process], begin))
        for (words, begin), rows in zip(self._places, self._every, strict=True):
            words[begin] = rows.request.output_token_ids[-1]
            rows.state.replica.num_sent += 1  # type: ignore[union-attr]
        self._lengths = [length + 1 for length in self._lengths]
        return self._tasks


class TokenMasker:
    """Computes the masks of steps.

    Args:
        memory: for the masks.
        num_processes: compute masks beside the thread that steps. Until they have compiled the grammar of a request,
            and without them, the thread that steps computes its masks itself.
    """

    def __init__(self, memory: MaskMemory, num_processes: int = 0) -> None:
        self._memory = memory
        self._num_processes = num_processes
        self._processes = MaskProcesses()
        self._last: _Repeatable | None = None

    def start(self, vocabulary: VocabularySource) -> None:
        """Start the processes, in a thread. Called once, in any thread, before the first request has a grammar."""
        has_room = mask_size(vocabulary.vocab_size) == self._memory.num_words  # a tokenizer may have more tokens
        if self._num_processes and has_room and is_supported():
            self._processes = MaskProcesses(self._num_processes, vocabulary, self._memory.descriptor)

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
        """The masks of a step, and the requests that fail, with the reason.

        Args:
            requests: those of ``output.structured``, with all their earlier tokens. Ended ones get no mask.
        """
        if (last := self._last) is not None and last.is_repeated(output, requests):
            masks, offset = self._memory.next(len(last.rows))
            self._processes.post(offset, last.advance(self._num_processes))
            failed = self._collect(last.groups, masks)
            return TokenMasks(last.rows, masks, self._memory.words, offset), failed
        self._last = None
        every = [
            rows
            for index, request in zip(output.structured, requests, strict=True)
            if not request.is_finished and (rows := _rows(output, index, request)) is not None
        ]
        if not every:
            return None, []
        numbers: list[int] = []
        for rows in every:
            rows.place = len(numbers)
            numbers.extend(range(rows.first_row, rows.first_row + rows.num_masks))
        masks, offset = self._memory.next(len(numbers))
        groups = self._post(every, offset)
        failed = [(rows.request, error) for rows in groups[-1] if (error := _compute(rows, _masks_of(rows, masks)))]
        failed += self._collect(groups, masks)
        for rows in every:
            if rows.is_restricted:
                _restrict(rows, _masks_of(rows, masks))
        is_even = len(every) == len(requests) and not output.num_drafts and max(output.structured) < output.num_decodes
        if is_even and not groups[-1] and all([rows.state.replica and rows.state.has_final_bans for rows in every]):
            self._last = _Repeatable(output.structured, every, groups)
        return TokenMasks(numbers, masks, self._memory.words, offset), failed

    def _post(self, every: Sequence[_Rows], offset: int) -> list[list[_Rows]]:
        """Let processes begin with the step. Returns the rows of each process, and after them those of this thread."""
        groups: list[list[_Rows]] = [[] for _ in range(self._num_processes + 1)]
        tasks, has_processes = StepTasks(self._num_processes), self._num_processes > 0 and len(every) > 1
        for rows in every:
            process = self._add(rows, tasks) if has_processes and not rows.begin else -1
            groups[process].append(rows)
        if any(groups[:-1]):
            self._processes.post(offset, tasks)
        return groups

    def _add(self, rows: _Rows, tasks: StepTasks) -> int:
        """Add rows to the tasks of the process that has a matcher of their sequence; -1: none has yet."""
        state = rows.state
        replica = state.replica
        if replica is None:
            replica = state.replica = self._processes.open(state.grammar.text)
        if replica is None or not replica.is_ready:
            return -1
        is_reset, token_ids = state.advance(rows.request.output_token_ids, replica)
        is_single = rows.num_masks == 1  # the process excludes what is banned
        bans = state.bans(0, rows.request.stop_token_ids) if is_single and rows.is_restricted else ()
        if tasks.add(replica, (rows.place, rows.num_masks), is_reset, token_ids, rows.drafts, bans):
            rows.is_restricted &= not is_single
            return replica.process
        state.replica = None  # it has missed the tokens
        return -1

    def _collect(self, groups: Sequence[Sequence[_Rows]], masks: np.ndarray) -> list[tuple[Request, str]]:
        """Wait for the masks of all processes, and compute here what they could not. Returns the requests that fail."""
        failed = []
        for process, group in enumerate(groups[:-1]):
            for rows in self._wait(process, group) if group else ():
                rows.state.replica = self._last = None
                rows.state.read(rows.request.output_token_ids)
                rows.is_restricted = rows.state.has_bans
                if error := _compute(rows, _masks_of(rows, masks)):
                    failed.append((rows.request, error))
        return failed

    def _wait(self, process: int, group: Sequence[_Rows]) -> Sequence[_Rows]:
        """Wait for the masks of a process. Returns the rows that it could not compute."""
        try:
            return [group[number] for number in self._processes.wait(process)]
        except ProcessError as ended:
            logger.warning("%s; the engine computes token masks itself", ended)
            self.close()
            return group


def _rows(output: SchedulerOutput, index: int, request: Request) -> _Rows | None:
    """The rows of a request, which is at ``index`` in its step; None: every token is allowed in all of them."""
    state = request.grammar
    if not isinstance(state, GrammarState):
        return None
    state.read(request.output_token_ids)
    is_decode = index < output.num_decodes
    num_drafts = output.num_drafts if is_decode else 0
    first_row = index * (1 + num_drafts) if is_decode else index + output.num_decodes * output.num_drafts
    begin, matcher, drafts = state.walk(num_drafts) if num_drafts or not state.has_begun else (0, None, [])
    rows = _Rows(request, state, first_row, 1 + num_drafts, begin, matcher, drafts, begin > 0 or state.has_bans)
    if begin <= num_drafts or state.has_bans:
        return rows
    return rows if any(state.forced(place) is not None for place in range(1 + num_drafts)) else None


def _masks_of(rows: _Rows, masks: np.ndarray) -> np.ndarray:
    """Those of a request among the masks of a step, ``[num_masks, words]``."""
    return masks[rows.place : rows.place + rows.num_masks]


def _compute(rows: _Rows, masks: np.ndarray) -> str:
    """Fill the masks of a request in this thread. Returns why that fails; empty: it does not."""
    state = rows.state
    if masks.shape[1] != state.num_words:  # the tokenizer has more tokens than the model
        wide = np.empty((len(masks), state.num_words), dtype=np.int32)
        reason = _compute(rows, wide)
        masks[:] = wide[:, : masks.shape[1]]
        return reason
    masks[: rows.begin].fill(-1)
    if rows.begin >= rows.num_masks:
        return ""
    matcher, error = rows.matcher, ""
    if matcher is None:
        error = state.catch_up(rows.request.output_token_ids)
        matcher = state.matcher  # another one, if the output has become shorter
    if not error:
        matcher = fill_masks(matcher, rows.drafts, masks[rows.begin :])
        error = f"the grammar cannot go on: {matcher_error(matcher)}" if matcher.is_error() else ""
    if error:
        masks.fill(-1)
    return error


def _restrict(rows: _Rows, masks: np.ndarray) -> None:
    """Apply what is beside the grammar: tokens that may not be there, and those that must be."""
    state = rows.state
    for place, mask in enumerate(masks):
        token_id = state.forced(place) if place < rows.begin else None
        if token_id is not None:
            set_only(mask, token_id)
        elif bans := state.bans(place, rows.request.stop_token_ids):
            clear_bits(mask, bans)
