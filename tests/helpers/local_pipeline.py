"""A pipeline of runners in one process: what ranks send each other waits in queues."""

from __future__ import annotations

from collections import deque

import torch

from fleetfoot.distributed.groups import SINGLE_PIPELINE_GROUP, PipelineGroup
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.step import ModelRunnerOutput, PendingOutput, SchedulerOutput, without_token_ids
from fleetfoot.runner.base import ModelRunner

MAX_NUM_TOKENS = 64
"""Of a step, where buffers are persistent."""


class LocalPipelineGroup(PipelineGroup):
    """One rank's end of the queues. Whoever receives something that nobody has sent yet would wait for ever: an error.

    Args:
        ways: hidden states on their way, to ranks 1, 2, ...
        packets: packets on their way, to ranks 0, 1, ...
        hidden_size: if it is known, steps are received in persistent buffers; what lies behind a step there is not a
            number.
    """

    def __init__(
        self,
        rank: int,
        ways: list[deque[IntermediateTensors]],
        packets: list[deque[torch.Tensor]],
        hidden_size: int | None,
    ) -> None:
        self._buffers = None
        if hidden_size is not None and rank > 0:
            self._buffers = IntermediateTensors(torch.full((MAX_NUM_TOKENS, hidden_size), float("nan")))
        self.rank = rank
        self.size = len(ways) + 1
        self._ways = ways
        self._packets = packets

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        if self.is_first_rank:
            return None
        assert self._ways[self.rank - 1], "a rank receives hidden states that were not sent yet"
        tensors = self._ways[self.rank - 1].popleft()
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
        self._ways[self.rank].append(IntermediateTensors(tensors.hidden_states.clone()))

    def send_sampled_tokens(self, packet: torch.Tensor) -> None:
        assert self.is_last_rank
        assert packet.dtype is torch.int32
        for queue in self._packets:
            queue.append(packet.clone())

    def receive_sampled_tokens(self, packet: torch.Tensor) -> None:
        assert self._packets[self.rank], "a rank waits for a packet that was not sent yet"
        packet.copy_(self._packets[self.rank].popleft())  # of the same shape, or it raises


def local_pipeline(size: int, hidden_size: int | None = None) -> list[PipelineGroup]:
    """Every rank's group."""
    if size == 1:
        return [SINGLE_PIPELINE_GROUP]
    ways: list[deque[IntermediateTensors]] = [deque() for _ in range(size - 1)]
    packets: list[deque[torch.Tensor]] = [deque() for _ in range(size - 1)]
    return [LocalPipelineGroup(rank, ways, packets, hidden_size) for rank in range(size)]


class LocalPipeline:
    """Runs steps on all ranks, each rank as late as it may be.

    A rank computes a step when somebody reads its tokens, or when an earlier rank needs to have heard of it. So the
    first rank is as far ahead of the others as the scheduler's ``awaited_step`` lets it be.

    Args:
        runners: in pipeline order.
    """

    def __init__(self, runners: list[ModelRunner]) -> None:
        self._runners = runners
        self._behind: deque[tuple[SchedulerOutput, _Waiting]] = deque()  # steps that the first rank alone has computed
        self.max_behind = 0

    def execute(self, output: SchedulerOutput) -> PendingOutput:
        """The first rank's part of a step."""
        while self._behind and self._behind[0][0].step <= output.awaited_step:
            self._advance()
        first = self._runners[0]
        assert first.execute_model(output) is None
        assert first.sample_tokens(None).get().sampled_token_ids == []
        waiting = _Waiting(self)
        self._behind.append((output, waiting))
        self.max_behind = max(self.max_behind, len(self._behind))
        return waiting

    def _advance(self) -> None:
        """The other ranks' parts of the oldest step."""
        output, waiting = self._behind.popleft()
        for runner in self._runners[1:]:
            is_last = runner is self._runners[-1]
            assert runner.execute_model(output if is_last else without_token_ids(output)) is None
            waiting.pending = runner.sample_tokens(None)

    def wait_for(self, waiting: _Waiting) -> None:
        while waiting.pending is None:
            self._advance()


class _Waiting:
    """A step that the last rank may not have begun."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline = pipeline
        self.pending: PendingOutput | None = None

    def get(self) -> ModelRunnerOutput:
        self._pipeline.wait_for(self)
        assert self.pending is not None
        return self.pending.get()
