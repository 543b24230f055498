"""Loads from files into KV blocks: read by threads into host memory, checked, copied by the worker."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent
from fleetfoot.kv_transfer.base.counters import TransferCounters
from fleetfoot.kv_transfer.base.host_memory import FreeSlots, HostMemory
from fleetfoot.kv_transfer.base.io_threads import Jobs
from fleetfoot.kv_transfer.blockstore.block_file import BlockFileError
from fleetfoot.kv_transfer.blockstore.block_moves import BlockMove, LoadOrder
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure

WAIT_SECONDS = 0.02
"""How long an idle step waits for progress."""

ReadBlock = Callable[[BlockMove, str, memoryview], None]
"""Reads a block's file of an epoch into memory; raises BlockFileError or OSError."""


@dataclass(slots=True, eq=False)
class _Load:
    """A request's load under way."""

    order: LoadOrder
    epoch: str
    deadline: float
    num_left: int
    """Blocks that have not arrived."""
    num_copying: int = 0
    """Blocks that a queued copy is writing."""
    is_new: bool = True
    """Begun in this very step: a request of its id that has ended is an earlier one."""
    failure: TransferFailure | None = None


@dataclass(slots=True)
class _Read:
    """A block of a load, on its way through a slot of host memory."""

    load: _Load
    move: BlockMove
    slot: int = -1
    error: str = ""


class FileLoads:
    """All loads of a worker. A load ends when each of its blocks has arrived, or at its first failure.

    Everything but the reading itself happens in the worker's thread.

    Args:
        host: memory that files are read into; what finds no slot waits for one.
        timeout: seconds that a load may take. Its blocks are given up then; a read that is still under way ends in
            host memory, and nobody looks at it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        copies: BlockCopies,
        host: HostMemory,
        readers: Jobs,
        read_block: ReadBlock,
        counters: TransferCounters,
        *,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._copies = copies
        self._host = host
        self._free = FreeSlots(host.num_slots)
        self._readers = readers
        self._read_block = read_block
        self._counters = counters
        self._timeout = timeout
        self._clock = clock
        self._loads: list[_Load] = []
        self._waiting: deque[_Read] = deque()
        self._ended_reads: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._copying: deque[tuple[CopyEvent, list[_Read]]] = deque()

    def begin(self, order: LoadOrder, epoch: str) -> None:
        load = _Load(order, epoch, self._clock() + self._timeout, len(order.moves))
        self._loads.append(load)
        self._waiting.extend(_Read(load, move) for move in order.moves)
        self._read_more()

    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        """Go on with everything, and add what has ended to ``output``."""
        now = self._clock()
        for load in self._loads:
            if load.failure is None and load.order.request_id in finished_req_ids and not load.is_new:
                load.failure = TransferFailure("the request has ended before its KV arrived")
            elif load.failure is None and now >= load.deadline:
                load.failure = self._timed_out(load)
            load.is_new = False
        self._take_reads()
        self._take_copies()
        self._read_more()
        for load in [load for load in self._loads if not load.num_copying]:
            if load.failure is not None:
                output.failed[load.order.request_id] = load.failure
                self._counters.add("loads_failed")
            elif load.num_left == 0:
                output.loaded.add(load.order.request_id)
            else:
                continue
            self._loads.remove(load)

    def wait(self) -> None:
        """Return when something may have ended, or after `WAIT_SECONDS`; at once if nothing is under way."""
        if self._copying:
            self._copying[0][0].synchronize()
        elif self._loads:
            with contextlib.suppress(queue.Empty):
                self._copy([self._ended_reads.get(timeout=WAIT_SECONDS)])

    def _read_more(self) -> None:
        """Begin as many reads as there are slots."""
        while self._waiting and len(self._free):
            read = self._waiting.popleft()
            if read.load.failure is None:
                read.slot = self._free.take()
                self._readers.submit(partial(self._run, read))

    def _run(self, read: _Read) -> None:
        """In a thread: nothing but the slot is touched."""
        try:
            self._read_block(read.move, read.load.epoch, self._host.row(read.slot))
        except BlockFileError as error:
            read.error = str(error)
        except Exception as error:  # whatever it is, somebody waits for this read's end
            read.error = f"it cannot be read ({type(error).__name__}: {error})"
        self._ended_reads.put(read)

    def _take_reads(self) -> None:
        reads = []
        while True:
            try:
                reads.append(self._ended_reads.get_nowait())
            except queue.Empty:
                break
        self._copy(reads)

    def _copy(self, reads: list[_Read]) -> None:
        """Begin to copy what was read well, and let the loads of the rest fail."""
        arrived = []
        for read in reads:
            if read.error and read.load.failure is None:
                digest = read.move.digest
                read.load.failure = TransferFailure(f"KV block {digest.hex()}: {read.error}", block=digest)
            if read.load.failure is None:
                arrived.append(read)
                read.load.num_copying += 1
            else:
                self._free.give_back(read.slot)
        if arrived:
            slots, block_ids = [read.slot for read in arrived], [read.move.block_id for read in arrived]
            self._copying.append((self._copies.from_host(self._host.tensor, slots, block_ids), arrived))

    def _take_copies(self) -> None:
        while self._copying and self._copying[0][0].query():
            _, reads = self._copying.popleft()
            for read in reads:
                self._free.give_back(read.slot)
                read.load.num_copying -= 1
                read.load.num_left -= 1
            self._counters.add("blocks_loaded", len(reads))
            self._counters.add("bytes_loaded", len(reads) * self._copies.bytes_per_block)

    def _timed_out(self, load: _Load) -> TransferFailure:
        return TransferFailure(
            f"{load.num_left} of {len(load.order.moves)} KV blocks had not been read after {self._timeout:g} s "
            "(kv_transfer_timeout)",
            timed_out=True,
        )
