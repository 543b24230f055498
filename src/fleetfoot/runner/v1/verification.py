"""From logits to new tokens: one for each request that samples, or a run of accepted drafts and one more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetfoot.records.logprobs import RowLogprobs
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.contract import INVALID_MESSAGE
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.runner.v1.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Whose the rows of logits are. Decodes come first, ``1 + d`` rows each; then prefills that end, one row each."""

    tokens: np.ndarray
    """``[num_logits]`` int64: the tokens of the batch behind which a token is chosen."""
    requests: list[slice]
    """``[num_sampled]``: each request's rows of logits."""

    @classmethod
    def of(cls, inputs: StepInputs, scheduler_output: SchedulerOutput) -> LogitsRows:
        width, num_decodes = 1 + scheduler_output.num_drafts, scheduler_output.num_decodes
        verified = num_decodes * width
        num_ending = scheduler_output.num_sampled - num_decodes
        last_tokens = inputs.query_start_loc[num_decodes + 1 : scheduler_output.num_sampled + 1] - 1
        return cls(
            tokens=np.concatenate((np.arange(verified), last_tokens)),
            requests=[slice(begin, begin + width) for begin in range(0, verified, width)]
            + [slice(row, row + 1) for row in range(verified, verified + num_ending)],
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What the requests that sample have got."""

    token_ids: list[list[int]]
    """Up to ``1 + d`` for each; none for a request that had got all of its tokens before."""
    num_rejected: np.ndarray
    """``[num_sampled]`` int64: tokens of the query that are not part of the sequence."""
    num_drafted: list[int]
    """For each decode, drafts that were proposed at all; empty where no drafts were verified."""
    invalid: dict[int, str]
    """Batch index -> why the last of its tokens means nothing."""

    @classmethod
    def none(cls) -> NewTokens:
        """Nobody samples."""
        return cls([], np.zeros(0, dtype=np.int64), [], {})


def accept_drafts(
    host: HostState,
    inputs: StepInputs,
    scheduler_output: SchedulerOutput,
    logits_rows: LogitsRows,
    chosen: list[int],
    is_invalid: list[bool],
) -> NewTokens:
    """Drafts hold as long as they are what the target itself chose; then comes the target's choice behind them.

    Args:
        chosen: ``[num_logits]``: the target's choices.
        is_invalid: ``[num_logits]``: choices that mean nothing; behind one of those nothing holds.
    """
    num_drafts, num_decodes = scheduler_output.num_drafts, scheduler_output.num_decodes
    rows = inputs.rows[: scheduler_output.num_sampled]
    room = (host.limits[rows] + 1 - host.num_tokens[rows]).tolist()  # tokens that each request may still get
    drafts: list[list[int]] = host.drafts[rows[:num_decodes], :num_drafts].tolist() if num_drafts else []
    token_ids: list[list[int]] = []
    num_rejected: list[int] = []
    invalid: dict[int, str] = {}
    for index, logits in enumerate(logits_rows.requests):
        choices, flags = chosen[logits], is_invalid[logits]
        num_right = _count_right(drafts[index], choices, flags) if index < len(drafts) else 0
        count = min(num_right + 1, room[index])
        token_ids.append(choices[:count])
        num_rejected.append(len(choices) - count)
        if count and flags[count - 1]:
            invalid[index] = INVALID_MESSAGE
    num_drafted = [sum(draft >= 0 for draft in proposed) for proposed in drafts]
    return NewTokens(token_ids, np.array(num_rejected), num_drafted, invalid)


def _count_right(drafts: Sequence[int], choices: Sequence[int], flags: Sequence[bool]) -> int:
    """How many drafts, from the first on, are the target's choices; one of -1, which stands for none, never is."""
    for count, (draft, choice, is_invalid) in enumerate(zip(drafts, choices, flags, strict=False)):
        if is_invalid or draft != choice:
            return count
    return len(drafts)


def logprobs_of_requests(
    entries: dict[int, RowLogprobs], logits_rows: LogitsRows, token_ids: list[list[int]]
) -> dict[int, list[RowLogprobs]]:
    """Logits row -> its logprobs, to batch index -> an entry for each new token; the others are of no use."""
    found: dict[int, list[RowLogprobs]] = {}
    if not entries:
        return found
    for index, (logits, new) in enumerate(zip(logits_rows.requests, token_ids, strict=True)):
        if new and logits.start in entries:
            found[index] = [entries[row] for row in range(logits.start, logits.start + len(new))]
    return found
