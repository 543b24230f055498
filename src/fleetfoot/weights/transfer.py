"""Weights from a trainer: over torch.distributed (NCCL between GPUs, gloo between CPUs), or out of its GPU memory.

The trainer is rank 0 of a group of its own, and every worker of an engine is a further rank. An update is announced to
the engine (names, dtypes, shapes), which every worker accepts or refuses before the trainer sends the first tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from fleetfoot.config import env
from fleetfoot.distributed.stores import make_store
from fleetfoot.records.weights import WeightError
from fleetfoot.utils.validation import FieldError, FieldTypeError, shown, unknown_keyword
from fleetfoot.weights.patches import SparseWeightPatch

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_ACCEPTED = b"accepted"
_DEVICE_ARGUMENT = 6
"""An argument of `rebuild_cuda_tensor`: the number of the GPU in the process that opens the handle."""


@dataclass(frozen=True, slots=True)
class WeightTransferInitInfo:
    """Where the trainer is. Names follow vLLM's."""

    master_address: str
    master_port: int
    world_size: int
    """The trainer and all workers of all engines."""
    rank_offset: int = 1
    """Rank of this engine's first worker; the trainer has rank 0."""
    timeout: float = 300.0
    """Seconds after which a message that does not come is an error."""

    def __post_init__(self) -> None:
        for name, most in {"master_port": 0xFFFF, "world_size": 1 << 16, "timeout": 1 << 20}.items():
            if not 0 < (value := getattr(self, name)) <= most:
                raise FieldError(f"init_info.{name}", f"is {value}; it must be above 0 and at most {most:,}", value)


@dataclass(frozen=True, slots=True)
class WeightTransferUpdateInfo:
    """Tensors that the trainer sends, in their order. Names follow vLLM's."""

    names: Sequence[str]
    dtype_names: Sequence[str] = ()
    """``bfloat16`` and so on."""
    shapes: Sequence[Sequence[int]] = ()
    """The shapes of the checkpoint's tensors."""
    num_updates_list: Sequence[int] | None = None
    """How many elements, in a sparse update, of each tensor change; `send_patches` sends them."""
    ipc_handles: Sequence[Mapping[str, Any]] | None = None
    """A handle for each tensor and each GPU, by its UUID; see `ipc_update_info`."""
    packed: bool = False
    """Has no effect: tensors are sent one by one."""
    is_checkpoint_format: bool = True
    """Names and shapes are always those of a checkpoint."""

    def __post_init__(self) -> None:
        lists: dict[str, Sequence[Any]] = {"dtype_names": self.dtype_names, "shapes": self.shapes}
        lists |= {} if self.num_updates_list is None else {"num_updates_list": self.num_updates_list}
        for name, values in ({"ipc_handles": self.ipc_handles} if self.ipc_handles is not None else lists).items():
            if len(values) != len(self.names):
                raise WeightError(f"update_info: {name} has {len(values)} entries for {len(self.names)} names")
        if unknown := [name for name in self.dtype_names if not isinstance(getattr(torch, name, None), torch.dtype)]:
            raise WeightError(f"update_info: dtype_names has {unknown[0]!r}, which is no dtype of torch")
        if not self.is_checkpoint_format:
            raise WeightError("update_info: is_checkpoint_format is False; send tensors as in the checkpoint")


def parse_info(kind: type[Any], name: str, given: Any) -> Any:
    """``kind`` out of a dictionary with its fields, or of a request of vLLM's, which has it as ``name``. Raises
    TypeError: there is another field, or one is missing."""
    given = getattr(given, name, given)
    if isinstance(given, Mapping):
        given, hints = given.get(name, given), get_type_hints(kind)
        for key in given:
            if key not in hints:
                raise unknown_keyword(name, key, hints)
        for item in fields(kind):
            place, hint = f"{name}.{item.name}", hints[item.name]
            if item.name not in given and item.default is MISSING:
                raise FieldTypeError(place, f"is missing; it must be {item.type}")
            if item.name in given and not _fits(value := given[item.name], hint):
                raise FieldTypeError(place, f"is {shown(value)}; it must be {item.type}", value)
        given = kind(**given)
    if not isinstance(given, kind):
        raise FieldTypeError(name, f"is {given!r:.200}; it must be a dictionary, or a {kind.__name__}", given)
    return given


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type in the fields here. Numbers and lists can be those of numpy and torch."""
    inner = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in inner)
    if get_origin(hint) is Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(_fits(one, inner[0]) for one in value)
    if hint is int or hint is float:
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


@dataclass(frozen=True, slots=True)
class WeightTransferInitRequest:
    """vLLM's wrapper of the argument of `init_weight_transfer_engine`."""

    init_info: Any


@dataclass(frozen=True, slots=True)
class WeightTransferUpdateRequest:
    """vLLM's wrapper of the argument of `update_weights`."""

    update_info: Any


