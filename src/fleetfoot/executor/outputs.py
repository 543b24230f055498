"""Puts the answers of ranks together to the output of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetfoot.executor.messages import Answer
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure
from fleetfoot.records.step import ModelRunnerOutput

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class _Collected:
    """Of one step."""

    num_missing: int
    output: ModelRunnerOutput | None = None
    kv_outputs: list[KVConnectorOutput] = field(default_factory=list)


class StepOutputs:
    """Outputs of steps that are under way, by the steps' numbers.

    Args:
        output_rank: the rank that reports sampled tokens.
        num_answers: ranks that answer each step.
    """

    def __init__(self, output_rank: int, num_answers: int) -> None:
        self._output_rank = output_rank
        self._num_answers = num_answers
        self._merger = KVOutputMerger(self._num_answers)
        self._steps: dict[int, _Collected] = {}

    def expect(self, number: int) -> None:
        """A step has been sent."""
        self._steps[number] = _Collected(self._num_answers)

    def add(self, answer: Answer) -> None:
        step = self._steps[answer.number]
        step.num_missing -= 1
        if answer.rank == self._output_rank:
            step.output = answer.output
        if answer.output.kv_connector_output is not None:
            step.kv_outputs.append(answer.output.kv_connector_output)

    def is_complete(self, number: int) -> bool:
        """Whether all have answered."""
        return self._steps[number].num_missing == 0

    def take(self, number: int) -> ModelRunnerOutput:
        """The output of a complete step, with what the KV connector reports from all ranks."""
        step = self._steps.pop(number)
        assert step.output is not None
        step.output.kv_connector_output = self._merger.merge(step.kv_outputs) if step.kv_outputs else None
        return step.output


class KVOutputMerger:
    """Merges the outputs of all ranks: a transfer has ended when it has ended on every rank, and has failed if it has
    failed on any.

    Args:
        num_ranks: how many ranks report.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[str, int] = {}
        self._sends: dict[str, int] = {}
        self._failures: dict[str, TransferFailure] = {}

    def merge(self, outputs: Iterable[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """Take in what some ranks have reported, in any order; returns what has ended on all of them with it."""
        merged = KVConnectorOutput()
        for output in outputs:
            if output is None:
                continue
            for name, count in output.counters.items():
                merged.counters[name] = merged.counters.get(name, 0) + count
            merged.addresses.update(output.addresses)
            for request_id, failure in output.failed.items():
                self._failures.setdefault(request_id, failure)
            for request_id in (*output.loaded, *output.failed):
                if self._has_ended(self._loads, request_id):
                    failed = self._failures.pop(request_id, None)
                    if failed is None:
                        merged.loaded.add(request_id)
                    else:
                        merged.failed[request_id] = failed
            merged.sent.update(request_id for request_id in output.sent if self._has_ended(self._sends, request_id))
        return None if merged.is_empty else merged

    def _has_ended(self, counts: dict[str, int], request_id: str) -> bool:
        count = counts.pop(request_id, 0) + 1
        if count < self._num_ranks:
            counts[request_id] = count
        return count == self._num_ranks
