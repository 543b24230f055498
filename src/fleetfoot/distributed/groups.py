"""The tensor group and the pipeline group of a worker.

A single worker has groups of size 1, whose operations are identities, so that no caller checks for parallelism.
`fleetfoot.distributed.torch_groups` has the groups that communicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.kernels.elementwise import sum_parts
from fleetfoot.kernels.interface import AddRMSNorm
from fleetfoot.records.forward_context import IntermediateTensors


class _Ranks:
    """Some ranks in order; this one alone."""

    rank = 0
    size = 1

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.size - 1


class TensorGroup(_Ranks):
    """The ranks that share each layer. This class is a group of size 1."""

    bitwise_reproducible = False
    """Whether layers gather instead of summing partial results, so that outputs have the same bits as on one rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks, with the same bits on each. May overwrite ``x``."""
        return x

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        """Concatenate ``x [n, m]`` of the ranks in rank order.

        Returns the first ``num_columns`` columns (None: all) of ``[n, size * m]``.
        """
        return x

    def reducing(self, add_rms_norm: AddRMSNorm) -> AddRMSNorm:
        """`Kernels.add_rms_norm` for an ``x`` that is still to be summed over the ranks.

        Layers that are split by their inputs leave that sum to the norm behind them, where it can be one kernel with
        the residual sum and the norm. Alone there is nothing to sum, nor where it was gathered: it is the operation
        itself.
        """
        if self.size == 1 or self.bitwise_reproducible:
            return add_rms_norm

        def reduce_add_rms_norm(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return add_rms_norm(self.all_reduce(sum_parts(x, residual)), residual, weight, eps)

        return reduce_add_rms_norm


class PipelineGroup(_Ranks):
    """The ranks that the layers are spread over, in order. This class is a group of size 1."""

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """Receive the previous rank's output for a step of ``num_tokens``; None on the first rank.

        The tensors are views of persistent buffers: they start at the same address in every step, and are valid until
        the next call.
        """
        return None

    def buffers(self, num_tokens: int) -> IntermediateTensors | None:
        """The tensors that `receive` returns, without receiving, for the capture of graphs."""
        return None

    def send(self, tensors: IntermediateTensors) -> None:
        """Queue a send to the next rank. Work queued later may overwrite the tensors."""
        raise RuntimeError("the last rank of a pipeline has no next rank to send to")

    def send_sampled_tokens(self, packet: torch.Tensor) -> None:
        """Send a step's sampled tokens (int32, see `SampledTokenSync`) from the last rank to all earlier ones."""

    def receive_sampled_tokens(self, packet: torch.Tensor) -> None:
        """Receive the oldest outstanding packet of the last rank into ``packet``."""
        raise RuntimeError("a pipeline of one rank sends no packets")


SINGLE_TENSOR_GROUP = TensorGroup()
SINGLE_PIPELINE_GROUP = PipelineGroup()


@dataclass(frozen=True, slots=True)
class WorkerGroups:
    """The groups of one worker."""

    tensor: TensorGroup = SINGLE_TENSOR_GROUP
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP
