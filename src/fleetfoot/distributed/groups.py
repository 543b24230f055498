"""The groups that a worker belongs to, as its layers and its runner see them.

A worker that is alone has groups of one, whose operations are identities: nobody asks whether there is parallelism.
`fleetfoot.distributed.torch_groups` has those that really communicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.kernels.interface import AddRMSNorm
from fleetfoot.kernels.norm.rms_norm import sum_parts
from fleetfoot.records.intermediate import IntermediateTensors


class TensorGroup:
    """The ranks that share each layer. This one is a group of one."""

    rank = 0
    size = 1
    bitwise_reproducible = False
    """Whether layers gather where they could sum, so that what they make has the bits that one rank would get."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``, the same bits on each of them; may write to ``x``."""
        return x

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        """``[n, m]`` of each rank -> the first ``num_columns`` (None: all) of ``[n, size * m]``, in rank order."""
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

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.size - 1


class PipelineGroup:
    """The ranks that the layers are spread over, in order. This one is a group of one."""

    rank = 0
    size = 1

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.size - 1

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """What the rank before this one sent for a step of ``num_tokens``, in persistent buffers; None on the first.

        The tensors begin at the same addresses in every step, whatever ``num_tokens``, and hold the step until the next
        call.
        """
        return None

    def buffers(self, num_tokens: int) -> IntermediateTensors | None:
        """The tensors that `receive` gives, without receiving anything: graphs are captured with them."""
        return None

    def send(self, tensors: IntermediateTensors) -> None:
        """Queue the sending to the next rank; the tensors may be written over once the device has passed it."""
        raise RuntimeError("the last rank of a pipeline has nobody to send to")

    def send_sampled_tokens(self, packet: torch.Tensor) -> None:
        """From the last rank to all earlier ones: a step's sampled tokens, int32; see `SampledTokenSync`."""

    def receive_sampled_tokens(self, packet: torch.Tensor) -> None:
        """On an earlier rank: the oldest packet that has not been received yet, into ``packet``."""
        raise RuntimeError("a pipeline of one rank sends no packets")


SINGLE_TENSOR_GROUP = TensorGroup()
SINGLE_PIPELINE_GROUP = PipelineGroup()


@dataclass(frozen=True, slots=True)
class WorkerGroups:
    """The groups of one worker."""

    tensor: TensorGroup = SINGLE_TENSOR_GROUP
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP
