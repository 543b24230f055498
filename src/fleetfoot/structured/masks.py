"""The token masks of a step: matchers consume the tokens that are known, and masks are computed, in processes of their
own where that is faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput, TokenMasks
from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.bits import clear_bits, fill_masks, set_only
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.structured.processes import MaskProcesses, ProcessError, RepeatedTasks, Replica, Replicas, is_supported
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


@dataclass(slots=True)
class _Repeatable:
    """A step of decodes with all of its masks from processes. If the next one has the same requests, each with one
    more token, as is the rule, their tasks are made at once: one by one they take a tenth of a step."""

    requests: list[Request]
    structured: list[int]
    lengths: list[int]
    """Lengths of the requests' outputs."""
    rows: list[int]
    """As of `TokenMasks`."""
    groups: list[list[_Rows]]
    replicas: list[Replica]
    bans: list[Sequence[int]]
    tasks: RepeatedTasks | None = None
    """Made when the step is first repeated."""

    @classmethod
    def of(cls, output: SchedulerOutput, every: Sequence[_Rows], groups: list[list[_Rows]]) -> _Repeatable | None:
        """None: it is not such a step, or masks of the next one are restricted in other ways."""
        if max(output.structured) >= output.num_decodes:
            return None
        matchers, bans = [], []
        for rows in every:
            if rows.state.replica is None or not rows.state.has_final_bans:
                return None
            matchers.append(rows.state.replica)
            bans.append(rows.state.bans(0, ()))
        requests = [rows.request for rows in every]
        lengths = [len(request.output_token_ids) for request in requests]
        numbers = [rows.first_row for rows in every]
        return cls(requests, output.structured, lengths, numbers, groups, matchers, bans)

    def is_repeated(self, output: SchedulerOutput, requests: Sequence[Request]) -> bool:
        """Whether a step differs by one more token of each request."""
        if output.num_drafts or output.structured != self.structured or max(self.structured) >= output.num_decodes:
            return False
        if requests != self.requests or any([request.is_finished for request in requests]):
            return False
        return [len(request.output_token_ids) - 1 for request in requests] == self.lengths

    def advance(self, replicas: Replicas) -> RepeatedTasks:
        """The tasks of the next step, with its tokens."""
        if self.tasks is None:
            self.tasks = replicas.repeated(self.replicas, self.bans)
        self.tasks.set_tokens([request.output_token_ids[-1] for request in self.requests])
        self.lengths = [length + 1 for length in self.lengths]
        for replica in self.replicas:
            replica.num_sent += 1
        return self.tasks


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
        self._replicas = Replicas()
        self._last: _Repeatable | None = None

    def start(self, vocabulary: VocabularySource) -> None:
        """Start the processes, in a thread. Called once, in any thread, before the first request has a grammar."""
        has_room = mask_size(vocabulary.vocab_size) == self._memory.num_words  # a tokenizer may have more tokens
        if self._num_processes and has_room and is_supported():
            self._replicas = MaskProcesses(self._num_processes, vocabulary, self._memory.descriptor)

    def close(self) -> None:
        """End the processes. `compute` goes on without them."""
        self._num_processes = 0
        self._replicas.close()
        self._replicas = Replicas()

    def settle(self) -> None:
        """Wait until the processes have compiled the grammars of all earlier steps, as tests and benchmarks do."""
        self._replicas.settle()

    def compute(
        self, output: SchedulerOutput, requests: Sequence[Request]
    ) -> tuple[TokenMasks | None, list[tuple[Request, str]]]:
        """The masks of a step, and the requests that fail, with the reason.

        Args:
            requests: those of ``output.structured``, with all their earlier tokens. Ended ones get no mask.
        """
        if (last := self._last) is not None and last.is_repeated(output, requests):
            return self._repeat(last)
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
        if len(every) == len(requests) and not output.num_drafts and not groups[-1]:
            self._last = _Repeatable.of(output, every, groups)
        return TokenMasks(numbers, masks, self._memory.words, offset), failed

    def _repeat(self, last: _Repeatable) -> tuple[TokenMasks, list[tuple[Request, str]]]:
        """A step with the tasks of the last one, and other tokens."""
        masks, offset = self._memory.next(len(last.rows))
        self._replicas.post(offset, last.advance(self._replicas))
        failed = self._collect(last.groups, masks)
        return TokenMasks(last.rows, masks, self._memory.words, offset), failed

    def _post(self, every: Sequence[_Rows], offset: int) -> list[list[_Rows]]:
        """Let processes begin with the step. Returns the rows of each process, and after them those of this thread."""
        groups: list[list[_Rows]] = [[] for _ in range(self._num_processes + 1)]
        has_processes = self._num_processes > 0 and len(every) > 1
        for rows in every:
            process = self._add(rows) if has_processes and not rows.begin else -1
            groups[process].append(rows)
        if any(groups[:-1]):
            self._replicas.post(offset)
        return groups

    def _add(self, rows: _Rows) -> int:
        """Add rows to the step of the process that has a matcher of their sequence; -1: none has yet."""
        state = rows.state
        replica = state.replica
        if replica is None:
            replica = state.replica = self._replicas.open(state.source.grammar)
        if replica is None or not replica.is_ready:
            return -1
        is_reset, token_ids = state.advance(rows.request.output_token_ids, replica)
        bans: Sequence[int] = ()
        if rows.is_restricted and rows.num_masks == 1:
            bans = state.bans(0, rows.request.stop_token_ids)
            rows.is_restricted = False
        if self._replicas.add(replica, (rows.place, rows.num_masks), is_reset, token_ids, rows.drafts, bans):
            return replica.process
        state.replica = None  # it has missed the tokens
        rows.is_restricted = state.has_bans
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
            return [group[number] for number in self._replicas.wait(process)]
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
    if state.has_begun and not num_drafts:
        return _Rows(request, state, first_row, 1, 0, None, (), state.has_bans)
    begin, matcher, drafts = state.walk(num_drafts)
    is_restricted = begin > 0 or state.has_bans
    rows = _Rows(request, state, first_row, 1 + num_drafts, begin, matcher, drafts, is_restricted)
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
    matcher = rows.matcher
    if matcher is None:
        if error := state.catch_up(rows.request.output_token_ids):
            masks.fill(-1)
            return error
        matcher = state.matcher  # another one, if the output has become shorter
    matcher = fill_masks(matcher, rows.drafts, masks[rows.begin :])
    if matcher.is_error():
        masks.fill(-1)
        return f"the grammar cannot go on: {matcher_error(matcher)}"
    return ""


def _restrict(rows: _Rows, masks: np.ndarray) -> None:
    """Apply what is beside the grammar: tokens that may not be there, and those that must be."""
    state = rows.state
    for place, mask in enumerate(masks):
        token_id = state.forced(place) if place < rows.begin else None
        if token_id is not None:
            set_only(mask, token_id)
        elif bans := state.bans(place, rows.request.stop_token_ids):
            clear_bits(mask, bans)
