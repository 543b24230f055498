"""Transports through the memory of peers, for the GPUs of one host: the custom all-reduce, and the P2P channel.

`share_memory` maps a buffer of each GPU of a group into the address space of every rank. Kernels write to the buffers
of other ranks, and wait for what other ranks write to their own.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fleetfoot.config import env
from fleetfoot.distributed import ALL_REDUCE_ROWS, all_reduce_words
from fleetfoot.kernels.linear.rank_sums import RankSums, rank_sum_words
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel
from fleetfoot.records.forward_context import IntermediateTensors

if TYPE_CHECKING:
    import triton.language as tl

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

    def of_rank(self, rank: int) -> torch.Tensor:
        """The whole buffer of a rank, ``[num_words]`` int64, to be read and written by kernels."""
        place = (self.local.data_ptr() - self.keep.buffer_ptrs[self.keep.rank]) // 8
        buffer: torch.Tensor = self.keep.get_buffer(rank, (self.local.numel(),), torch.int64, place)
        return buffer

    def split(self, num_words: int) -> tuple[PeerMemory, PeerMemory]:
        """The first ``num_words`` of each buffer, and the others."""
        first, others = self.local[:num_words], self.local[num_words:]
        return replace(self, local=first), replace(self, local=others, addresses=self.addresses + num_words * 8)


def share_memory(
    group: dist.ProcessGroup, on_host: dist.ProcessGroup, num_words: int, device: torch.device, instead: str
) -> PeerMemory | None:
    """Allocate a buffer of int64 words on every rank of an NCCL group. A collective call, which does not use NCCL.

    Returns None on every rank, with a warning, if some rank cannot map the memory. ``on_host``: a group of gloo with
    the same ranks; ``instead``: for the warning: what uses NCCL then.
    """
    try:
        name = torch.tensor(list(hashlib.sha256(socket.gethostname().encode()).digest()), dtype=torch.uint8)
        names = [torch.empty_like(name) for _ in range(dist.get_world_size(group))]
        dist.all_gather(names, name, group=on_host)
        memory = _rendezvous(group, num_words, device) if all(each.equal(name) for each in names) else None
        reason = "its ranks are on different hosts"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        memory, reason = None, str(error)
    # also a barrier: all buffers are zeroed before any rank writes to one
    has_it = torch.tensor([memory is not None], dtype=torch.int32)
    dist.all_reduce(has_it, op=dist.ReduceOp.MIN, group=on_host)
    if has_it.item():
        return memory
    logger.warning(
        "the GPUs of a group cannot access each other's memory (%s): %s NCCL, which is slower",
        reason if memory is None else "on another rank",
        instead,
    )
    return None


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


# --- custom all-reduce ----------------------------------------------------------------------------------------------

_MAX_TILE = 16384


def can_all_reduce(hidden_size: int, dtype: torch.dtype) -> bool:
    """Whether such rows consist of whole words and fit in one program."""
    return hidden_size * dtype.itemsize % 4 == 0 and hidden_size <= _MAX_TILE and dtype.itemsize in (2, 4)


def most_rows(device: torch.device) -> int:
    """Most rows of `CustomAllReduce`. The programs, one for each row, run at the same time, and a wide one may take a
    whole multiprocessor."""
    return min(ALL_REDUCE_ROWS, gpu_limits(device).num_sms) if device.type == "cuda" else ALL_REDUCE_ROWS


class CustomAllReduce:
    """Sums of ``[n, size]`` over the ranks of a tensor group in one kernel, for the few rows of a decode step;
    optionally with add and norm. ``n`` is at most `most_rows`, and ``size`` at most ``hidden_size``.

    Every rank writes its rows to the memory of every rank, waits for the other ranks' rows in its own memory, and adds
    them in rank order, so that all ranks get the same bits. A 64-bit word carries 32 bits of values and, in its upper
    half, the number of the call. Words are written and read atomically, so the upper half shows that the values have
    arrived, and no flags or fences are needed (as in NCCL's "LL" protocol).

    The number of a call is kept on the device for each row, so that graphs can replay the kernel. Ranks make the same
    calls in the same order. A rank is at most one call ahead of another, because it has waited for that rank's words of
    the previous call. Two alternating sets of words are therefore enough, and nothing is ever cleared.

    ``memory``: `fleetfoot.distributed.peer_memory_words` words on every rank, without those for gathers; ``rank``,
    ``num_ranks``: of the tensor group; ``hidden_size``: of the widest model of the group; ``dtype``, ``device``: of the
    rows.
    """

    rank_sums: RankSums | None = None
    """The memory for sums within linear layers, of other words; None: these have another dtype."""

    def __init__(
        self, memory: PeerMemory, rank: int, num_ranks: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._memory, others = memory.split(all_reduce_words(num_ranks, hidden_size * dtype.itemsize))
        if dtype is torch.bfloat16:  # that of deferred norms
            num_calls = torch.zeros(hidden_size, dtype=torch.int32, device=device)
            words = others.local[: rank_sum_words(num_ranks, hidden_size)]
            self.rank_sums = RankSums(words, others.addresses, num_calls, rank)
        self._rank = rank
        self._num_ranks = num_ranks
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._max_rows = most_rows(device)
        self._num_calls = torch.zeros(ALL_REDUCE_ROWS, dtype=torch.int32, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether ``x`` has a supported shape and dtype."""
        if x.ndim != 2 or x.dtype is not self._dtype or not 0 < x.shape[0] <= self._max_rows:
            return False
        return 0 < x.shape[1] <= self._hidden_size and can_all_reduce(x.shape[1], self._dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x [n, size]`` over the ranks, computed in float32 and rounded once."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._launch(output, output, x, output, output, 0.0, num_parts=0, has_norm=False)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`Kernels.add_rms_norm` of the sum of ``x``, with the roundings of the separate operations: of each rank's
        ``x`` (possibly several partial sums), of their sum, and of its sum with the residual."""
        x, residual = x.contiguous(), residual.contiguous()
        output, total = torch.empty_like(residual), torch.empty_like(residual)
        num_parts = x.shape[0] if x.ndim > residual.ndim else 0
        self._launch(output, total, x, residual, weight, eps, num_parts=num_parts, has_norm=True)
        return output, total

    def _launch(self, output: torch.Tensor, *inputs: Any, num_parts: int, has_norm: bool) -> None:
        num_rows, size = output.shape
        tile = next_power_of_2(size)
        overlap = can_overlap(output.device)
        _all_reduce_kernel[(num_rows,)](
            output, *inputs, num_rows, size, self._memory.local, self._memory.addresses, self._num_calls, self._rank,
            row_words=self._hidden_size * self._dtype.itemsize // 4, num_ranks=self._num_ranks, num_parts=num_parts,
            has_norm=has_norm, is_wide=self._dtype.itemsize == 4, max_rows=ALL_REDUCE_ROWS, tile=tile,
            overlap=overlap, num_warps=min(16, max(4, tile // 512)), **launch_options(overlap),
        )  # fmt: skip


@triton_kernel(unspecialized=("num_rows", "rank"))
def _all_reduce_kernel(
    output_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, eps, num_rows, size,
    local_ptr, addresses_ptr, num_calls_ptr, rank,
    row_words: tl.constexpr, num_ranks: tl.constexpr, num_parts: tl.constexpr, has_norm: tl.constexpr,
    is_wide: tl.constexpr, max_rows: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    per_word: tl.constexpr = 1 if is_wide else 2
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, tile)
    in_row = column < size
    word_index = tl.arange(0, tile // per_word)
    num_words = size // per_word
    if has_norm:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)  # [tile], like all below
    peers = ()
    for step in tl.static_range(num_ranks):
        # each rank starts with another peer, so that they do not all write to the same GPU at the same time
        address = tl.load(addresses_ptr + (rank + 1 + step) % num_ranks)
        peers += (tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16),)  # type: ignore[assignment]
    wait_for_inputs(overlap)

    offset = row * size + column
    value = tl.load(x_ptr + offset, mask=in_row, other=0.0)
    for part in tl.static_range(1, num_parts):
        value += tl.load(x_ptr + part * num_rows.to(tl.int64) * size + offset, mask=in_row, other=0.0)
    if has_norm:
        residual = tl.load(residual_ptr + offset, mask=in_row, other=0.0)
    call = tl.load(num_calls_ptr + row) + 1
    stamp = call.to(tl.uint32, bitcast=True).to(tl.uint64)
    words = pack_words(value.to(dtype), is_wide, tile) | (stamp << 32)  # [tile // per_word]
    # layout of the words: [set, rank, row, word]
    first = (call & 1).to(tl.int64) * num_ranks * max_rows + row
    own_offset = (first + rank.to(tl.int64) * max_rows) * row_words + word_index
    for step in tl.static_range(num_ranks):
        tl.store(peers[step] + own_offset, words, mask=word_index < num_words)

    from_ptr = local_ptr.to(tl.pointer_type(tl.uint64)) + first * row_words + word_index
    arrived = ()
    for peer in tl.static_range(num_ranks):  # load all at once: most have arrived when the slowest has
        words = tl.load(from_ptr + peer * max_rows * row_words, mask=word_index < num_words, volatile=True)
        arrived += (words,)  # type: ignore[assignment]
    total = tl.zeros((tile,), tl.float32)
    for peer in tl.static_range(num_ranks):
        words = arrived[peer]
        while tl.max(((words >> 32 != stamp) & (word_index < num_words)).to(tl.int32), axis=0) > 0:
            words = tl.load(from_ptr + peer * max_rows * row_words, mask=word_index < num_words, volatile=True)
        total += unpack_words(words, dtype, is_wide, tile).to(tl.float32)
    tl.store(num_calls_ptr + row, call)

    value = total.to(dtype)
    if has_norm:
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + offset, value, mask=in_row)
        wide = tl.where(in_row, value.to(tl.float32), 0.0)
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / size + eps)
        value = (wide * inverse_rms * weight).to(dtype)
    tl.store(output_ptr + offset, value, mask=in_row)


@triton_kernel()
def pack_words(values, is_wide: tl.constexpr, tile: tl.constexpr):
    """Pack ``values [tile]`` into the lower halves of words: one 32-bit value, or two adjacent 16-bit values each."""
    if is_wide:
        packed = values.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        first, second = tl.split(tl.reshape(values.to(tl.uint16, bitcast=True), (tile // 2, 2)))
        packed = first.to(tl.uint64) | (second.to(tl.uint64) << 16)
    return packed


@triton_kernel()
def unpack_words(words, dtype: tl.constexpr, is_wide: tl.constexpr, tile: tl.constexpr):
    """The inverse of `pack_words`."""
    if is_wide:
        bits = words.to(tl.uint32)
    else:
        bits = tl.reshape(tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16)), (tile,))
    return bits.to(dtype, bitcast=True)


# --- P2P channel ----------------------------------------------------------------------------------------------------

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


def make_channel(
    group: dist.ProcessGroup,
    on_host: dist.ProcessGroup,
    max_num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> P2PChannel | None:
    """The channel of an NCCL group, if it supports such rows and memory can be shared. A collective call. ``on_host``:
    a group of gloo with the same ranks."""
    if not can_send(hidden_size, dtype):
        return None
    num_words = p2p_channel_words(max_num_tokens, hidden_size, dtype)
    memory = share_memory(group, on_host, num_words, device, "what a pipeline passes on takes")
    return None if memory is None else P2PChannel(memory, dist.get_rank(group))


class P2PChannel:
    """Sends steps from pipeline rank to rank in order, one `send` for each `receive` of the next rank. The host never
    waits.

    An NCCL receive is a kernel that waits, and occupies multiprocessors that the previous step's kernels count on. Here
    the sender's GPU copies a step into the receiver's memory over NVLink and then writes the step's number there. When
    the receiver's GPU reaches the step, it waits for that number, copies the data, and writes the number back to the
    sender. Both numbers only increase. There is room for one step. ``memory``: `p2p_channel_words` words on every rank
    of the pipeline; ``rank``: of this worker.
    """

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._num_sent = 0
        self._num_received = 0

    def send(self, tensors: IntermediateTensors) -> None:
        """Queue the copy to the next rank. Work queued later may overwrite the tensors."""
        peer = self._memory.addresses[self._rank + 1]
        self._copy(_push_kernel, tensors, self._memory.local, peer, self._num_sent, taken=_TAKEN)
        self._num_sent += 1
        self._signal(self._rank + 1, _ARRIVED, self._num_sent)

    def receive(self, tensors: IntermediateTensors) -> None:
        """Queue the copy of the previous rank's step into ``tensors``, which have its shape."""
        self._num_received += 1
        self._copy(_pull_kernel, tensors, self._memory.local, self._num_received, arrived=_ARRIVED)
        self._signal(self._rank - 1, _TAKEN, self._num_received)

    def _copy(self, kernel: Any, tensors: IntermediateTensors, *arguments: Any, **word: int) -> None:
        words = tensors.hidden_states.view(-1).view(torch.int64)
        num_words = words.numel()
        grid = (min(_MOST_PROGRAMS, cdiv(num_words, _TILE)),)
        kernel[grid](words, *arguments, num_words, **word, data=_DATA, tile=_TILE)

    def _signal(self, rank: int, word: int, number: int) -> None:
        """Write a number to another rank's memory, after all work queued before."""
        _signal_kernel[(1,)](self._memory.addresses[rank], number, word=word, num_warps=1)


@triton_kernel(unspecialized=("number", "num_words"))
def _push_kernel(
    hidden_ptr, local_ptr, address_ptr, number, num_words, taken: tl.constexpr, data: tl.constexpr, tile: tl.constexpr
):
    place = wait_for_number(local_ptr + taken, number)
    peer_ptr = tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(tl.int64)), 16) + data + place
    for begin in range(tl.program_id(0) * tile, num_words, tl.num_programs(0) * tile):
        index = begin + tl.arange(0, tile)
        is_word = index < num_words
        tl.store(peer_ptr + index, tl.load(hidden_ptr + index, mask=is_word), mask=is_word)


@triton_kernel(unspecialized=("number", "num_words"))
def _pull_kernel(
    hidden_ptr, local_ptr, number, num_words, arrived: tl.constexpr, data: tl.constexpr, tile: tl.constexpr
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
