"""Draft tokens in the scheduler: how many each step proposes, and how many were accepted."""

from __future__ import annotations

from collections import Counter

from fleetfoot.records.request import Request
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.stats import DraftStats


class DraftController:
    """Decides step by step whether to propose ``num_drafts`` drafts: always, but for batches above ``max_num_decodes``
    (None: no limit)."""

    def __init__(self, num_drafts: int = 0, max_num_decodes: int | None = None) -> None:
        self.num_drafts = num_drafts
        self.off_reason = ""
        """Why the last `choose` returned 0, in a few words, for statistics; empty if it did not."""
        self._max_num_decodes = max_num_decodes

    def choose(self, num_decodes: int) -> int:
        """How many drafts to propose for a step of ``num_decodes`` decodes: 0, or ``num_drafts``."""
        self.off_reason = self._why_not(num_decodes)
        return 0 if self.off_reason else self.num_drafts

    def _why_not(self, num_decodes: int) -> str:
        """Why not to propose drafts; empty to propose them."""
        most = self._max_num_decodes
        return "" if most is None or num_decodes <= most else f"more than {most} request{'s' * (most != 1)}"

    def observe(
        self, num_decodes: int, num_drafts: int, num_drafted: int, num_accepted: int, num_tokens: int, seconds: float
    ) -> None:
        """Record a step that has ended and computed something, with drafts or without. ``num_drafts``: drafts that each
        decode verified; ``num_drafted``, ``num_accepted``: of those really proposed, over all decodes; ``num_tokens``:
        computed for decodes (``1 + num_drafts`` each) and prefills; ``seconds``: since the previous step ended, or
        since this one began if that was later."""


class Drafting:
    """Draft counts and statistics of a scheduler. Without speculative decoding every call is a cheap no-op."""

    def __init__(self, num_drafts: int, controller: DraftController) -> None:
        self.num_drafts = num_drafts
        self.num_proposed = 0  # by the last step that sampled, for each of its requests
        self.last_drafted = 0  # in the step that was updated last
        self.last_accepted = 0
        self._controller = controller
        self._num_steps = 0
        self._num_drafted = 0
        self._lengths = [0] * (1 + num_drafts)  # index: number of accepted drafts; value: how often
        self._off: Counter[str] = Counter()  # reason -> steps that proposed no drafts
        self._off_reason = ""

    def choose(self, num_sampled: int) -> int:
        """Drafts to propose at the end of a step for each of ``num_sampled`` requests, which then decode."""
        if not self.num_drafts or not num_sampled:
            return 0
        self.num_proposed = self._controller.choose(num_sampled)
        self._off_reason = "" if self.num_proposed else self._controller.off_reason
        if not self.num_proposed:
            self._off[self._off_reason] += 1
        return self.num_proposed

    def update(self, output: SchedulerOutput, batch: list[Request], result: ModelRunnerOutput) -> None:
        """Subtract rejected drafts from ``num_computed``, which counted all drafts as accepted, and update statistics,
        which leave out requests that have already ended."""
        self.last_drafted = self.last_accepted = 0
        if not output.num_drafts:
            return
        self._num_steps += 1
        most = 1 + output.num_drafts
        real = result.num_drafted or [output.num_drafts] * output.num_decodes
        for request, new_token_ids, num_drafted in zip(batch, result.sampled_token_ids, real, strict=False):
            num_new = len(new_token_ids)
            request.num_computed -= most - num_new
            if num_new and num_drafted and not request.is_finished:
                self._lengths[num_new - 1] += 1
                self.last_drafted += num_drafted
                self.last_accepted += num_new - 1
                request.num_drafted += num_drafted
                request.num_accepted += num_new - 1
        self._num_drafted += self.last_drafted

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """Report the step that was updated last to the controller."""
        if self.num_drafts and output.rows:
            verified = output.num_decodes, output.num_drafts, self.last_drafted, self.last_accepted
            self._controller.observe(*verified, output.total_num_scheduled_tokens, seconds)

    def stats(self) -> DraftStats:
        accepted_at = tuple(sum(self._lengths[place:]) for place in range(1, 1 + self.num_drafts))
        return DraftStats(
            num_steps=self._num_steps,
            num_rows=sum(self._lengths),
            num_drafted=self._num_drafted,
            num_accepted=sum(accepted_at),
            accepted_at=accepted_at,
            off=dict(self._off),
            off_reason=self._off_reason,
        )
