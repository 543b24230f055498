"""The token masks of a step: matchers advance by the tokens that are known, and masks are computed in threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput, TokenMasks
from fleetfoot.structured.state import GrammarState, clear_bits, set_only

_MAX_THREADS = 8
_FEW = 4
"""So many masks are computed in the thread that steps: waking up others takes longer."""
_TRIAL = 128
"""Steps after which the slower way is tried again."""
_FIRST_STEPS = 8
"""Of each way."""
_WEIGHT = 0.1
"""Of a new time in the average."""


class ThreadChoice:
    """How many threads compute masks fastest, from the times of earlier steps; 0: the thread that steps, alone.

    More threads win where they wake up in microseconds. In some virtual machines and containers that takes longer than
    the masks of a whole batch.

    Args:
        numbers: what can be chosen; the first one for a few masks.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._times: dict[int, float] = {}  # number -> average seconds of a mask
        self._num_steps = 0
        self._is_trial = False

    def choose(self, num_masks: int) -> int:
        """The number of threads for so many masks."""
        if num_masks <= _FEW:
            return self._numbers[0]
        self._num_steps += 1
        trials = _FIRST_STEPS * len(self._numbers)  # the first masks of a grammar take longer
        self._is_trial = self._num_steps > trials and self._num_steps % _TRIAL == 0
        if self._num_steps <= trials:
            return self._numbers[self._num_steps % len(self._numbers)]
        if self._is_trial:
            return self._numbers[self._num_steps // _TRIAL % len(self._numbers)]
        return min(self._numbers, key=lambda number: self._times.get(number, 0.0))

    def note(self, num_masks: int, seconds: float, number: int) -> None:
        """The masks of a step have taken so long."""
        if num_masks > _FEW:
            each = seconds / num_masks
            before = each if self._is_trial else self._times.get(number, each)
            self._times[number] = before + _WEIGHT * (each - before)


class TokenMasker:
    """Computes the masks of steps, without Python's lock, in threads where that is faster.

    Args:
        num_threads: most threads; 0: as many as there are cores, up to 8.
        clock: seconds, monotonic.
    """

    def __init__(self, num_threads: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        most = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._clock = clock
        self._choice = ThreadChoice((0, *sorted({min(2, most), most} - {1})))
        self._executors: dict[int, Any] = {}

    def _executor(self, num_threads: int) -> Any:
        from llguidance import LLExecutor

        if num_threads not in self._executors:
            self._executors[num_threads] = LLExecutor(num_threads)
        return self._executors[num_threads]

    def compute(
        self, output: SchedulerOutput, requests: Sequence[Request], allocate: Callable[[int], np.ndarray]
    ) -> tuple[TokenMasks | None, list[tuple[Request, str]]]:
        """The masks of a step, and the requests that fail, with the reason.

        Args:
            requests: those of ``output.structured``, with all their earlier tokens. Ended ones get no mask.
            allocate: memory for a number of masks, ``[num, words]`` int32.
        """
        begin_s = self._clock()
        num_threads = self._choice.choose(len(requests))
        failed = self._read(requests, num_threads)
        ended = {request.request_id for request, _ in failed}
        num_words = 0
        tasks: list[tuple[Any, int, list[int]]] = []
        owners: list[Request] = []
        rows: list[int] = []
        banned: list[tuple[int, Sequence[int]]] = []
        forced: list[tuple[int, int]] = []
        for index, request in zip(output.structured, requests, strict=True):
            state = request.grammar
            if request.is_finished or request.request_id in ended or not isinstance(state, GrammarState):
                continue
            is_decode = index < output.num_decodes
            num_drafts = output.num_drafts if is_decode else 0
            first_row = index * (1 + output.num_drafts) if is_decode else index + output.num_decodes * output.num_drafts
            num_words = state.num_words
            begin, matcher, drafts = state.walk(num_drafts)
            bans = [state.bans(place, request.stop_token_ids) for place in range(1 + num_drafts)]
            free = [(len(rows) + place, state.forced(place)) for place in range(min(begin, 1 + num_drafts))]
            only = [(number, token_id) for number, token_id in free if token_id is not None]
            if begin > num_drafts and not any(bans) and not only:
                continue  # every token is allowed
            if begin <= num_drafts:
                tasks.append((matcher, len(rows) + begin, drafts))
                owners.append(request)
            forced += only
            banned += [(len(rows) + place, token_ids) for place, token_ids in enumerate(bans) if token_ids]
            rows += range(first_row, first_row + 1 + num_drafts)
        if not rows:
            return None, failed
        masks = allocate(len(rows))  # [num_masks, words]
        if len(tasks) < len(rows):
            masks.fill(-1)
        self._fill(tasks, masks, num_words, num_threads)
        self._choice.note(len(requests), self._clock() - begin_s, num_threads)
        for request, (matcher, _, _) in zip(owners, tasks, strict=True):
            if matcher.is_error():
                failed.append((request, f"the grammar cannot go on: {matcher.get_error():.300}"))
        for number, token_ids in banned:
            clear_bits(masks[number], token_ids)
        for number, token_id in forced:
            set_only(masks[number], token_id)
        return TokenMasks(rows, masks), failed

    def _read(self, requests: Sequence[Request], num_threads: int) -> list[tuple[Request, str]]:
        """Let each request's matcher consume its new tokens. Returns those with a token that is refused, and why."""
        failed: list[tuple[Request, str]] = []
        steps: list[tuple[Request, int]] = []  # matchers that advance by one token, as most do
        for request in requests:
            if request.is_finished:
                continue
            token_id = request.grammar.next_token(request.output_token_ids) if num_threads else None
            if token_id is not None:
                steps.append((request, token_id))
            elif error := request.grammar.read(request.output_token_ids):
                failed.append((request, error))
        if steps:
            taken = self._executor(num_threads).consume_token_par(
                [(request.grammar.matcher, token) for request, token in steps]
            )
            for (request, token_id), is_taken in zip(steps, taken, strict=True):
                if error := request.grammar.note_read(token_id, is_taken=is_taken):
                    failed.append((request, error))
        return failed

    def _fill(
        self, tasks: Sequence[tuple[Any, int, list[int]]], masks: np.ndarray, num_words: int, num_threads: int
    ) -> None:
        """Fill the mask of each matcher's next token, and of those behind its drafts, as far as it accepts them."""
        if masks.shape[1] != num_words:  # the tokenizer has more tokens than the model
            wide = np.full((len(masks), num_words), -1, dtype=np.int32)
            self._fill(tasks, wide, num_words, num_threads)
            masks[:] = wide[:, : masks.shape[1]]
            return
        address, num_bytes = masks.ctypes.data, num_words * masks.itemsize
        place = address, num_bytes, len(masks)
        plain = [(matcher, number) for matcher, number, drafts in tasks if not drafts]
        if plain and num_threads:
            self._executor(num_threads).unsafe_compute_mask_ptr(plain, *place)
        elif plain:
            for matcher, number in plain:
                matcher.unsafe_compute_mask_ptr(address + number * num_bytes, num_bytes)
        if drafted := [task for task in tasks if task[2]]:
            self._executor(max(1, num_threads)).unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
