"""The token masks of a step: matchers consume the tokens that are known, and masks are computed, in processes of their
own where that is faster."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

import numpy as np

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput, TokenMasks
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.structured.processes import MaskProcesses, ProcessError, StepTasks, is_supported
from fleetfoot.structured.state import GrammarState
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
    if device == "cpu" or cores < _FEWEST_CORES or not is_supported():
        return 0
    return min(_MOST_PROCESSES, cores * _MOST_CORES[0] // _MOST_CORES[1])


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
        if self._num_processes and is_supported():
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
        return TokenMasks(numbers, masks, self._memory.words, offset), failed

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
        is_reset, token_ids = state.advance(request.output_token_ids, replica)
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
