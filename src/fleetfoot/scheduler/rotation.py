"""Whose turn it is in a pipeline: the steps in flight are of different requests, so that every stage is busy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput


def take_turn(running: list[Request], num_stages: int, step: int) -> list[Request]:
    """Of the running requests, in their order, those that may be in a step.

    Every prefill may, as its chunks need no token that is still on its way. Of the decodes at most one in
    ``num_stages``, rounded up, may: those that have waited longest since a step sampled for them. Those that one of the
    last ``num_stages - 1`` steps sampled for would hold up the first stage, and only come if there are no others.

    Args:
        step: the number of the step that is being made.
    """
    last_steps = sorted(
        request.last_step
        for request in running
        if request.num_computed >= request.num_prefill and not request.has_certainly_ended
    )
    share = -(-len(last_steps) // num_stages)
    num_rested = bisect_right(last_steps, step - num_stages)
    share = min(share, num_rested or share)
    newest = last_steps[share - 1] if share else -1
    num_ties = share - bisect_left(last_steps, newest)  # how many of those that were last in step `newest`
    turn = []
    for request in running:
        if request.num_computed >= request.num_prefill:
            if request.last_step > newest or request.has_certainly_ended:
                continue
            if request.last_step == newest:
                if not num_ties:
                    continue
                num_ties -= 1
        turn.append(request)
    return turn


def drafts_of_turn(turn: list[Request]) -> int:
    """Drafts that the decodes of a turn bring along: what the steps proposed that sampled for them last."""
    return max((request.num_proposed for request in turn), default=0)


def note_turn(output: SchedulerOutput, batch: list[Request], newest_updated: int) -> None:
    """Write down who sampled when, and what the earlier ranks must have heard before this step.

    What the host has seen they can have without waiting, so they always take it: a row that is given to somebody new is
    never changed any more by a step of its last owner.

    Args:
        output: the step; its ``awaited_step`` is set.
        newest_updated: the newest step whose result the host has seen.
    """
    decodes = batch[: output.num_decodes]
    output.awaited_step = max((request.last_step for request in decodes), default=-1)
    output.awaited_step = max(output.awaited_step, newest_updated)
    for request in batch[: output.num_sampled]:
        request.last_step = output.step
        request.num_proposed = output.num_to_propose
