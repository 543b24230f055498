"""The groups of a worker, by name: the ranks that share each layer, those that the layers are spread over, and others.

A single worker has groups of size 1; their operations are identities, so that no caller checks for parallelism. Others
communicate through torch.distributed: NCCL between GPUs, gloo between CPUs.

The world has ``D * P * T`` ranks. Tensor rank t of stage p of replica d has rank ``(d * P + p) * T + t``, so that the
ranks of a tensor group, which communicate twice per layer, are adjacent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from fleetfoot.config import env
from fleetfoot.distributed import GATHER_SETS, GATHER_WORDS, peer_memory_words
from fleetfoot.distributed.peer_gather import CustomAllGather
from fleetfoot.distributed.peer_memory import CustomAllReduce, P2PChannel, can_all_reduce, make_channel, share_memory
from fleetfoot.kernels.elementwise import sum_parts
from fleetfoot.kernels.interface import AddRMSNorm
from fleetfoot.kernels.linear.rank_sums import RankSums
from fleetfoot.kernels.runtime.dry_tensors import DryTensor
from fleetfoot.records.forward_context import IntermediateTensors

_NO_MULTICAST_IN_NCCL = "NCCL_NVLS_ENABLE", "0"
"""See `fleetfoot.distributed.peer_memory.NO_MULTICAST`."""
_UNLIMITED = timedelta(days=365)
"""Time limit of operations in which a rank waits for another that sleeps; the end of a process ends them."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.12
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankGroup:
    """Some ranks in order, of which this worker is one. This class is a group of size 1."""

    rank = 0
    size = 1

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.size - 1


