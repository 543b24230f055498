"""Copies of whole KV blocks between the layers' caches and host memory, in the order of the device's work.

Outside the KV cache a block is a row of bytes: the blocks of all layers, concatenated in layer order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.records.kv_layout import KVLayout

if TYPE_CHECKING:
    import triton.language as tl

logger = logging.getLogger(__name__)

STAGING_BYTES = 16 << 20
"""GPU memory for each direction: blocks are gathered into it from all layers, and scattered from it."""
_TILE = 2048
"""Words that one program moves."""


# --- rows -----------------------------------------------------------------------------------------------------------


class LayerRows:
    """Gathers blocks of all layers into rows, and scatters rows into blocks.

    ``kv_caches``: with `KVLayout.tensor_shapes` and blocks first: one of all layers, or one per layer. ``use_triton``:
    one kernel launch per batch; False: two torch operations per tensor. Raises ValueError if one is not contiguous.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, use_triton: bool) -> None:
        for cache in kv_caches:
            if not cache.is_contiguous():
                raise ValueError(f"a KV cache of shape {tuple(cache.shape)} is not contiguous")
        # wide words copy faster; only blocks of odd shapes are no multiple of 8 bytes
        is_wide = all(num_bytes % 8 == 0 for num_bytes in layout.part_bytes)
        self.word = torch.int64 if is_wide else torch.uint8
        # [num_blocks, words of the layer's block] each
        self._layers = [cache.view(cache.shape[0], -1).view(self.word) for cache in kv_caches]
        self._borders = list(accumulate((layer.shape[1] for layer in self._layers), initial=0))  # of layers in a row
        self.num_words = self._borders[-1]
        self._use_triton = use_triton and self.word is torch.int64
        if self._use_triton:
            device = kv_caches[0].device
            self._max_words = max(layer.shape[1] for layer in self._layers)
            self._pointers = torch.tensor([layer.data_ptr() for layer in self._layers], device=device)
            self._device_borders = torch.tensor(self._borders, device=device)

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the blocks ``block_ids`` (``[n]`` int64, on the caches' device) to ``rows`` (``[n, num_words]`` of
        `word`)."""
        self._move(block_ids, rows, is_gather=True)

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Copy rows to blocks, which must be distinct; arguments as in `gather`."""
        self._move(block_ids, rows, is_gather=False)

    def warm_up(self) -> None:
        """Compile the kernel by copying block 0 onto itself: no step or transfer may wait for the compiler."""
        device = self._layers[0].device
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        row = torch.empty((1, self.num_words), dtype=self.word, device=device)
        self.gather(ids, row)
        self.scatter(row, ids)
        torch.cuda.synchronize(device)

    def _move(self, block_ids: torch.Tensor, rows: torch.Tensor, *, is_gather: bool) -> None:
        if self._use_triton:
            grid = (len(block_ids), len(self._layers), cdiv(self._max_words, _TILE))
            _move_kernel[grid](
                self._pointers, self._device_borders, block_ids, rows, rows.stride(0), is_gather=is_gather, tile=_TILE
            )
            return
        for layer, begin, end in zip(self._layers, self._borders[:-1], self._borders[1:], strict=True):
            if is_gather:
                rows[:, begin:end].copy_(layer.index_select(0, block_ids))
            else:
                layer.index_copy_(0, block_ids, rows[:, begin:end])


@triton_kernel(specialize=False)
def _move_kernel(
    pointers_ptr, borders_ptr, block_ids_ptr, rows_ptr, row_stride, is_gather: tl.constexpr, tile: tl.constexpr
):
    """One program moves a tile of one layer's part of one block. Every word moves as int64."""
    index, layer = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(borders_ptr + layer), tl.load(borders_ptr + layer + 1)
    block = tl.load(block_ids_ptr + index)
    part = tl.load(pointers_ptr + layer).to(tl.pointer_type(tl.int64)) + block * (end - begin)
    row = rows_ptr + index.to(tl.int64) * row_stride + begin
    word = tl.program_id(2) * tile + tl.arange(0, tile)
    mask = word < end - begin
    if is_gather:
        tl.store(row + word, tl.load(part + word, mask=mask), mask=mask)
    else:
        tl.store(part + word, tl.load(row + word, mask=mask), mask=mask)


class HostMemory:
    """Host memory of ``num_slots`` rows of ``slot_bytes`` bytes, page-locked for asynchronous copies to a GPU.

    It is page-locked by the driver after allocation: torch's allocator of pinned memory rounds up to a power of two.
    ``asked_by``: the settings that determine its size, for error messages. Raises ValueError if there is not enough
    memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool, asked_by: str) -> None:
        try:
            self._array = np.empty((num_slots, slot_bytes), dtype=np.uint8)  # pages are allocated when first written
        except (MemoryError, ValueError) as error:  # ValueError: more than numpy can index
            raise ValueError(
                f"no memory on the host for {num_slots:,} KV blocks of {slot_bytes:,} bytes ({error}); lower {asked_by}"
            ) from error
        self.tensor = torch.from_numpy(self._array)  # [num_slots, slot_bytes]
        self._is_pinned = False
        if pinned and num_slots > 0:
            error_code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self._array.nbytes, 0)
            self._is_pinned = error_code == 0
            if not self._is_pinned:
                logger.warning(
                    "%.1f GiB of host memory for KV blocks could not be page-locked (CUDA error %s): slower copies",
                    self._array.nbytes / (1 << 30),
                    error_code,
                )

    def row(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return memoryview(self._array[slot])

    def close(self) -> None:
        """Release the page lock; the device must not access the memory any more."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


# --- copies ---------------------------------------------------------------------------------------------------------


