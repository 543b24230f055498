"""Compiles the custom all-reduce and the P2P channel for an H100, on any machine: run as a module, without
``TRITON_INTERPRET``."""

from __future__ import annotations

from unittest.mock import patch

import torch
from tests.helpers.compile_op_kernels import compile_instead

from fleetfoot.distributed import peer_memory
from fleetfoot.distributed.peer_memory import CustomAllReduce, P2PChannel, PeerMemory
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from fleetfoot.records.forward_context import IntermediateTensors


def main() -> None:
    peer_memory.can_overlap = lambda device: True  # type: ignore[assignment]
    for num_ranks, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        words = torch.zeros(8, dtype=torch.int64)
        sums = CustomAllReduce(PeerMemory(words, words), 0, num_ranks, 1024, dtype, torch.device("cpu"))
        rows, norm = torch.empty(4, 1024, dtype=dtype), torch.empty(1024, dtype=dtype)
        sums.all_reduce(rows)
        sums.add_rms_norm(torch.empty(3, 4, 1024), rows, norm, 1e-5)
    tensors = IntermediateTensors(torch.empty(4, 1024))
    channel = P2PChannel(PeerMemory(words, words), 1)
    channel.send(tensors)
    channel.receive(tensors)


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        main()
