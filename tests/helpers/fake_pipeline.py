"""The first rank of a fake pipeline: it has only the sampled tokens that it was sent, and applies them when it must."""

from fleetfoot.records.step import SchedulerOutput
from tests.helpers.fake_runner import FakeRunner

Packet = list[tuple[int, int, int, list[int]]]
"""For each request that sampled in a step: its row, last token, tokens computed, and drafts."""


class FirstRank:
    """Makes each step's inputs out of packets, and compares them with what the last rank has.

    Args:
        last_rank: the reference. It runs a step after `prepare`.
    """

    def __init__(self, last_rank: FakeRunner) -> None:
        self._last_rank = last_rank
        self._packets: list[Packet] = []  # of all steps
        self._num_applied = 0
        self._rows: dict[int, tuple[int, int, list[int]]] = {}

    def prepare(self, output: SchedulerOutput) -> None:
        assert output.awaited_step < output.step == len(self._packets)
        while self._num_applied <= output.awaited_step:
            for row, token, computed, drafts in self._packets[self._num_applied]:
                self._rows[row] = token, computed, drafts
            self._num_applied += 1
        for request in output.new_requests:
            self._rows[request.row] = request.token_ids[-1], request.num_computed_tokens, []

    def compute(self, output: SchedulerOutput) -> None:
        """Count the computed tokens of chunks of prompts."""
        counts = output.num_scheduled_tokens
        for row, count in list(zip(output.rows, counts, strict=True))[output.num_decodes :]:
            token, computed, drafts = self._rows[row]
            self._rows[row] = token, computed + count, drafts

    def check(self, output: SchedulerOutput) -> None:
        """After the last rank has applied the changes of rows, and before it computes."""
        for index, row in enumerate(output.rows):
            token, computed, drafts = self._rows[row]
            assert self._last_rank.computed[row] == computed, "a stage computes at another position"
            if index >= output.num_decodes:
                continue
            assert self._last_rank.rows[row].token_ids[-1] == token, "a stage computes an old token"
            if output.num_drafts and drafts:
                assert self._last_rank.drafts[row] == drafts, "a stage verifies other drafts"

    def send(self, output: SchedulerOutput) -> None:
        """After the last rank has computed."""
        last = self._last_rank
        self._packets.append(
            [
                (row, last.rows[row].token_ids[-1], last.computed[row], list(last.drafts.get(row, [])))
                for row in output.rows[: output.num_sampled]
            ]
        )
