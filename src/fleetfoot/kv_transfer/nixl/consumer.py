"""The consumer's end of a transfer: the loads of a worker, and the buffers that they read into.

KV arrives in receive buffers and is copied from there into KV blocks, so a read that is late or corrupt never touches a
block. A read that was given up cannot always be stopped; its buffer is not reused before it has ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from fleetfoot.kv_transfer.base.block_copies import LayerRows
from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters
from fleetfoot.kv_transfer.base.io_threads import IOThreads, drain
from fleetfoot.kv_transfer.base.offers import Offer
from fleetfoot.kv_transfer.nixl import side_channel
from fleetfoot.kv_transfer.nixl.params import RENEW_SECONDS, LoadSpec
from fleetfoot.kv_transfer.nixl.side_channel import Accepted, Acquire, Decline, Finish, Granted, RefusedError, Renew
from fleetfoot.kv_transfer.nixl.transfer_agent import Transfer, TransferAgent, TransferError
from fleetfoot.records.kv_layout import ALIGNMENT, KVLayout
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.sockets import StoppedError, connect

logger = logging.getLogger(__name__)

_READ_POLL_SECONDS = 0.02
_BUFFER_POLL_SECONDS = 0.05


class ReceiveBuffers:
    """A buffer for each concurrent load of a worker, uint8 ``[num_bytes]``. Blocks of one group at a time lie in it one
    after the other; a block is the parts of all layers of the group, concatenated.

    Args:
        num_bytes: of all buffers together; each has room for one block at least.
        device: of the memory.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, num_loads: int, num_bytes: int, device: torch.device
    ) -> None:
        self._device = kv_caches[0].device
        self.block_bytes = layout.group_bytes
        """Bytes of a block of each group."""
        self.blocks_per_slab = [group.blocks_per_slab if len(layout.groups) > 1 else 1 for group in layout.groups]
        self._parts = layout.block_parts
        self._rows = [LayerRows(kv_caches, parts, use_triton=self._device.type != "cpu") for parts in self._parts]
        largest = max(self.block_bytes)
        shape = num_loads, -(-max(num_bytes // num_loads, largest) // ALIGNMENT) * ALIGNMENT
        try:
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise ValueError(
                f"no memory on {device} for {num_loads} concurrent loads of {shape[1] // largest:,} KV blocks of "
                f"{largest:,} bytes each ({error}); lower buffer_bytes or num_threads"
            ) from error
        self._stream = None
        if self._device.type != "cpu":
            self._stream = torch.cuda.Stream(self._device)
            for rows in self._rows:
                rows.warm_up()
        self._changed = threading.Condition()
        self._free = list(self.memory)
        self._blocked: list[tuple[torch.Tensor, Transfer | None]] = []

    def acquire(self, should_stop: Callable[[], bool]) -> torch.Tensor:
        """A free buffer; raises StoppedError if ``should_stop`` returns True before there is one."""
        with self._changed:
            while True:
                blocked, self._blocked = self._blocked, []
                for buffer, transfer in blocked:
                    self._put_back(buffer, transfer)
                if self._free:
                    return self._free.pop()
                if should_stop():
                    raise StoppedError("all receive buffers are in use by other loads")
                self._changed.wait(_BUFFER_POLL_SECONDS)

    def release(self, buffer: torch.Tensor, transfer: Transfer | None) -> None:
        """``transfer``: a read into the buffer that may not have ended."""
        with self._changed:
            if not self._put_back(buffer, transfer):
                logger.warning("a read of KV cannot be stopped: a buffer of %d bytes waits for its end", buffer.nbytes)
            self._changed.notify()

    def _put_back(self, buffer: torch.Tensor, transfer: Transfer | None) -> bool:
        is_free = transfer is None or transfer.release()
        if is_free:
            self._free.append(buffer)
        else:
            self._blocked.append((buffer, transfer))
        return is_free

    def local_regions(self, buffer: torch.Tensor, group: int, count: int) -> np.ndarray:
        """Address and length of each part of the first ``count`` blocks in a buffer: ``[count * parts, 2]``."""
        sizes = np.array([part.num_bytes for part in self._parts[group]], dtype=np.int64)
        blocks = buffer.data_ptr() + np.arange(count, dtype=np.int64) * self.block_bytes[group]
        return _regions(blocks[:, None] + (sizes.cumsum() - sizes), sizes)

    def remote_regions(self, caches: Sequence[int], group: int, block_ids: Sequence[int]) -> np.ndarray:
        """The same for blocks of the producer, given the addresses of the tensors of its cache."""
        parts = np.array([(caches[part.tensor], part.num_bytes, part.stride) for part in self._parts[group]], np.int64)
        begins, sizes, strides = parts.reshape(-1, 3).T
        return _regions(begins + np.array(block_ids, dtype=np.int64)[:, None] * strides, sizes)

    @torch.inference_mode()
    def scatter(
        self, buffer: torch.Tensor, group: int, block_ids: Sequence[int], after: torch.cuda.Event | None
    ) -> None:
        """Copy the first blocks in a buffer to these of the cache, after the device's work up to ``after``; waits for
        the copy."""
        rows, size = self._rows[group], self.block_bytes[group]
        blocks = buffer[: len(block_ids) * size].view(rows.word).view(len(block_ids), rows.num_words)
        if self._stream is None:
            rows.scatter(blocks, torch.tensor(block_ids))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            rows.scatter(blocks.to(self._device), torch.tensor(block_ids).to(self._device))
        self._stream.synchronize()


def _regions(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """``[n, 2]`` of addresses ``[blocks, parts]`` and lengths ``[parts]``."""
    return np.stack((addresses, np.broadcast_to(sizes, addresses.shape)), axis=-1).reshape(-1, 2)


# --- loads ----------------------------------------------------------------------------------------------------------


class Peers:
    """Reference-counted connections to other engines' transfer agents. After a failed read a peer is disconnected when
    its last user releases it, and reconnected by the next: agents cannot repair a connection."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._num_users: Counter[str] = Counter()
        self._broken: set[str] = set()

    def acquire(self, metadata: bytes) -> str:
        """Connect to a peer; raises TransferError if it cannot be reached."""
        with self._lock:
            peer = self._agent.connect(metadata)
            if peer in self._broken:
                raise TransferError(f"other reads from {peer} have just failed")
            self._num_users[peer] += 1
            return peer

    def release(self, peer: str, *, is_broken: bool) -> None:
        with self._lock:
            self._num_users[peer] -= 1
            if is_broken:
                self._broken.add(peer)
            if self._num_users[peer] == 0:
                del self._num_users[peer]
                if peer in self._broken:
                    self._broken.discard(peer)
                    self._agent.disconnect(peer)


@dataclass(slots=True, eq=False)
class Load:
    """A load under way, shared between its thread and the worker's."""

    spec: LoadSpec
    deadline: float
    after: torch.cuda.Event | None = None
    """After the device's work that was queued when the load began."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks are written."""
    is_cancelled: bool = False
    """Set under the lock: no block is written from then on."""
    has_timed_out: bool = False
    is_new: bool = True
    """Started in this step: a finished request with its id is an earlier one."""
    has_acquired: bool = False
    """The producer has granted the lease to this consumer, and notices the end of its connection."""
    num_arrived: int = 0
    num_bytes: int = 0
    """Bytes of the blocks that have arrived."""
    num_regions: int = 0
    read_s: float = 0.0
    """All reads together."""
    post_s: float = 0.0
    """The part of it before each read was under way."""
    error: str = ""

    def should_stop(self) -> bool:
        return self.is_cancelled

    def give_up(self, *, has_timed_out: bool = False) -> None:
        """Waits for a copy that has begun; no other follows."""
        with self.lock:
            self.is_cancelled, self.has_timed_out = True, has_timed_out


class Loads:
    """Starts loads, gives up those that take too long, and reports each once. Threads do all that waits for producers.

    Args:
        description: of this rank; producers' must equal it.
        key: of the deployment.
        jobs: run the reads; stopped by `close`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        agent: TransferAgent,
        buffers: ReceiveBuffers,
        description: dict[str, Any],
        context: TransferContext,
        counters: TransferCounters,
        *,
        key: ClusterKey,
        jobs: IOThreads,
        clock: Callable[[], float],
    ) -> None:
        self._agent = agent
        self._key = key
        self._peers = Peers(agent)
        self._buffers = buffers
        self._description = description
        self._rank, self._num_ranks = context.rank, context.num_ranks
        self._timeout = context.config.kv_transfer_timeout
        self._counters = counters
        self._jobs = jobs
        self._decline_jobs = IOThreads("kv-decline", 1)  # separate, so that unresponsive producers delay no load
        self._renew_jobs = IOThreads("kv-renew", 4)
        self._renewing: set[str] = set()  # addresses with a renewal under way
        self._clock = clock
        self._loads: list[Load] = []
        self._ended: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._unnotified: queue.SimpleQueue[None] = queue.SimpleQueue()

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def start(self, spec: LoadSpec, after: torch.cuda.Event | None) -> None:
        """``after``: after the device's work that is queued so far."""
        load = Load(spec, self._clock() + self._timeout, after, error=spec.refusal)
        self._loads.append(load)
        if spec.refusal:
            self._ended.put(load)
        else:
            self._jobs.submit(partial(self._run, load))

    def decline(self, offer: Offer) -> None:
        """Notify the producer's rank of the same number, and every ``num_ranks``-th after it."""
        addresses = offer.addresses[self._rank :: self._num_ranks]
        self._decline_jobs.submit(partial(self._notify, addresses, Decline(offer.lease), side_channel.CONNECT_SECONDS))

    def renew(self, offers: Iterable[Offer]) -> None:
        """Renew leases at the ranks of `decline`. A rank that has not taken the last renewal is skipped."""
        leases: dict[str, list[str]] = defaultdict(list)
        for offer in offers:
            for address in offer.addresses[self._rank :: self._num_ranks]:
                leases[address].append(offer.lease)
        for address in leases.keys() - self._renewing:
            self._renewing.add(address)
            self._renew_jobs.submit(partial(self._renew, address, Renew(leases[address])))

    def _notify(self, addresses: Sequence[str], message: Decline | Renew, timeout: float) -> None:
        for _ in range(side_channel.notify(addresses, message, self._key, timeout)):
            self._unnotified.put(None)

    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        """Add the loads that have ended to ``output``."""
        for load in drain(self._ended):
            if load not in self._loads:
                continue  # it was given up before
            if load.error:
                self._fail(load, TransferFailure(load.error), output)
                continue
            self._loads.remove(load)
            output.loaded.add(load.spec.request_id)
            self._counters.add("blocks_loaded", load.num_arrived)
            self._counters.add("bytes_loaded", load.num_bytes)
            if load.num_regions:
                self._counters.observe("read_us", round(1e6 * load.read_s))
                self._counters.observe("post_us", round(1e6 * load.post_s))
                self._counters.observe("read_bytes", load.num_bytes)
                self._counters.observe("read_regions", load.num_regions)
        self._counters.add("notifications_failed", sum(1 for _ in drain(self._unnotified)))
        now = self._clock()
        for load in list(self._loads):
            if load.spec.request_id in finished_req_ids and not load.is_new:
                self._fail(load, TransferFailure("the request has ended before its KV arrived"), output)
            elif now >= load.deadline:
                count, engine_id = sum(map(len, load.spec.block_ids)), load.spec.offer.engine_id
                reason = (
                    f"{count - load.num_arrived} of {count} KV blocks had not come from engine {engine_id!r} after "
                    f"{self._timeout:g} s (kv_transfer_timeout)"
                )
                self._fail(load, TransferFailure(reason, timed_out=True), output)
            load.is_new = False

    def wait(self, seconds: float) -> bool:
        """Return when a load may have ended, or after ``seconds``; False, at once, without loads."""
        if not self._loads:
            return False
        with contextlib.suppress(queue.Empty):
            self._ended.put(self._ended.get(timeout=seconds))
        return True

    def close(self, timeout: float) -> None:
        """Give all loads up, decline those that have not begun to read, and wait for the threads."""
        for load in self._loads:
            load.give_up()
            if not load.has_acquired:
                self.decline(load.spec.offer)
        self._loads.clear()
        self._jobs.stop(timeout, finish=False)
        self._renew_jobs.stop(timeout, finish=False)
        self._decline_jobs.stop(timeout, finish=True)

    def _fail(self, load: Load, failure: TransferFailure, output: KVConnectorOutput) -> None:
        load.give_up(has_timed_out=failure.timed_out)
        if not load.has_acquired:
            self.decline(load.spec.offer)
        self._loads.remove(load)
        output.failed[load.spec.request_id] = failure
        self._counters.add("loads_failed")

    # --- in a thread of its own -------------------------------------------------------------------------------------

    def _renew(self, address: str, message: Renew) -> None:
        self._notify([address], message, RENEW_SECONDS)
        self._renewing.discard(address)

    def _run(self, load: Load) -> None:
        try:
            if not load.is_cancelled:
                self._read(load)
        except Exception as error:  # any error must end the load
            load.error = str(error) or type(error).__name__
        self._ended.put(load)

    def _read(self, load: Load) -> None:
        """Read all blocks, and check that they were held until the last was read."""
        spec, offer = load.spec, load.spec.offer
        address = offer.addresses[self._rank]
        channel = connect(address, side_channel.CONNECT_SECONDS, self._key, side_channel.SIDE_CHANNEL)
        with contextlib.closing(channel):
            call = partial(side_channel.call, channel, address, load.should_stop)
            granted = call(Acquire(offer.engine_id, self._description, offer.lease), Granted)
            load.has_acquired = True
            needed, held = ([*map(len, block_ids)] for block_ids in (spec.block_ids, granted.block_ids))
            if len(held) != len(needed) or any(count > there for count, there in zip(needed, held, strict=True)):
                raise RefusedError(f"{needed} blocks of each group are needed, and {held} are held")
            for size, block_ids in zip(self._buffers.blocks_per_slab, granted.block_ids, strict=True):
                if not all(0 <= block_id < granted.num_slabs * size for block_id in block_ids):
                    raise RefusedError(f"block ids beyond the producer's {granted.num_slabs} blocks or slabs are held")
            self._read_blocks(granted, load)
            call(Finish(), Accepted)

    def _read_blocks(self, granted: Granted, load: Load) -> None:
        buffers, block_ids = self._buffers, load.spec.block_ids
        buffer = buffers.acquire(load.should_stop)
        transfer, peer, is_broken = None, None, True
        try:
            peer = self._peers.acquire(granted.agent)
            for group, begin, count in self._reads(block_ids, len(buffer)):
                ours = block_ids[group][begin : begin + count]
                held = granted.block_ids[group][-len(block_ids[group]) :][begin : begin + count]
                remote = buffers.remote_regions(granted.caches, group, held)
                local = buffers.local_regions(buffer, group, count)
                began = self._clock()
                transfer = self._agent.read(peer, remote, local, granted.device)
                load.post_s += self._clock() - began
                load.num_regions += len(remote)
                while not transfer.poll():
                    if load.should_stop():
                        raise StoppedError("the load was given up")
                    transfer.wait(_READ_POLL_SECONDS)
                transfer.release()
                transfer = None
                load.read_s += self._clock() - began
                with load.lock:
                    if load.is_cancelled:
                        raise StoppedError("the load was given up")
                    buffers.scatter(buffer, group, ours, load.after)
                    load.num_arrived += count
                    load.num_bytes += count * buffers.block_bytes[group]
            is_broken = False
        except StoppedError:
            is_broken = load.has_timed_out  # else the peer responds, and a read under way will end
            raise
        finally:
            if peer is not None:
                self._peers.release(peer, is_broken=is_broken)
            self._buffers.release(buffer, transfer)

    def _reads(self, block_ids: list[list[int]], num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Group, index of the first block and number of blocks of each read; none of a group without bytes here."""
        for group, size in enumerate(self._buffers.block_bytes):
            step = num_bytes // size if size else 0
            for begin in range(0, len(block_ids[group]) if size else 0, step or 1):
                yield group, begin, min(step, len(block_ids[group]) - begin)
