"""From one rank of a pipeline to the next through the receiver's memory, which the sender writes: GPUs of one host.

What a library receives, it receives with a kernel that waits, on multiprocessors that the step before then lacks: our
kernels count on all of them. Here the sender's GPU copies a step into the receiver's memory, over NVLink, and says so
there; the receiver's, when it comes to the step, looks whether it was said, takes the copy, and says that back. Both
numbers only grow: of the last step that has arrived, and of the last one that was taken. There is room for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.records.intermediate import IntermediateTensors

if TYPE_CHECKING:
    import triton.language as tl

_ARRIVED, _TAKEN = 0, 8  # words, of which each has 64 bytes to itself
_DATA = 16
_TILE = 1024
_MOST_PROGRAMS = 128


def p2p_channel_words(max_num_tokens: int, hidden_size: int, dtype: torch.dtype) -> int:
    """64-bit words of each rank's memory that `P2PChannel` needs."""
    return _DATA + 2 * (max_num_tokens * hidden_size * dtype.itemsize // 8)


def can_send(hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether hidden states are whole words."""
    return hidden_size * dtype.itemsize % 8 == 0


class P2PChannel:
    """Steps go from rank to rank in order, one `send` for each `receive` of the next rank. The host never waits.

    Args:
        memory: of `p2p_channel_words`, on every rank of the pipeline.
        rank: this one.
    """

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._num_sent = 0
        self._num_received = 0

    def send(self, tensors: IntermediateTensors) -> None:
        """Queue the copy to the next rank; once the device has passed it, the tensors may be written over."""
        hidden, residual = _words(tensors.hidden_states), _words(tensors.residual)
        _push_kernel[(_num_programs(hidden),)](
            hidden,
            residual,
            self._memory.local,
            self._memory.addresses[self._rank + 1],
            self._num_sent,
            hidden.numel(),
            taken=_TAKEN,
            data=_DATA,
            tile=_TILE,
        )
        self._num_sent += 1
        self._say(self._rank + 1, _ARRIVED, self._num_sent)

    def receive(self, tensors: IntermediateTensors) -> None:
        """Queue the copy of what the rank before has sent to ``tensors``, which are of the same shape."""
        hidden, residual = _words(tensors.hidden_states), _words(tensors.residual)
        self._num_received += 1
        _pull_kernel[(_num_programs(hidden),)](
            hidden,
            residual,
            self._memory.local,
            self._num_received,
            hidden.numel(),
            arrived=_ARRIVED,
            data=_DATA,
            tile=_TILE,
        )
        self._say(self._rank - 1, _TAKEN, self._num_received)

    def _say(self, rank: int, word: int, number: int) -> None:
        """Write a number to another rank's memory, behind all that was queued before."""
        _say_kernel[(1,)](self._memory.addresses[rank], number, word=word, num_warps=1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int64)


def _num_programs(words: torch.Tensor) -> int:
    return min(_MOST_PROGRAMS, cdiv(words.numel(), _TILE))


@triton_kernel(unspecialized=("number", "num_words"))
def _push_kernel(
    hidden_ptr,
    residual_ptr,
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
        tl.store(peer_ptr + num_words + index, tl.load(residual_ptr + index, mask=is_word), mask=is_word)


@triton_kernel(unspecialized=("number", "num_words"))
def _pull_kernel(
    hidden_ptr,
    residual_ptr,
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
        # From L2, to which the other GPU writes.
        hidden = tl.load(data_ptr + index, mask=is_word, cache_modifier=".cg")
        residual = tl.load(data_ptr + num_words + index, mask=is_word, cache_modifier=".cg")
        tl.store(hidden_ptr + index, hidden, mask=is_word)
        tl.store(residual_ptr + index, residual, mask=is_word)


@triton_kernel()
def wait_for_number(pointer, number):
    """Until the word has come to ``number``. Returns 0, for addresses of what may only be touched then."""
    found = tl.load(pointer, volatile=True)
    while found < number:
        found = tl.load(pointer, volatile=True)
    found = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    return tl.minimum(found - number, 0)


@triton_kernel(unspecialized=("number",))
def _say_kernel(address_ptr, number, word: tl.constexpr):
    pointer = tl.load(address_ptr).to(tl.pointer_type(tl.int64)) + word
    tl.atomic_xchg(pointer, number.to(tl.int64), sem="release", scope="sys")
