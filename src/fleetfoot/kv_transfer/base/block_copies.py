"""Copies of whole KV blocks between the layers' caches and host memory, in the order of the device's work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from fleetfoot.kv_transfer.base.layer_rows import LayerRows
from fleetfoot.records.kv_layout import KVLayout

STAGING_BYTES = 16 << 20
"""Of GPU memory in each direction, through which blocks pass: gathered there from all layers, and scattered from
there."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it has come; does not wait."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread, which may be any, until it has come."""
        ...


class BlockCopies(ABC):
    """Moves blocks of all layers at once. In host memory a block lies in a row, its layers' pieces in order.

    Full blocks are not written to while their request has them, so what is being copied out stays as it is without
    anybody waiting. Only who gets such a block next must wait, and says so: `fence`.

    Attributes:
        bytes_per_block: of a row.
    """

    bytes_per_block: int

    @abstractmethod
    def to_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]) -> CopyEvent:
        """Begin to copy blocks to rows of ``host`` (uint8 ``[num_slots, bytes_per_block]``), as they are behind all
        that is queued so far."""

    @abstractmethod
    def from_host(self, host: torch.Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        """Begin to copy rows of ``host`` to blocks which no queued step touches, behind all copies begun so far that
        write these rows or read these blocks."""

    @abstractmethod
    def fence(self, block_ids: Iterable[int]) -> None:
        """What is queued for the device from now on comes after all copies begun so far that read these blocks."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies; there will be no more."""


def block_copies(kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool = False) -> BlockCopies:
    """Those for the device that the caches are on.

    Args:
        kv_caches: a layer each, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        shares_blocks: others copy as well; what comes in also waits for the fences that they have put up.
    """
    if kv_caches[0].device.type == "cpu":
        return CpuBlockCopies(kv_caches, layout)
    return CudaBlockCopies(kv_caches, layout, shares_blocks=shares_blocks)


class CpuBlockCopies(BlockCopies):
    """Where the host computes itself, copies have ended when the calls return."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.bytes_per_block = layout.bytes_per_block
        self._rows = LayerRows(kv_caches, layout, use_triton=False)
        self._chunk = max(1, STAGING_BYTES // layout.bytes_per_block)

    @torch.inference_mode()
    def to_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]) -> CopyEvent:
        for ids, places in _chunks(block_ids, slots, self._chunk):
            rows = torch.empty((len(ids), self._rows.num_words), dtype=self._rows.word)
            self._rows.gather(torch.tensor(ids), rows)
            host.view(self._rows.word).index_copy_(0, torch.tensor(places), rows)
        return _ENDED

    @torch.inference_mode()
    def from_host(self, host: torch.Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        for ids, places in _chunks(block_ids, slots, self._chunk):
            rows = host.view(self._rows.word).index_select(0, torch.tensor(places))
            self._rows.scatter(rows, torch.tensor(ids))
        return _ENDED

    def fence(self, block_ids: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _CopyOut:
    """A copy to the host that may not have ended."""

    event: torch.cuda.Event
    block_ids: frozenset[int]
    slots: frozenset[int]
    memory: int
    """Address of the host memory that the slots are of."""


class CudaBlockCopies(BlockCopies):
    """A stream for each direction, beside the one of the steps."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, shares_blocks: bool) -> None:
        self.bytes_per_block = layout.bytes_per_block
        self._device = kv_caches[0].device
        self._shares_blocks = shares_blocks
        self._rows = LayerRows(kv_caches, layout, use_triton=find_spec("triton") is not None)
        self._chunk = max(1, STAGING_BYTES // layout.bytes_per_block)
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._staging_out, self._staging_in = (
            torch.empty((self._chunk, self._rows.num_words), dtype=self._rows.word, device=self._device)
            for _ in range(2)
        )
        self._going_out: deque[_CopyOut] = deque()  # in order, the oldest first
        self._warm_up()

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
        self._going_out.append(_CopyOut(event, frozenset(block_ids), frozenset(slots), host.data_ptr()))
        return event

    @torch.inference_mode()
    def from_host(self, host: torch.Tensor, slots: Sequence[int], block_ids: Sequence[int]) -> CopyEvent:
        rows = host.view(self._rows.word)
        for copy in self._under_way():
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
        wanted = frozenset(block_ids)
        for copy in self._under_way() if wanted else ():
            if not copy.block_ids.isdisjoint(wanted):
                torch.cuda.current_stream(self._device).wait_event(copy.event)

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def _under_way(self) -> Iterable[_CopyOut]:
        while self._going_out and self._going_out[0].event.query():
            self._going_out.popleft()
        return self._going_out

    def _indices(self, block_ids: list[int]) -> torch.Tensor:
        return torch.tensor(block_ids, pin_memory=True).to(self._device, non_blocking=True)

    def _warm_up(self) -> None:
        """Compile what moves blocks: no step is to meet a compiler. A block is replaced by itself."""
        ids = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._rows.gather(ids, self._staging_in[:1])
        self._rows.scatter(self._staging_in[:1], ids)
        torch.cuda.synchronize(self._device)


class _Ended:
    """The event of a copy that has ended already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_ENDED = _Ended()


def _chunks(block_ids: Sequence[int], slots: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs in the order of their slots, ``size`` at a time: neighbours in host memory move together."""
    pairs = sorted(zip(slots, block_ids, strict=True))
    for begin in range(0, len(pairs), size):
        chunk = pairs[begin : begin + size]
        yield [block for _, block in chunk], [slot for slot, _ in chunk]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours among ``slots``, which one copy can move: (index of the first, its slot, how many)."""
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield begin, slots[begin], index - begin
            begin = index
