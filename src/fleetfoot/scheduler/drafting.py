"""Draft tokens as the scheduler sees them: how many are worth proposing, and what became of them. No torch."""

from __future__ import annotations

from typing import Protocol

from fleetfoot.records.request import Request
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.stats import DraftStats


class DraftController(Protocol):
    """Decides, step by step, whether drafting pays."""

    @property
    def off_reason(self) -> str:
        """Why the last `choose` gave 0, in a few words, for statistics; empty where it did not."""
        ...

    def choose(self, num_decodes: int) -> int:
        """How many drafts to propose for a step of ``num_decodes`` decodes: 0, or as many as were configured."""
        ...

    def observe(
        self, num_decodes: int, num_drafts: int, num_drafted: int, num_accepted: int, num_tokens: int, seconds: float
    ) -> None:
        """A step has ended. Called for every step that computed something, also for those without drafts.

        Args:
            num_decodes: its decodes.
            num_drafts: drafts that each of them verified; 0, or as many as were configured.
            num_drafted: drafts that were really proposed, of all decodes together.
            num_accepted: how many of those were accepted.
            num_tokens: tokens computed, of decodes and prefills: ``num_decodes * (1 + num_drafts)`` in a step of
                decodes alone.
            seconds: since the step before ended, or since this one began if that was later.
        """
        ...


class ConstantDrafts:
    """As many whatever happens; 0: never any.

    Args:
        num_drafts: how many.
        max_num_decodes: larger batches go without; None: none do.
    """

    def __init__(self, num_drafts: int = 0, max_num_decodes: int | None = None) -> None:
        self.off_reason = ""
        self.num_drafts = num_drafts
        self._max_num_decodes = max_num_decodes

    def choose(self, num_decodes: int) -> int:
        self.off_reason = too_many_decodes(num_decodes, self._max_num_decodes)
        return 0 if self.off_reason else self.num_drafts

    def observe(
        self, num_decodes: int, num_drafts: int, num_drafted: int, num_accepted: int, num_tokens: int, seconds: float
    ) -> None:
        pass


def too_many_decodes(num_decodes: int, max_num_decodes: int | None) -> str:
    """Why a batch of this size is not drafted for; empty: it is."""
    if max_num_decodes is None or num_decodes <= max_num_decodes:
        return ""
    return f"more than {max_num_decodes} request{'s' * (max_num_decodes != 1)}"


class Drafting:
    """The bookkeeping of drafts. Where there are none, every call does next to nothing.

    Args:
        num_drafts: of each decode in a step that has drafts; 0: there is no speculative decoding.
        controller: decides which steps propose.
    """

    def __init__(self, num_drafts: int, controller: DraftController) -> None:
        self.num_drafts = num_drafts
        self.num_proposed = 0  # by the last step that sampled, for each request that sampled
        self.last_drafted = 0  # of the step that was updated last, likewise below
        self.last_accepted = 0
        self._controller = controller
        self._num_steps = 0
        self._num_drafted = 0
        self._lengths = [0] * (1 + num_drafts)  # by the number of drafts accepted: how often a request had that many
        self._off: dict[str, int] = {}
        self._off_reason = ""

    def choose(self, num_sampled: int) -> int:
        """Drafts to propose at the end of a step for each of ``num_sampled`` requests, which then decode."""
        if not self.num_drafts or not num_sampled:
            return 0
        self.num_proposed = self._controller.choose(num_sampled)
        self._off_reason = ""
        if not self.num_proposed:
            reason = self._off_reason = self._controller.off_reason
            self._off[reason] = self._off.get(reason, 0) + 1
        return self.num_proposed

    def take_back(self, output: SchedulerOutput, batch: list[Request], result: ModelRunnerOutput) -> None:
        """Every decode was counted with all its drafts accepted: take back what was not, and count what was.

        What a step in flight brings a request that has ended counts nowhere.
        """
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
        """Tell the controller how the step went that was updated last."""
        if self.num_drafts and output.rows:
            self._controller.observe(
                output.num_decodes,
                output.num_drafts,
                self.last_drafted,
                self.last_accepted,
                output.total_num_scheduled_tokens,
                seconds,
            )

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
