"""Hidden states from one pipeline rank to the next, written directly to the receiver's memory: GPUs of one host.

An NCCL receive is a kernel that waits, and occupies multiprocessors that the previous step's kernels count on. Here the
sender's GPU copies a step into the receiver's memory over NVLink and then writes the step's number there. When the
receiver's GPU reaches the step, it waits for that number, copies the data, and writes the number back to the sender.
Both numbers only increase. There is room for one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.records.forward_context import IntermediateTensors

if TYPE_CHECKING:
    import triton.language as tl

_ARRIVED, _TAKEN = 0, 8  # indices of words, each with 64 bytes of its own
_DATA = 16
_TILE = 1024
_MOST_PROGRAMS = 128


def p2p_channel_words(max_num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """64-bit words that `P2PChannel` needs on each rank."""
    return _DATA + max_num_tokens * hidden_size * dtype.itemsize // 8


def can_send(hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether rows of hidden states consist of whole words."""
    return hidden_size * dtype.itemsize % 8 == 0


class P2PChannel:
    """Sends steps from rank to rank in order, one `send` for each `receive` of the next rank. The host never waits.

    Args:
        memory: `p2p_channel_words` words on every rank of the pipeline.
        rank: of this worker.
    """

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._num_sent = 0
        self._num_received = 0

    def send(self, tensors: IntermediateTensors) -> None:
        """Queue the copy to the next rank. Work queued later may overwrite the tensors."""
        hidden = _words(tensors.hidden_states)
        _push_kernel[(_num_programs(hidden),)](
            hidden,
            self._memory.local,
            self._memory.addresses[self._rank + 1],
            self._num_sent,
            hidden.numel(),
            taken=_TAKEN,
            data=_DATA,
            tile=_TILE,
        )
        self._num_sent += 1
        self._signal(self._rank + 1, _ARRIVED, self._num_sent)

    def receive(self, tensors: IntermediateTensors) -> None:
        """Queue the copy of the previous rank's step into ``tensors``, which have its shape."""
        hidden = _words(tensors.hidden_states)
        self._num_received += 1
        _pull_kernel[(_num_programs(hidden),)](
            hidden,
            self._memory.local,
            self._num_received,
            hidden.numel(),
            arrived=_ARRIVED,
            data=_DATA,
            tile=_TILE,
        )
        self._signal(self._rank - 1, _TAKEN, self._num_received)

    def _signal(self, rank: int, word: int, number: int) -> None:
        """Write a number to another rank's memory, after all work queued before."""
        _signal_kernel[(1,)](self._memory.addresses[rank], number, word=word, num_warps=1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int64)


def _num_programs(words: torch.Tensor) -> int:
    return min(_MOST_PROGRAMS, cdiv(words.numel(), _TILE))


@triton_kernel(unspecialized=("number", "num_words"))
def _push_kernel(
    hidden_ptr,
    local_ptr,
    address_ptr,
    number,
    num_words,
    taken: tl.constexpr,
    data: tl.constexpr,
    tile: tl.constexpr,
):
    place = wait_for_number(local_ptr + taken, number)
    peer_ptr = tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(tl.int64)), 16) + data + place
    for begin in range(tl.program_id(0) * tile, num_words, tl.num_programs(0) * tile):
        index = begin + tl.arange(0, tile)
        is_word = index < num_words
        tl.store(peer_ptr + index, tl.load(hidden_ptr + index, mask=is_word), mask=is_word)


@triton_kernel(unspecialized=("number", "num_words"))
def _pull_kernel(
    hidden_ptr,
    local_ptr,
    number,
    num_words,
    arrived: tl.constexpr,
    data: tl.constexpr,
    tile: tl.constexpr,
):
    place = wait_for_number(local_ptr + arrived, number)
    data_ptr = local_ptr + data + place
    for begin in range(tl.program_id(0) * tile, num_words, tl.num_programs(0) * tile):
        index = begin + tl.arange(0, tile)
        is_word = index < num_words
        # from L2, where the other GPU writes
        hidden = tl.load(data_ptr + index, mask=is_word, cache_modifier=".cg")
        tl.store(hidden_ptr + index, hidden, mask=is_word)


@triton_kernel()
def wait_for_number(pointer, number):
    """Wait until the word reaches ``number``. Returns 0, to be added to addresses that must be accessed after it."""
    found = tl.load(pointer, volatile=True)
    while found < number:
        found = tl.load(pointer, volatile=True)
    found = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    return tl.minimum(found - number, 0)


@triton_kernel(unspecialized=("number",))
def _signal_kernel(address_ptr, number, word: tl.constexpr):
    pointer = tl.load(address_ptr).to(tl.pointer_type(tl.int64)) + word
    tl.atomic_xchg(pointer, number.to(tl.int64), sem="release", scope="sys")