class CopyEvent(Protocol):
    """The end of a copy. The methods here are those of a copy that has ended."""

    def query(self) -> bool:
        """Whether the copy has ended; does not wait."""
        return True

    def synchronize(self) -> None:
        """Block the calling thread, which may be any, until the copy has ended."""
        return


class _Ended(CopyEvent):
    """A copy that has ended."""


class BlockCopies:
    """Copies blocks of all layers to and from rows of host memory. On a CPU a copy has ended when the call returns.

    Full blocks are not written while they are allocated, so copies out need no synchronization with steps. Only the
    next owner of a block must wait for them: `fence`.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, use_triton: bool = False) -> None:
        self.bytes_per_block = layout.bytes_per_block  # of a row
        self._rows = LayerRows(kv_caches, layout, use_triton=use_triton)
        self._chunk = max(1, STAGING_BYTES // layout.bytes_per_block)

    @torch.inference_mode()
    def to_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]) -> CopyEvent:
        """Copy blocks, as written by all work queued so far, to rows of ``host`` (uint8 ``[num_slots,
        bytes_per_block]``)."""
        for ids, places in _chunks(block_ids, slots, self._chunk):
            rows = torch.empty((len(ids), self._rows.num_words), dtype=self._rows.word)
            self._rows.gather(torch.tensor(ids), rows)
            host.view(self._rows.word).index_copy_(0, torch.tensor(places), rows)
        return _Ended()

    @torch.inference_mode()
    def from_host(self, host: torch.Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        """Copy rows of ``host`` to blocks that no queued step accesses, after all earlier copies that write these rows
        or read these blocks."""
        for ids, places in _chunks(block_ids, slots, self._chunk):
            rows = host.view(self._rows.word).index_select(0, torch.tensor(places))
            self._rows.scatter(rows, torch.tensor(ids))
        return _Ended()

    def fence(self, block_ids: Iterable[int]) -> None:
        """Order all work queued from now on after the earlier copies that read these blocks."""

    def close(self) -> None:
        """Wait for all copies; no others may follow."""


def block_copies(kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool = False) -> BlockCopies:
    """The implementation for the device of ``kv_caches``, as for `LayerRows`. ``shares_blocks``: other connectors copy
    the same blocks; copies in then also wait for their fences."""
    if kv_caches[0].device.type == "cpu":
        return BlockCopies(kv_caches, layout)
    return CudaBlockCopies(kv_caches, layout, shares_blocks=shares_blocks)


@dataclass(slots=True)
class _CopyOut:
    """A copy to the host that may not have ended."""

    event: torch.cuda.Event
    block_ids: frozenset[int]
    slots: frozenset[int]
    memory: int
    """Address of the host memory of the slots."""


class CudaBlockCopies(BlockCopies):
    """Copies on one stream per direction, beside the stream of the steps."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool) -> None:
        super().__init__(kv_caches, layout, use_triton=find_spec("triton") is not None)
        self._device = kv_caches[0].device
        self._shares_blocks = shares_blocks
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        shape = 2, self._chunk, self._rows.num_words
        self._staging_out, self._staging_in = torch.empty(shape, dtype=self._rows.word, device=self._device)
        self._copies_out: deque[_CopyOut] = deque()  # in order, the oldest first
        self._rows.warm_up()

    @torch.inference_mode()
    def to_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]) -> CopyEvent:
        rows = host.view(self._rows.word)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for ids, places in _chunks(block_ids, slots, self._chunk):
                self._rows.gather(self._indices(ids), self._staging_out[: len(ids)])
                for index, slot, count in _runs(places):
                    rows[slot : slot + count].copy_(self._staging_out[index : index + count], non_blocking=True)
            event = self._out.record_event()
        self._copies_out.append(_CopyOut(event, frozenset(block_ids), frozenset(slots), host.data_ptr()))
        return event

    @torch.inference_mode()
    def from_host(self, host: torch.Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        rows = host.view(self._rows.word)
        for copy in self._unfinished():
            is_same_memory = copy.memory == host.data_ptr()
            if not copy.block_ids.isdisjoint(block_ids) or (is_same_memory and not copy.slots.isdisjoint(slots)):
                self._in.wait_event(copy.event)
        if self._shares_blocks:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._in):
            for ids, places in _chunks(block_ids, slots, self._chunk):
                for index, slot, count in _runs(places):
                    self._staging_in[index : index + count].copy_(rows[slot : slot + count], non_blocking=True)
                self._rows.scatter(self._staging_in[: len(ids)], self._indices(ids))
            return self._in.record_event()

    def fence(self, block_ids: Iterable[int]) -> None:
        fenced = frozenset(block_ids)
        for copy in self._unfinished() if fenced else ():
            if not copy.block_ids.isdisjoint(fenced):
                torch.cuda.current_stream(self._device).wait_event(copy.event)

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def _unfinished(self) -> Iterable[_CopyOut]:
        while self._copies_out and self._copies_out[0].event.query():
            self._copies_out.popleft()
        return self._copies_out

    def _indices(self, block_ids: list[int]) -> torch.Tensor:
        return torch.tensor(block_ids, pin_memory=True).to(self._device, non_blocking=True)


def _chunks(block_ids: Sequence[int], slots: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs in the order of their slots, ``size`` at a time, so that adjacent slots are copied together."""
    pairs = sorted(zip(slots, block_ids, strict=True))
    for begin in range(0, len(pairs), size):
        chunk = pairs[begin : begin + size]
        yield [block for _, block in chunk], [slot for slot, _ in chunk]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of adjacent ``slots``, each for one copy: (index of the first, its slot, length)."""
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield begin, slots[begin], index - begin
            begin = index
