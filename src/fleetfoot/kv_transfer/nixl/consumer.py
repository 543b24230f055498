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
from collections.abc import Callable, Iterable, Sequence
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
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.sockets import StoppedError, connect

logger = logging.getLogger(__name__)

_READ_POLL_SECONDS = 0.02
_BUFFER_POLL_SECONDS = 0.05


class ReceiveBuffers:
    """A buffer for each concurrent load of a worker: uint8 ``[num_rows, bytes_per_block]``; a row is a block of all
    layers, concatenated.

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
        self._rows = LayerRows(kv_caches, layout, use_triton=self._device.type != "cpu")
        num_rows = max(1, num_bytes // num_loads // layout.bytes_per_block)
        shape = num_loads * num_rows, layout.bytes_per_block
        try:
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise ValueError(
                f"no memory on {device} for {num_loads} concurrent loads of {num_rows:,} KV blocks of "
                f"{layout.bytes_per_block:,} bytes each ({error}); lower buffer_bytes or num_threads"
            ) from error
        self._stream = None
        if self._device.type != "cpu":
            self._stream = torch.cuda.Stream(self._device)
            self._rows.warm_up()
        self._sizes = np.array(layout.part_bytes, dtype=np.int64)
        self._offsets = self._sizes.cumsum() - self._sizes
        self._changed = threading.Condition()
        self._free = list(self.memory.split(num_rows))
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

    def local_regions(self, buffer: torch.Tensor, count: int) -> np.ndarray:
        """Address and length of each layer's part of the first ``count`` rows, row by row: ``[count * layers, 2]``."""
        rows = buffer.data_ptr() + np.arange(count, dtype=np.int64) * buffer.shape[1]
        return self._regions(rows[:, None] + self._offsets)

    def remote_regions(self, layers: Sequence[int], block_ids: Sequence[int]) -> np.ndarray:
        """The same for blocks of the producer, given the addresses of its layers' caches."""
        blocks = np.array(block_ids, dtype=np.int64)[:, None] * self._sizes
        return self._regions(np.array(layers, dtype=np.int64) + blocks)

    def _regions(self, addresses: np.ndarray) -> np.ndarray:
        """``[n, 2]`` of addresses ``[blocks, layers]``."""
        return np.stack((addresses, np.broadcast_to(self._sizes, addresses.shape)), axis=-1).reshape(-1, 2)

    @torch.inference_mode()
    def scatter(self, buffer: torch.Tensor, block_ids: Sequence[int], after: torch.cuda.Event | None) -> None:
        """Copy the first rows to these blocks, after the device's work up to ``after``; waits for the copy."""
        rows = buffer[: len(block_ids)].view(self._rows.word)
        if self._stream is None:
            self._rows.scatter(rows, torch.tensor(block_ids))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._rows.scatter(rows.to(self._device), torch.tensor(block_ids).to(self._device))
        self._stream.synchronize()


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
        self._bytes_per_block = buffers.memory.shape[1]
        self._clock = clock
        self._loads: list[Load] = []
        self._ended: queue.SimpleQueue[Load] = queue.SimpleQueue()

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
        self._decline_jobs.submit(partial(side_channel.notify, addresses, Decline(offer.lease), self._key))

    def renew(self, offers: Iterable[Offer]) -> None:
        """Renew leases at the ranks of `decline`. A rank that has not taken the last renewal is skipped."""
        leases: dict[str, list[str]] = defaultdict(list)
        for offer in offers:
            for address in offer.addresses[self._rank :: self._num_ranks]:
                leases[address].append(offer.lease)
        for address in leases.keys() - self._renewing:
            self._renewing.add(address)
            self._renew_jobs.submit(partial(self._renew, address, Renew(leases[address])))

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
            self._counters.add("bytes_loaded", load.num_arrived * self._bytes_per_block)
        now = self._clock()
        for load in list(self._loads):
            if load.spec.request_id in finished_req_ids and not load.is_new:
                self._fail(load, TransferFailure("the request has ended before its KV arrived"), output)
            elif now >= load.deadline:
                count, engine_id = len(load.spec.block_ids), load.spec.offer.engine_id
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
        side_channel.notify([address], message, self._key, RENEW_SECONDS)
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
            last = spec.first + len(spec.block_ids) - 1
            if last >= len(granted.block_ids):
                raise RefusedError(f"blocks {spec.first} to {last} are needed, and {len(granted.block_ids)} are held")
            if not all(0 <= block_id < granted.num_blocks for block_id in granted.block_ids):
                raise RefusedError(f"block ids beyond the producer's {granted.num_blocks} blocks are held")
            self._read_blocks(granted, load)
            call(Finish(), Accepted)

    def _read_blocks(self, granted: Granted, load: Load) -> None:
        spec = load.spec
        buffer = self._buffers.acquire(load.should_stop)
        transfer, peer, is_broken = None, None, True
        try:
            peer = self._peers.acquire(granted.agent)
            for begin in range(0, len(spec.block_ids), len(buffer)):
                block_ids = spec.block_ids[begin : begin + len(buffer)]
                first = spec.first + begin
                held = granted.block_ids[first : first + len(block_ids)]
                remote = self._buffers.remote_regions(granted.layers, held)
                local = self._buffers.local_regions(buffer, len(block_ids))
                transfer = self._agent.read(peer, remote, local, granted.device)
                while not transfer.poll():
                    if load.should_stop():
                        raise StoppedError("the load was given up")
                    transfer.wait(_READ_POLL_SECONDS)
                transfer.release()
                transfer = None
                with load.lock:
                    if load.is_cancelled:
                        raise StoppedError("the load was given up")
                    self._buffers.scatter(buffer, block_ids, load.after)
                    load.num_arrived += len(block_ids)
            is_broken = False
        except StoppedError:
            is_broken = load.has_timed_out  # else the peer responds, and a read under way will end
            raise
        finally:
            if peer is not None:
                self._peers.release(peer, is_broken=is_broken)
            self._buffers.release(buffer, transfer)
