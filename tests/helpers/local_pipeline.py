"""A pipeline of runners in one process, with queues between the ranks."""

from collections import deque
from dataclasses import dataclass

import torch

from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, PipelineGroup
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.step import ModelRunnerOutput, PendingOutput, SchedulerOutput, without_token_ids
from fleetfoot.runner.base import ModelRunner

MAX_NUM_TOKENS = 64
"""Of a step, where buffers are persistent."""


class LocalPipelineGroup(PipelineGroup):
    """One rank's ends of the queues: ``steps``, hidden states for ranks 1, 2, ...; ``packets`` for ranks 0, 1, ...

    To receive what was not sent yet would be a deadlock: an error. With a ``hidden_size`` there are persistent buffers;
    what lies behind a step in a buffer is NaN.
    """

    def __init__(
        self,
        rank: int,
        steps: list[deque[IntermediateTensors]],
        packets: list[deque[torch.Tensor]],
        hidden_size: int | None,
    ) -> None:
        self._buffers = None
        if hidden_size is not None and rank > 0:
            self._buffers = IntermediateTensors(torch.full((MAX_NUM_TOKENS, hidden_size), float("nan")))
        self.rank, self.size = rank, len(steps) + 1
        self._steps, self._packets = steps, packets

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        if self.is_first_rank:
            return None
        assert self._steps[self.rank - 1], "a rank receives hidden states that were not sent yet"
        tensors = self._steps[self.rank - 1].popleft()
        assert tensors.hidden_states.shape[0] == num_tokens
        if self._buffers is None:
            return tensors
        self._buffers.hidden_states.fill_(float("nan"))[:num_tokens] = tensors.hidden_states
        return self.buffers(num_tokens)

    def buffers(self, num_tokens: int) -> IntermediateTensors | None:
        if self.is_first_rank:
            return None
        assert self._buffers is not None
        return self._buffers.first(num_tokens)

    def send(self, tensors: IntermediateTensors) -> None:
        self._steps[self.rank].append(IntermediateTensors(tensors.hidden_states.clone()))

    def send_sampled_tokens(self, packet: torch.Tensor) -> None:
        assert self.is_last_rank
        assert packet.dtype is torch.int32
        for queue in self._packets if len(packet) else ():
            queue.append(packet.clone())

    def receive_sampled_tokens(self, packet: torch.Tensor) -> None:
        assert self._packets[self.rank], "a rank waits for a packet that was not sent yet"
        packet.copy_(self._packets[self.rank].popleft())  # of the same shape, or it raises


def local_pipeline(size: int, hidden_size: int | None = None) -> list[PipelineGroup]:
    """The groups of all ranks."""
    if size == 1:
        return [SINGLE_PIPELINE_GROUP]
    steps: list[deque[IntermediateTensors]] = [deque() for _ in range(size - 1)]
    packets: list[deque[torch.Tensor]] = [deque() for _ in range(size - 1)]
    return [LocalPipelineGroup(rank, steps, packets, hidden_size) for rank in range(size)]


class LocalPipeline:
    """Runs steps on all ranks, each rank as late as possible.

    Ranks after the first compute a step when its output is read, or when the first rank must have received its packet.
    So the first rank is as far ahead of the others as the scheduler's ``awaited_step`` allows.
    """

    def __init__(self, runners: list[ModelRunner]) -> None:
        self._runners = runners
        self._behind: deque[_LateOutput] = deque()  # of steps that only the first rank has computed
        self.max_behind = 0

    def execute(self, output: SchedulerOutput) -> PendingOutput:
        """The first rank's part of a step."""
        while self._behind and self._behind[0].step.step <= output.awaited_step:
            self.advance()
        first = self._runners[0]
        assert first.execute_model(output) is None
        assert first.sample_tokens(None).get().sampled_token_ids == []
        self._behind.append(_LateOutput(self, output))
        self.max_behind = max(self.max_behind, len(self._behind))
        return self._behind[-1]

    def advance(self) -> None:
        """The other ranks' parts of the oldest step."""
        late = self._behind.popleft()
        for runner in self._runners[1:]:
            is_last = runner is self._runners[-1]
            assert runner.execute_model(late.step if is_last else without_token_ids(late.step)) is None
            late.pending = runner.sample_tokens(None)


@dataclass(eq=False)
class _LateOutput:
    """Of a step that the last rank may not have begun."""

    pipeline: LocalPipeline
    step: SchedulerOutput
    pending: PendingOutput | None = None

    def get(self) -> ModelRunnerOutput:
        while self.pending is None:
            self.pipeline.advance()
        return self.pending.get()
