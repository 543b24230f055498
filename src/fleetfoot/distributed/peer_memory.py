"""Memory of every rank's GPU, mapped into the address space of each of them: ranks of one host, linked by NVLink."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fleetfoot.config import env

logger = logging.getLogger(__name__)

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""NVLink multicast stays off, here and in NCCL: what is small enough for one step gains nothing from it, and a process
that dies with a multicast object can leave the GPUs of its host unusable for others."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One buffer on each rank."""

    local: torch.Tensor
    """``[num_words]`` int64: this rank's, zeroed."""
    addresses: torch.Tensor
    """``[size]`` int64: where each rank's buffer lies in this process, in rank order; ``addresses[rank]`` is
    ``local``'s."""
    keep: Any = None
    """Whatever must live as long as the buffers."""


def share_memory(group: dist.ProcessGroup, num_words: int, device: torch.device, instead: str) -> PeerMemory | None:
    """``num_words`` int64 on every rank of a NCCL group, which call this together; None where it cannot be had.

    That is logged as a warning, and is the same answer on every rank.

    Args:
        instead: for the warning, what then takes the slower way.
    """
    try:
        memory: PeerMemory | None = _rendezvous(group, num_words, device) if _is_one_host(group) else None
        reason = "its ranks are on different hosts"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        memory, reason = None, str(error)
    # also a barrier: every rank's buffer is zeroed before anybody writes to it
    has_it = torch.tensor([memory is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_it, op=dist.ReduceOp.MIN, group=group)
    if has_it.item():
        return memory
    logger.warning(
        "the GPUs of a group cannot read each other's memory (%s): %s the slower way, through NCCL",
        reason if memory is None else "another rank says so",
        instead,
    )
    return None


def _is_one_host(group: dist.ProcessGroup) -> bool:
    names: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return len(set(names)) == 1


def _rendezvous(group: dist.ProcessGroup, num_words: int, device: torch.device) -> PeerMemory:
    import torch.distributed._symmetric_memory as symmetric_memory

    with env.variable(NO_MULTICAST, "1"):
        local = symmetric_memory.empty(num_words, dtype=torch.int64, device=device)
        handle = symmetric_memory.rendezvous(local, group)
    offset = local.data_ptr() - handle.buffer_ptrs[handle.rank]
    if not 0 <= offset < handle.buffer_size:
        raise RuntimeError("symmetric memory is not where its handle says")
    local.zero_()
    torch.cuda.synchronize(device)
    addresses = torch.tensor([pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return PeerMemory(local, addresses, handle)
