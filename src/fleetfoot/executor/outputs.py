"""Puts the answers of ranks together to the output of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.messages import Answer
from fleetfoot.executor.ranks import answering_ranks, output_rank
from fleetfoot.records.kv_connector import KVConnectorOutput, KVOutputMerger
from fleetfoot.records.step import ModelRunnerOutput


@dataclass(slots=True)
class _Collected:
    """Of one step."""

    num_missing: int
    output: ModelRunnerOutput | None = None
    kv_outputs: list[KVConnectorOutput] = field(default_factory=list)


class StepOutputs:
    """Outputs of steps that are under way, by the steps' numbers."""

    def __init__(self, config: EngineConfig) -> None:
        self._output_rank = output_rank(config)
        self._num_answers = len(answering_ranks(config))
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
