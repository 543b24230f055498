"""Symmetric memory: a buffer on each GPU of a group, mapped into the address space of every rank of one host."""

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
"""NVLink multicast is disabled, here and in NCCL: small sums gain nothing from it, and a process that dies with a
multicast object can leave the host's GPUs unusable for other processes."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One buffer on each rank."""

    local: torch.Tensor
    """``[num_words]`` int64, zeroed: this rank's buffer."""
    addresses: torch.Tensor
    """``[size]`` int64: the address of each rank's buffer in this process; ``addresses[rank]`` is that of ``local``."""
    keep: Any = None
    """The handle of the mapping, which must live as long as the buffers."""


def share_memory(group: dist.ProcessGroup, num_words: int, device: torch.device, instead: str) -> PeerMemory | None:
    """Allocate a buffer on every rank of an NCCL group. A collective call.

    Returns None on every rank, with a warning, if some rank cannot map the memory.

    Args:
        group: the ranks.
        num_words: int64 words of each buffer.
        device: of this rank.
        instead: for the warning: what uses NCCL then.
    """
    try:
        memory: PeerMemory | None = _rendezvous(group, num_words, device) if _is_one_host(group) else None
        reason = "its ranks are on different hosts"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        memory, reason = None, str(error)
    # also a barrier: all buffers are zeroed before any rank writes to one
    has_it = torch.tensor([memory is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_it, op=dist.ReduceOp.MIN, group=group)
    if has_it.item():
        return memory
    logger.warning(
        "the GPUs of a group cannot access each other's memory (%s): %s NCCL, which is slower",
        reason if memory is None else "on another rank",
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
        raise RuntimeError("symmetric memory lies outside the buffer of its handle")
    local.zero_()
    torch.cuda.synchronize(device)
    addresses = torch.tensor([pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return PeerMemory(local, addresses, handle)
