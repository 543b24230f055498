"""Copies of whole KV blocks between the layers' caches and host memory, in the order of the device's work.

Outside the KV cache a block is a row of bytes: the parts of all layers of its group, concatenated in layer order.
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
from fleetfoot.records.kv_layout import BlockPart, KVLayout, slab_of

if TYPE_CHECKING:
    import triton.language as tl

logger = logging.getLogger(__name__)

STAGING_BYTES = 16 << 20
"""GPU memory for each direction: blocks are gathered into it from their parts, and scattered from it."""
_TILE = 2048
"""Words that one program moves."""


# --- rows -----------------------------------------------------------------------------------------------------------


class LayerRows:
    """Gathers blocks of a group into rows, and scatters rows into blocks.

    ``kv_caches``: with `KVLayout.tensor_shapes`; ``parts``: of the group's blocks (`KVLayout.block_parts`).
    ``use_triton``: one kernel launch per batch; False: two torch operations per part. Raises ValueError if a tensor is
    not contiguous.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], parts: Sequence[BlockPart], *, use_triton: bool) -> None:
        for cache in kv_caches:
            if not cache.is_contiguous():
                raise ValueError(f"a KV cache of shape {tuple(cache.shape)} is not contiguous")
        # wide words copy faster; only blocks of odd shapes are no multiple of 8 bytes
        is_wide = all(part.num_bytes % 8 == part.stride % 8 == 0 for part in parts)
        self.word = torch.int64 if is_wide else torch.uint8
        self._parts = [self._blocks(kv_caches[part.tensor], part) for part in parts]
        self._borders = list(accumulate((part.shape[1] for part in self._parts), initial=0))  # of parts in a row
        self.num_words = self._borders[-1]
        self._device = kv_caches[0].device
        self._use_triton = use_triton and is_wide and bool(parts)
        if self._use_triton:
            self._max_words = max(part.shape[1] for part in self._parts)
            places = [[part.data_ptr(), part.stride(0)] for part in self._parts]
            self._places = torch.tensor(places, device=self._device)  # [parts, 2]: address, words between blocks
            self._device_borders = torch.tensor(self._borders, device=self._device)

    def _blocks(self, cache: torch.Tensor, part: BlockPart) -> torch.Tensor:
        """``[num_blocks, words of the part]``"""
        words, size = cache.view(-1).view(self.word), self.word.itemsize
        shape = cache.nbytes // part.stride, part.num_bytes // size
        return words.as_strided(shape, (part.stride // size, 1))

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the blocks ``block_ids`` (``[n]`` int64, on the caches' device) to ``rows`` (``[n, num_words]`` of
        `word`)."""
        self._move(block_ids, rows, is_gather=True)

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Copy rows to blocks, which must be distinct; arguments as in `gather`."""
        self._move(block_ids, rows, is_gather=False)

    def warm_up(self) -> None:
        """Compile the kernel by copying block 0 onto itself: no step or transfer may wait for the compiler."""
        ids = torch.zeros(1, dtype=torch.int64, device=self._device)
        row = torch.empty((1, self.num_words), dtype=self.word, device=self._device)
        self.gather(ids, row)
        self.scatter(row, ids)
        torch.cuda.synchronize(self._device)

    def _move(self, block_ids: torch.Tensor, rows: torch.Tensor, *, is_gather: bool) -> None:
        if self._use_triton:
            grid = (len(block_ids), len(self._parts), cdiv(self._max_words, _TILE))
            _move_kernel[grid](
                self._places, self._device_borders, block_ids, rows, rows.stride(0), is_gather=is_gather, tile=_TILE
            )
            return
        for part, begin, end in zip(self._parts, self._borders[:-1], self._borders[1:], strict=True):
            if is_gather:
                rows[:, begin:end].copy_(part.index_select(0, block_ids))
            else:
                part.index_copy_(0, block_ids, rows[:, begin:end])


@triton_kernel(specialize=False)
def _move_kernel(
    places_ptr, borders_ptr, block_ids_ptr, rows_ptr, row_stride, is_gather: tl.constexpr, tile: tl.constexpr
):
    """One program moves a tile of one part of one block. Every word moves as int64."""
    index, part = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(borders_ptr + part), tl.load(borders_ptr + part + 1)
    block = tl.load(block_ids_ptr + index)
    part_ptr = tl.load(places_ptr + 2 * part).to(tl.pointer_type(tl.int64))
    part_ptr += block * tl.load(places_ptr + 2 * part + 1)
    row = rows_ptr + index.to(tl.int64) * row_stride + begin
    word = tl.program_id(2) * tile + tl.arange(0, tile)
    mask = word < end - begin
    if is_gather:
        tl.store(row + word, tl.load(part_ptr + word, mask=mask), mask=mask)
    else:
        tl.store(part_ptr + word, tl.load(row + word, mask=mask), mask=mask)


class HostMemory:
    """Host memory for blocks, page-locked for asynchronous copies to a GPU: ``num_units`` units of ``unit_bytes``.

    It is page-locked by the driver after allocation: torch's allocator of pinned memory rounds up to a power of two.

    Args:
        slots: of each group of layers, the number of slots in a unit, which are equally far apart, and their bytes.
        asked_by: the settings that determine its size, for error messages.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self, num_units: int, unit_bytes: int, slots: Sequence[tuple[int, int]], *, pinned: bool, asked_by: str
    ) -> None:
        try:  # pages are allocated when first written
            self._array = np.empty((num_units, unit_bytes), dtype=np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than numpy can index
            raise ValueError(
                f"no memory on the host for {num_units:,} KV blocks of {unit_bytes:,} bytes ({error}); lower {asked_by}"
            ) from error
        memory = torch.from_numpy(self._array).view(-1)
        self.slots = [memory.as_strided((num_units * count, size), (unit_bytes // count, 1)) for count, size in slots]
        """``[number of slots, bytes of a block]`` uint8 of each group."""
        self._counts = [count for count, _ in slots]
        self._is_pinned = False
        if pinned and num_units > 0:
            error_code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), self._array.nbytes, 0)
            self._is_pinned = error_code == 0
            if not self._is_pinned:
                logger.warning(
                    "%.1f GiB of host memory for KV blocks could not be page-locked (CUDA error %s): slower copies",
                    self._array.nbytes / (1 << 30),
                    error_code,
                )

    def units(self, group: int, slots: Sequence[int]) -> frozenset[int]:
        """The units that slots lie in."""
        return frozenset(slot // self._counts[group] for slot in slots)

    def row(self, group: int, slot: int) -> memoryview:
        """The bytes of one slot."""
        return memoryview(self.slots[group][slot].numpy().data)

    def close(self) -> None:
        """Release the page lock; the device must not access the memory any more."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._array.ctypes.data)


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
    """Copies blocks of each group of layers to and from slots of host memory. On a CPU a copy has ended when the call
    returns.

    Full blocks are not written while they are allocated, so copies out need no synchronization with steps. Only the
    next owner of a slab (`slab_of`) must wait for them: `fence`.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, use_triton: bool = False) -> None:
        self.block_bytes = layout.group_bytes
        """Bytes of a block of each group."""
        self._groups = layout.groups
        self._rows = [LayerRows(kv_caches, parts, use_triton=use_triton) for parts in layout.block_parts]
        self._chunks = [max(1, STAGING_BYTES // max(1, size)) for size in self.block_bytes]

    @torch.inference_mode()
    def to_host(self, group: int, block_ids: Sequence[int], memory: HostMemory, slots: Sequence[int]) -> CopyEvent:
        """Copy blocks of a group, as written by all work queued so far, to slots of ``memory``."""
        layers = self._rows[group]
        for ids, places in _chunks(block_ids, slots, self._chunks[group]):
            rows = torch.empty((len(ids), layers.num_words), dtype=layers.word)
            layers.gather(torch.tensor(ids), rows)
            memory.slots[group].view(layers.word).index_copy_(0, torch.tensor(places), rows)
        return _Ended()

    @torch.inference_mode()
    def from_host(self, group: int, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        """Copy slots of ``memory`` to blocks of a group that no queued step accesses, after all earlier copies that
        write these slots or read these blocks."""
        layers = self._rows[group]
        for ids, places in _chunks(block_ids, slots, self._chunks[group]):
            rows = memory.slots[group].view(layers.word).index_select(0, torch.tensor(places))
            layers.scatter(rows, torch.tensor(ids))
        return _Ended()

    def fence(self, slabs: Iterable[int]) -> None:
        """Order all work queued from now on after the earlier copies that read blocks of these slabs."""

    def close(self) -> None:
        """Wait for all copies; no others may follow."""


def block_copies(kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool = False) -> BlockCopies:
    """The implementation for the device of ``kv_caches``, which have `KVLayout.tensor_shapes`. ``shares_blocks``: other
    connectors copy the same blocks; copies in then also wait for their fences."""
    if kv_caches[0].device.type == "cpu":
        return BlockCopies(kv_caches, layout)
    return CudaBlockCopies(kv_caches, layout, shares_blocks=shares_blocks)


@dataclass(slots=True)
class _CopyOut:
    """A copy to the host that may not have ended."""

    event: torch.cuda.Event
    slabs: frozenset[int]
    memory: HostMemory
    units: frozenset[int]
    """Units of the host memory."""


class CudaBlockCopies(BlockCopies):
    """Copies on one stream per direction, beside the stream of the steps."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool) -> None:
        super().__init__(kv_caches, layout, use_triton=find_spec("triton") is not None)
        self._device = kv_caches[0].device
        # slabs that change their group are cleared in the order of steps
        self._follows_steps = shares_blocks or len(layout.groups) > 1
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        staging = max(chunk * size for chunk, size in zip(self._chunks, self.block_bytes, strict=True))
        self._staging = torch.empty((2, -(-staging // 16) * 16), dtype=torch.uint8, device=self._device)
        self._copies_out: deque[_CopyOut] = deque()  # in order, the oldest first
        for layers in self._rows:
            layers.warm_up()

    @torch.inference_mode()
    def to_host(self, group: int, block_ids: Sequence[int], memory: HostMemory, slots: Sequence[int]) -> CopyEvent:
        staging, host = self._staged(group, 0), memory.slots[group].view(self._rows[group].word)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for ids, places in _chunks(block_ids, slots, self._chunks[group]):
                self._rows[group].gather(self._indices(ids), staging[: len(ids)])
                for index, slot, count in _runs(places, are_adjacent=host.is_contiguous()):
                    host[slot : slot + count].copy_(staging[index : index + count], non_blocking=True)
            event = self._out.record_event()
        self._copies_out.append(_CopyOut(event, self._slabs(group, block_ids), memory, memory.units(group, slots)))
        return event

    @torch.inference_mode()
    def from_host(self, group: int, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        staging, host = self._staged(group, 1), memory.slots[group].view(self._rows[group].word)
        slabs, units = self._slabs(group, block_ids), memory.units(group, slots)
        for copy in self._unfinished():
            if not copy.slabs.isdisjoint(slabs) or (copy.memory is memory and not copy.units.isdisjoint(units)):
                self._in.wait_event(copy.event)
        if self._follows_steps:
            self._in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._in):
            for ids, places in _chunks(block_ids, slots, self._chunks[group]):
                for index, slot, count in _runs(places, are_adjacent=host.is_contiguous()):
                    staging[index : index + count].copy_(host[slot : slot + count], non_blocking=True)
                self._rows[group].scatter(staging[: len(ids)], self._indices(ids))
            return self._in.record_event()

    def fence(self, slabs: Iterable[int]) -> None:
        fenced = frozenset(slabs)
        for copy in self._unfinished() if fenced else ():
            if not copy.slabs.isdisjoint(fenced):
                torch.cuda.current_stream(self._device).wait_event(copy.event)

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def _staged(self, group: int, direction: int) -> torch.Tensor:
        """``[blocks of a chunk, words of a block]``"""
        layers, chunk = self._rows[group], self._chunks[group]
        words = self._staging[direction].view(layers.word)
        return words[: chunk * layers.num_words].view(chunk, layers.num_words)

    def _slabs(self, group: int, block_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(slab_of(self._groups, group, block_id) for block_id in block_ids)

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


def _runs(slots: Sequence[int], *, are_adjacent: bool) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive ``slots``, each for one copy: (index of the first, its slot, length). ``are_adjacent``:
    nothing lies between slots in memory; else each is a run."""
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1 or not are_adjacent:
            yield begin, slots[begin], index - begin
            begin = index