class TensorGroup(RankGroup):
    """The ranks that share each layer. This class is a group of size 1."""

    bitwise_reproducible = False
    """Whether layers gather instead of summing partial results, so that outputs have the same bits as on one rank."""
    rank_sums: RankSums | None = None
    """Sums for linear layers that are split by inputs and can sum over the ranks themselves; None: there is no such
    way."""

    def connect(self) -> None:
        """Wait until all connections are there. Operations that need them wait, too; a graph must not be captured
        before."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks, with the same bits on each. May overwrite ``x``."""
        return x

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        """Concatenate ``x [n, m]`` by rank; the first ``num_columns`` columns (None: all) of ``[n, size * m]``."""
        return x

    def reducing(self, add_rms_norm: AddRMSNorm) -> AddRMSNorm:
        """`Kernels.add_rms_norm` for an ``x`` that is still to be summed over the ranks.

        Layers that are split by their inputs leave that sum to the norm after them, where it can be one kernel with
        the residual sum and the norm. A group of size 1, or one that gathers, returns the operation itself.
        """
        if self.size == 1 or self.bitwise_reproducible:
            return add_rms_norm
        return partial(self._reduce_add_rms_norm, add_rms_norm)

    def _reduce_add_rms_norm(
        self, add_rms_norm: AddRMSNorm, x: torch.Tensor, residual: torch.Tensor, *norms: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(self.all_reduce(sum_parts(x, residual)), residual, *norms)


class PipelineGroup(RankGroup):
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


class DataGroup(RankGroup):
    """The replicas that step together; each has its own requests. This class is a group of size 1."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, m]``, of the same shape on each rank -> ``[size * n, m]``, in rank order."""
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of ``x [size * n, m]``, of which each gets its part ``[n, m]``."""
        return x


@dataclass(frozen=True, slots=True)
class ExpertGroup(RankGroup):
    """The ranks that the experts of each layer are spread over."""

    rank: int = 0
    size: int = 1
    on_device: dist.ProcessGroup | None = None
    """Group of the backend for the device; None: there is one rank."""
    on_host: dist.ProcessGroup | None = None
    """Group of gloo, for what ranks agree on beside their steps."""


SINGLE_DATA_GROUP, SINGLE_EXPERT_GROUP = DataGroup(), ExpertGroup()
SINGLE_TENSOR_GROUP, SINGLE_PIPELINE_GROUP = TensorGroup(), PipelineGroup()


@dataclass(frozen=True, slots=True)
class Groups(Mapping[str, RankGroup]):
    """The groups of one worker, by name."""

    tensor: TensorGroup = SINGLE_TENSOR_GROUP
    pipeline: PipelineGroup = SINGLE_PIPELINE_GROUP
    expert: ExpertGroup = SINGLE_EXPERT_GROUP
    """The ranks that the experts of each layer are spread over."""
    data: DataGroup = SINGLE_DATA_GROUP

    def __getitem__(self, name: str) -> RankGroup:
        by_name: dict[str, RankGroup] = {each: getattr(self, each) for each in self}
        return by_name[name]

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


SINGLE_RANK = Groups()


# --- groups that communicate ----------------------------------------------------------------------------------------


class TorchTensorGroup(TensorGroup):
    """A tensor group on any backend. Bitwise reproducible: on a CPU that matters more than the cost of messages.

    Each rank gathers all parts and adds them in rank order. The bits of a sum do not depend on the number of tokens or
    on the backend's algorithm, and are the same on all ranks.
    """

    bitwise_reproducible = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.process_group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._gather(x)  # [size, *x.shape]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        parts = self._gather(x)  # [size, num_rows, width]
        if x.shape[0] == 1:  # already in order
            return parts.view(1, -1)[:, :num_columns]
        width = x.shape[1]
        most = self.size * width if num_columns is None else num_columns
        return torch.cat([part[:, : max(0, most - rank * width)] for rank, part in enumerate(parts)], dim=1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size, *x.shape]``, in rank order."""
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() > 0:
            # as bytes: not every backend supports every dtype
            own = x.contiguous().view(-1).view(torch.uint8)
            _all_gather(gathered.view(-1).view(torch.uint8), own, group=self.process_group)
        return gathered


class TorchDataGroup(DataGroup):
    """A data group on any backend. With gloo sums are in rank order and float32."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._can_reduce = group, dist.get_backend(group) == "nccl"

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size * len(x), x.shape[1]))
        _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if self._can_reduce:
            total = x.new_empty((len(x) // self.size, x.shape[1]))
            _reduce_scatter(total, x.contiguous(), group=self._group)
            return total
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts.view(torch.uint8), x.contiguous().view(torch.uint8), group=self._group)
        first, *others = parts.view(self.size, -1, x.shape[1])
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)


class CudaTensorGroup(TorchTensorGroup):
    """A tensor group of GPUs: NCCL, and our kernels for small sums and gathers if the GPUs can access each other's
    memory.

    NCCL computes each element of a sum once and copies it, so its sums have the same bits on all ranks too.

    ``connecting``: done when NCCL is connected, or an exception if it cannot be; None: it is.
    """

    bitwise_reproducible = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        custom_all_reduce: CustomAllReduce | None,
        custom_all_gather: CustomAllGather | None = None,
        connecting: Future[None] | None = None,
    ) -> None:
        super().__init__(group)
        self._connecting = connecting
        self._custom_all_reduce = custom_all_reduce
        self._custom_all_gather = custom_all_gather
        self.rank_sums = None if custom_all_reduce is None else custom_all_reduce.rank_sums

    def connect(self) -> None:
        if self._connecting is not None:
            self._connecting.result()
            self._connecting = None

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        self._connect_for(x)
        return super()._gather(x)

    def _connect_for(self, x: torch.Tensor) -> None:
        """Before an operation of NCCL on ``x``; a dry pass sends nothing, and does not wait."""
        if not isinstance(x, DryTensor):
            self.connect()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._custom_all_reduce is not None and self._custom_all_reduce.fits(x):
            return self._custom_all_reduce.all_reduce(x)
        if x.numel() > 0:
            self._connect_for(x)
            x = x.contiguous()
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor, num_columns: int | None = None) -> torch.Tensor:
        if self._custom_all_gather is not None and self._custom_all_gather.fits(x):
            return self._custom_all_gather.all_gather(x, num_columns)
        return super().all_gather(x, num_columns)

    def _reduce_add_rms_norm(
        self, add_rms_norm: AddRMSNorm, x: torch.Tensor, residual: torch.Tensor, *norms: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        match norms:  # one norm alone, with weights around 0
            case weight, eps if weight is not None and self._custom_all_reduce is not None:
                if self._custom_all_reduce.fits(residual):
                    return self._custom_all_reduce.add_rms_norm(x, residual, weight, eps)
        return super()._reduce_add_rms_norm(add_rms_norm, x, residual, *norms)


class TorchPipelineGroup(PipelineGroup):
    """A pipeline: each rank sends hidden states to the next, and the last one sends sampled tokens to all others.

    Hidden states are copied before the next step can overwrite them, so a step can be in transit while both neighbours
    compute others. A rank that is a step ahead waits: on a GPU the device, not the host.

    ``activations``, ``token_group``: groups of the same ranks, in pipeline order; ``channel``: between GPUs that access
    each other's memory; None: hidden states go through ``activations``.
    """

    def __init__(
        self,
        activations: dist.ProcessGroup,
        token_group: dist.ProcessGroup,
        shape: StepShape,
        channel: P2PChannel | None = None,
    ) -> None:
        self.rank = dist.get_rank(activations)
        self.size = dist.get_world_size(activations)
        self._activations = activations
        self._token_group = token_group
        self._channel = channel
        self._max_num_tokens = shape.max_num_tokens
        zero = torch.zeros((), dtype=shape.dtype, device=shape.device)
        largest = IntermediateTensors(zero.expand(shape.max_num_tokens, shape.hidden_size))
        # on its way to the next rank, and what this rank's step reads
        self._outgoing = None if self.is_last_rank or channel is not None else largest.empty_like()
        self._received = None if self.is_first_rank else largest.empty_like()
        for buffer in (self._outgoing, self._received):
            if buffer is not None:
                buffer.hidden_states.zero_()  # graphs read rows that no step has filled
        self._sending: list[Any] = []
        self._packets_in_flight: deque[tuple[torch.Tensor, list[Any]]] = deque()
        self._connect(shape.device)

    def receive(self, num_tokens: int) -> IntermediateTensors | None:
        """See `PipelineGroup.receive`; raises ValueError if there is no room for so many tokens."""
        tensors = self.buffers(num_tokens)
        if tensors is None:
            return None
        if self._channel is not None:
            self._channel.receive(tensors)
        else:
            # waits until the device reaches this step: a pending receive would slow down the previous step's kernels
            dist.recv(tensors.hidden_states, group=self._activations, group_src=self.rank - 1)
        return tensors

    def buffers(self, num_tokens: int) -> IntermediateTensors | None:
        if self._received is None:
            return None
        self._check_num_tokens(num_tokens)
        return self._received.first(num_tokens)

    def send(self, tensors: IntermediateTensors) -> None:
        if self.is_last_rank:
            super().send(tensors)  # raises
        num_tokens = tensors.hidden_states.shape[0]
        self._check_num_tokens(num_tokens)
        if self._channel is not None:
            self._channel.send(tensors)
            return
        assert self._outgoing is not None
        for work in self._sending:
            work.wait()  # until then the buffer belongs to the previous step
        outgoing = self._outgoing.first(num_tokens).hidden_states.copy_(tensors.hidden_states)
        self._sending = [dist.isend(outgoing, group=self._activations, group_dst=self.rank + 1)]

    def send_sampled_tokens(self, packet: torch.Tensor) -> None:
        """See `PipelineGroup.send_sampled_tokens`. Never waits; earlier ranks receive packets when they need them."""
        _check_packet(packet)
        while self._packets_in_flight and all(work.is_completed() for work in self._packets_in_flight[0][1]):
            self._packets_in_flight.popleft()
        if packet.numel() == 0:
            return
        own = packet.clone(memory_format=torch.contiguous_format)
        works = [dist.isend(own, group=self._token_group, group_dst=rank) for rank in range(self.size - 1)]
        self._packets_in_flight.append((own, works))

    def receive_sampled_tokens(self, packet: torch.Tensor) -> None:
        """See `PipelineGroup.receive_sampled_tokens`. ``packet`` must be contiguous and have the shape of the sent
        one."""
        _check_packet(packet)
        if not packet.is_contiguous():
            raise ValueError(f"a packet of strides {packet.stride()} cannot be received into; it must be contiguous")
        if packet.numel() > 0:
            dist.recv(packet, group=self._token_group, group_src=self.size - 1)

    def _check_num_tokens(self, num_tokens: int) -> None:
        if num_tokens > self._max_num_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens does not fit in a pipeline's buffers, which are made for "
                f"max_num_batched_tokens {self._max_num_tokens}"
            )

    def _connect(self, device: torch.device) -> None:
        """Use every connection once, so that none is made later."""
        token = torch.zeros(1, dtype=torch.int32, device=device)
        if not self.is_first_rank:
            dist.recv(token, group=self._activations, group_src=self.rank - 1)
        if not self.is_last_rank:
            dist.send(token, group=self._activations, group_dst=self.rank + 1)
            dist.recv(token, group=self._token_group, group_src=self.size - 1)
        else:
            for rank in range(self.size - 1):
                dist.send(token, group=self._token_group, group_dst=rank)


def _check_packet(packet: torch.Tensor) -> None:
    if packet.dtype is not torch.int32:
        raise ValueError(f"a packet is of {packet.dtype}; it must be of int32")


# --- making groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step's hidden states."""

    max_num_tokens: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    """The device of this rank; the current device if it is a GPU."""


def make_groups(sizes: Mapping[str, int], shape: StepShape) -> Groups:
    """Make this rank's groups. A collective call, after ``torch.distributed.init_process_group``. ``sizes``: by the
    names of `Groups`; others are 1. An expert group has the ranks of one stage in all replicas.

    Connections are made here: their first use could be during a graph capture, or while the peer waits for something
    else. NCCL takes seconds to connect a tensor group of GPUs, in a thread, while kernels are compiled: see
    `TensorGroup.connect`. Raises ValueError if the size of the world is not the product of the other groups', or the
    expert group has other ranks.
    """
    world, tensor_size, pipeline_size = dist.get_world_size(), sizes.get("tensor", 1), sizes.get("pipeline", 1)
    data_size = sizes.get("data", 1)
    if world != tensor_size * pipeline_size * data_size:
        raise ValueError(
            f"{world} processes are in the world, and tensor_parallel_size {tensor_size} times pipeline_parallel_size "
            f"{pipeline_size} times {data_size} replicas is {tensor_size * pipeline_size * data_size}"
        )
    if (expert_size := sizes.get("expert", 1)) not in (1, tensor_size * data_size):
        raise ValueError(
            f"the expert group has {expert_size} ranks; it can have those of a stage, {tensor_size * data_size}"
        )
    all_ranks = torch.arange(world).view(data_size, pipeline_size, tensor_size)
    by_pipeline_rank = all_ranks.view(-1, tensor_size)
    backend = "nccl" if shape.device.type == "cuda" else "gloo"
    tensor, pipeline = SINGLE_TENSOR_GROUP, SINGLE_PIPELINE_GROUP
    if tensor_size > 1:
        group = _subgroup(by_pipeline_rank, backend)
        if backend == "nccl":
            on_host = _subgroup(by_pipeline_rank, "gloo")
            custom = _make_custom(group, on_host, shape.hidden_size, shape.dtype, shape.device)
            connecting = None
            if pipeline_size == data_size == 1:
                connecting = _connect_beside(group, shape.device)
            else:  # not beside other connections
                _connect(group, shape.device)
            tensor = CudaTensorGroup(group, *custom, connecting)
        else:
            tensor = TorchTensorGroup(group)
    if pipeline_size > 1:
        by_tensor_rank, channel = all_ranks.transpose(1, 2).reshape(-1, pipeline_size), None
        activations, token_group = (_subgroup(by_tensor_rank, backend) for _ in range(2))
        with env.variable(*_NO_MULTICAST_IN_NCCL):
            if backend == "nccl":
                hidden = shape.max_num_tokens, shape.hidden_size, shape.dtype, shape.device
                channel = make_channel(activations, _subgroup(by_tensor_rank, "gloo"), *hidden)
            pipeline = TorchPipelineGroup(activations, token_group, shape, channel)
    data, expert = SINGLE_DATA_GROUP, SINGLE_EXPERT_GROUP
    if data_size > 1:
        replicas = _subgroup(all_ranks.permute(1, 2, 0).reshape(-1, data_size), backend)
        if backend == "nccl":
            _connect(replicas, shape.device)
        data = TorchDataGroup(replicas)
    if expert_size > 1:
        of_stages = all_ranks.transpose(0, 1).reshape(pipeline_size, -1)
        beside = _subgroup(of_stages, "gloo", timeout=_UNLIMITED)
        if data_size > 1:
            on_device = _subgroup(of_stages, backend)
            if backend == "nccl":
                _connect(on_device, shape.device)
        else:
            assert isinstance(tensor, TorchTensorGroup)
            on_device = tensor.process_group
        expert = ExpertGroup(dist.get_rank(beside), expert_size, on_device, beside)
    return Groups(tensor, pipeline, expert, data)


def _subgroup(ranks: torch.Tensor, backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """This rank's group, of the rows of ``ranks``."""
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend=backend, timeout=timeout)
    assert group is not None
    return group


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Use NCCL once."""
    torch.cuda.set_device(device)  # in a thread it is another one
    with env.variable(*_NO_MULTICAST_IN_NCCL):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)


def _connect_beside(group: dist.ProcessGroup, device: torch.device) -> Future[None]:
    """`_connect` in a thread, which does not keep the process from ending."""
    connecting: Future[None] = Future()

    def run() -> None:
        try:
            _connect(group, device)
        except BaseException as error:
            connecting.set_exception(error)
        else:
            connecting.set_result(None)

    Thread(target=run, name="fleetfoot-connect", daemon=True).start()
    return connecting


def _make_custom(
    group: dist.ProcessGroup, on_host: dist.ProcessGroup, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[CustomAllReduce | None, CustomAllGather | None]:
    """The custom all-reduce and all-gather of an NCCL group, if they support such rows and memory can be shared. A
    collective call. ``on_host``: a group of gloo with the same ranks."""
    if not can_all_reduce(hidden_size, dtype):
        return None, None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_words = peer_memory_words(size, hidden_size * dtype.itemsize)
    memory = share_memory(group, on_host, num_words, device, "small sums and gathers take")
    if memory is None:
        return None, None
    gathers, sums = memory.split(GATHER_SETS * GATHER_WORDS)
    return (
        CustomAllReduce(sums, rank, size, hidden_size, dtype, device),
        CustomAllGather(gathers, rank, size, device),
    )
