"""One load: a request's blocks, read from another engine's rank. Runs in a thread, from beginning to end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetfoot.kv_transfer.base.sockets import StoppedError
from fleetfoot.kv_transfer.nixl.orders import PullOrder
from fleetfoot.kv_transfer.nixl.side_channel import Identity, RefusedError, SideChannel, Welcome
from fleetfoot.kv_transfer.nixl.staging import Lane, Staging
from fleetfoot.kv_transfer.nixl.transfer_agent import TransferAgent, TransferError

if TYPE_CHECKING:
    import torch

_WAIT_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class Load:
    """A load under way, shared between its thread and the worker's."""

    order: PullOrder
    deadline: float
    after: torch.cuda.Event | None = None
    """Behind the device's work that was queued when the load began."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks are written to."""
    is_cancelled: bool = False
    """Set under the lock: from then on no block is written to."""
    has_timed_out: bool = False
    is_new: bool = True
    """Begun in this very step: a request of its id that has ended is an earlier one."""
    has_acquired: bool = False
    """The lender knows of this reader, and that it has gone when its connection has."""
    num_arrived: int = 0
    error: str = ""

    def should_stop(self) -> bool:
        return self.is_cancelled


class Peers:
    """The transfer agents of other engines that reads go to. One that a read has failed from is forgotten when its last
    reader leaves it, and made known anew by the next: agents cannot mend what is broken."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._num_readers: dict[str, int] = {}
        self._broken: set[str] = set()

    def enter(self, metadata: bytes) -> str:
        """
        Raises:
            TransferError: it cannot be reached.
        """
        with self._lock:
            peer = self._agent.connect(metadata)
            if peer in self._broken:
                raise TransferError(f"other reads from {peer} have just failed")
            self._num_readers[peer] = self._num_readers.get(peer, 0) + 1
            return peer

    def leave(self, peer: str, *, is_broken: bool) -> None:
        with self._lock:
            self._num_readers[peer] -= 1
            if is_broken:
                self._broken.add(peer)
            if self._num_readers[peer] == 0:
                del self._num_readers[peer]
                if peer in self._broken:
                    self._broken.discard(peer)
                    self._agent.disconnect(peer)


class Puller:
    """Makes loads happen. Everything here may be called by several threads at once.

    Args:
        rank: of this worker, which reads from the same rank of the other engine.
    """

    def __init__(self, agent: TransferAgent, staging: Staging, identity: Identity, rank: int) -> None:
        self._agent = agent
        self._staging = staging
        self._identity = identity
        self._rank = rank
        self._peers = Peers(agent)

    def pull(self, load: Load) -> None:
        """Load all blocks, and make sure that they were lent until the last was read.

        Raises:
            RuntimeError: whatever went wrong; nothing of the blocks counts.
        """
        source, order = load.order.source, load.order
        channel = SideChannel(source.addresses[self._rank], load.should_stop)
        try:
            welcome = channel.hello(self._identity, source.engine_id)
            lent = channel.acquire(source.lease)
            load.has_acquired = True
            wanted = lent[order.first : order.first + len(order.block_ids)]
            self._check(lent, len(wanted), welcome, load)
            self._read(welcome, wanted, load)
            channel.finish(source.lease)
        finally:
            channel.close()

    def _check(self, lent: Sequence[int], num_wanted: int, welcome: Welcome, load: Load) -> None:
        first, count = load.order.first, len(load.order.block_ids)
        if num_wanted != count:
            raise RefusedError(f"blocks {first} to {first + count - 1} are wanted, and {len(lent)} are lent")
        if not all(0 <= block_id < welcome.num_blocks for block_id in lent):
            raise RefusedError(f"blocks beyond the lender's {welcome.num_blocks} are lent")

    def _read(self, welcome: Welcome, block_ids: Sequence[int], load: Load) -> None:
        lane = self._staging.take(load.should_stop)
        transfer, peer, is_broken = None, None, True
        try:
            peer = self._peers.enter(welcome.agent)
            for begin in range(0, len(block_ids), lane.num_rows):
                chunk = block_ids[begin : begin + lane.num_rows]
                remote = lane.remote_pieces(welcome.layers, chunk)
                transfer = self._agent.read(peer, remote, lane.pieces(len(chunk)), welcome.device)
                while not transfer.poll():
                    if load.should_stop():
                        raise StoppedError("nobody waits for it any more")
                    transfer.wait(_WAIT_SECONDS)
                transfer.release()
                transfer = None
                self._write(lane, load, begin, len(chunk))
            is_broken = False
        except StoppedError:
            is_broken = load.has_timed_out  # else the peer is well, and a read that goes on will end
            raise
        finally:
            if peer is not None:
                self._peers.leave(peer, is_broken=is_broken)
            self._staging.give_back(lane, transfer)

    def _write(self, lane: Lane, load: Load, begin: int, count: int) -> None:
        """What has arrived becomes KV, unless nobody waits for it any more."""
        with load.lock:
            if load.is_cancelled:
                raise StoppedError("nobody waits for it any more")
            lane.scatter(load.order.block_ids[begin : begin + count], load.after)
            load.num_arrived += count