class TransferGroup:
    """A trainer and the workers of one or more engines. All of them take part in each `broadcast`.

    Raises torch's DistStoreError or RuntimeError: the others did not come within the timeout.
    """

    def __init__(self, info: WeightTransferInitInfo, rank: int, backend: str, device: torch.device) -> None:
        timeout, size = timedelta(seconds=info.timeout), info.world_size
        self.rank, self.size, self.device = rank, size, device
        address = info.master_address, info.master_port
        if rank == 0:
            self._store = make_store(*address, timeout=timeout)
        else:
            self._store = dist.TCPStore(*address, size, timeout=timeout, wait_for_workers=False)
        store = dist.PrefixStore("weights", self._store)
        if backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # its monitor would read the trainer's store, and warn each second once the trainer has ended
            with env.defaults({"TORCH_NCCL_ENABLE_MONITORING": "0"}):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        self._num_updates = 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 to all others, which receive into ``tensor``: contiguous, of the same shape and dtype."""
        self._group.broadcast(tensor, 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that rank 0 broadcasts."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.broadcast(tensor)
        return tensor

    def answer(self, refusal: str = "") -> None:
        """On a worker: accept the announced update, or refuse it for a reason."""
        self._store.set(f"update {self._num_updates} on {self.rank}", refusal or _ACCEPTED.decode())
        self._num_updates += 1

    def await_answers(self) -> None:
        """On the trainer: wait until all workers have accepted. Raises RuntimeError if one has refused."""
        keys = [f"update {self._num_updates} on {rank}" for rank in range(1, self.size)]
        self._num_updates += 1
        refusals = [answer.decode() for answer in map(self._store.get, keys) if answer != _ACCEPTED]
        if refusals:
            raise RuntimeError(f"an engine refuses the weights: {refusals[0]}")


# --- the trainer's side -----------------------------------------------------------------------------------------------


class NCCLWeightTransferEngine:
    """The trainer's side; names follow vLLM's."""

    backend = "nccl"

    @classmethod
    def trainer_init(cls, init_info: Any) -> TransferGroup:
        """Wait for the workers, which join in `init_weight_transfer_engine`. ``init_info``: `WeightTransferInitInfo`,
        or a dictionary with its fields."""
        device = torch.device("cuda", torch.cuda.current_device()) if cls.backend == "nccl" else torch.device("cpu")
        return TransferGroup(parse_info(WeightTransferInitInfo, "init_info", init_info), 0, cls.backend, device)

    @staticmethod
    def trainer_send_weights(iterator: NamedTensors, trainer_args: Any = None, *, group: Any = None) -> None:
        """Send whole tensors, in the order of the announced names, while the engine runs `update_weights`.

        ``group``: of `trainer_init`; or ``trainer_args`` with it. Raises RuntimeError: an engine refuses them.
        """
        group = group or trainer_args.group
        group.await_answers()
        for _, tensor in iterator:
            group.broadcast(tensor.detach().to(group.device).contiguous())

    @staticmethod
    def trainer_send_patches(patches: Iterable[SparseWeightPatch], *, group: TransferGroup) -> None:
        """Send sparse patches; as `trainer_send_weights`. The update has ``num_updates_list``."""
        group.await_answers()
        for patch in patches:
            for tensor in (torch.as_tensor(patch.indices).long(), torch.as_tensor(patch.values)):
                group.broadcast(tensor.to(group.device).contiguous())


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """The same between CPUs."""

    backend = "gloo"


@dataclass(frozen=True, slots=True)
class NCCLTrainerSendWeightsArgs:
    """vLLM's arguments of `NCCLWeightTransferEngine.trainer_send_weights`."""

    group: TransferGroup
    packed: bool = False
    """As of `WeightTransferUpdateInfo`."""


def update_info_of(named_tensors: NamedTensors) -> dict[str, Any]:
    """The argument of `update_weights` for tensors that are sent in this order."""
    pairs = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named_tensors]
    return {"names": [p[0] for p in pairs], "dtype_names": [p[1] for p in pairs], "shapes": [p[2] for p in pairs]}


def ipc_update_info(named_tensors: NamedTensors) -> dict[str, Any]:
    """The argument of `update_weights` for tensors on a GPU that the engine opens in its own process. They must stay
    unchanged until the update has ended. It can be pickled."""
    names, handles = [], []
    for name, tensor in named_tensors:
        tensor = tensor.detach().contiguous()
        names.append(name)
        handles.append({str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)})
    torch.cuda.current_stream().synchronize()  # the engine reads on a stream of its own
    return {"names": names, "ipc_handles": handles}


# --- an engine's side -------------------------------------------------------------------------------------------------


def open_handles(info: WeightTransferUpdateInfo, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """The tensors behind CUDA IPC handles. Raises WeightError: there is none of this rank's GPU."""
    if device.type != "cuda":
        raise WeightError("update_info has ipc_handles, which are of a GPU, and this engine runs on a CPU")
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid, tensors = str(torch.cuda.get_device_properties(index).uuid), []
    for name, handles in zip(info.names, info.ipc_handles or (), strict=True):
        if uuid not in handles:
            raise WeightError(
                f"{name} is on GPU {', '.join(handles)}, and a worker on GPU {uuid}, which cannot read it"
            )
        function, arguments = handles[uuid]
        if function is not rebuild_cuda_tensor:
            raise WeightError(f"the handle of {name} is not one of a tensor on a GPU; ipc_update_info makes them")
        arguments = (*arguments[:_DEVICE_ARGUMENT], index, *arguments[_DEVICE_ARGUMENT + 1 :])
        tensors.append((name, rebuild_cuda_tensor(*arguments)))
    return tensors
