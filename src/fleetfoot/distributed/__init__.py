"""Groups of ranks and their transports. No torch here: the memory plan uses the buffers' sizes."""

import gc
import sys

from fleetfoot.kernels.linear.rank_sums import rank_sum_words

MIB = 1 << 20
COLLECTIVE_BYTES, _POINT_TO_POINT_BYTES = 1008 * MIB, 760 * MIB
"""NCCL's memory for a communicator of collectives, and for one between two ranks, each with its kernels in the driver
and what steps add to it: measured on two H200s with the NCCL of torch 2.11."""
ALL_REDUCE_ROWS, ALL_REDUCE_SETS = 128, 2
"""The most rows of `fleetfoot.distributed.peer_memory.CustomAllReduce`, and its sets of words. Each row has a program.
A GPU with fewer multiprocessors makes sums of as many rows: all programs run at the same time, so none waits for one
that has not started."""

GATHER_WORDS, GATHER_SETS = 1 << 19, 2
"""64-bit words of `fleetfoot.distributed.peer_gather.CustomAllGather` for the values of all ranks in one set, and its
sets. A word has 4 bytes of data."""


def all_reduce_words(num_ranks: int, row_bytes: int) -> int:
    """64-bit words of each rank's memory for the custom all-reduce; a word has 4 bytes of data."""
    return ALL_REDUCE_SETS * num_ranks * ALL_REDUCE_ROWS * (row_bytes // 4)


def peer_memory_words(num_ranks: int, row_bytes: int) -> int:
    """64-bit words of each rank's memory: for gathers, and for sums over the ranks, also within linear layers."""
    sums = all_reduce_words(num_ranks, row_bytes) + rank_sum_words(num_ranks, row_bytes // 2)
    return GATHER_SETS * GATHER_WORDS + sums


def tensor_group_bytes(num_ranks: int, row_bytes: int) -> int:
    """Bytes on each GPU of a tensor-parallel group; NCCL's by estimate. ``row_bytes``: of one token's hidden state."""
    return COLLECTIVE_BYTES + peer_memory_words(num_ranks, row_bytes) * 8 if num_ranks > 1 else 0


def pipeline_group_bytes(rank: int, num_ranks: int, step_bytes: int, *, on_gpu: bool) -> int:
    """Bytes on a pipeline rank; NCCL's by estimate. ``step_bytes``: of the largest `IntermediateTensors`."""
    if num_ranks == 1:
        return 0
    # the receive buffer; on GPUs also the memory that other ranks write to, on a CPU the send buffer
    num_buffers = (rank > 0) + (on_gpu or rank < num_ranks - 1)
    num_peers = num_ranks  # neighbours, and the way of the sampled tokens
    return num_buffers * step_bytes + (num_peers * _POINT_TO_POINT_BYTES if on_gpu else 0)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that the program has deleted. ``shutdown_ray`` has no effect: there is no Ray."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
