"""All loads of a worker: pulled by threads, watched by the worker's."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fleetfoot.kv_transfer.base.connector import TransferCounters
from fleetfoot.kv_transfer.base.io_threads import Jobs
from fleetfoot.kv_transfer.nixl.orders import PullOrder
from fleetfoot.kv_transfer.nixl.params import Source
from fleetfoot.kv_transfer.nixl.pull import Load, Puller
from fleetfoot.kv_transfer.nixl.side_channel import decline
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure

if TYPE_CHECKING:
    import torch


class NixlLoads:
    """Begins loads, gives up those that take too long, and reports each once.

    Args:
        jobs: run the pulls.
        tell: run what lenders are told; of their own, so that lenders which do not answer hold up no load.
        rank, num_ranks: of this worker, and of its engine.
        timeout: seconds that a load may take.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        puller: Puller,
        jobs: Jobs,
        tell: Jobs,
        counters: TransferCounters,
        *,
        rank: int,
        num_ranks: int,
        bytes_per_block: int,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._puller = puller
        self._jobs = jobs
        self._tell = tell
        self._counters = counters
        self._rank, self._num_ranks = rank, num_ranks
        self._bytes_per_block = bytes_per_block
        self._timeout = timeout
        self._clock = clock
        self._loads: list[Load] = []
        self._ended: queue.SimpleQueue[Load] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, order: PullOrder, after: torch.cuda.Event | None) -> None:
        """
        Args:
            after: behind the device's work that is queued so far.
        """
        load = Load(order, self._clock() + self._timeout, after)
        self._loads.append(load)
        if order.refusal:
            load.error = order.refusal
            self._ended.put(load)
            self.decline(order.source)
        else:
            self._jobs.submit(partial(self._run, load))

    def decline(self, source: Source) -> None:
        """Tell a lender that nobody comes: its rank of the same number, and where it has more of them, those that no
        rank of this engine would tell."""
        self._tell.submit(partial(decline, source.addresses[self._rank :: self._num_ranks], source.lease))

    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        """Add what has ended to ``output``."""
        self._take_pulls(output)
        now = self._clock()
        for load in list(self._loads):
            if load.order.request_id in finished_req_ids and not load.is_new:
                self._give_up(load, TransferFailure("the request has ended before its KV arrived"), output)
            elif now >= load.deadline:
                self._give_up(load, self._timed_out(load), output)
            load.is_new = False

    def wait(self, seconds: float) -> None:
        """Return when a load may have ended, or after so long; at once if none is under way."""
        if not self._loads:
            return
        with contextlib.suppress(queue.Empty):
            self._ended.put(self._ended.get(timeout=seconds))

    def close(self) -> None:
        """Give everything up."""
        for load in self._loads:
            with load.lock:
                load.is_cancelled = True
        self._loads.clear()

    def _run(self, load: Load) -> None:
        """In a thread."""
        try:
            if not load.is_cancelled:
                self._puller.pull(load)
        except Exception as error:  # whatever it is, somebody waits for this load's end
            load.error = str(error) or type(error).__name__
        self._ended.put(load)
        if not load.has_acquired:
            with contextlib.suppress(RuntimeError):  # the threads were stopped: this is the end
                self.decline(load.order.source)

    def _take_pulls(self, output: KVConnectorOutput) -> None:
        while True:
            try:
                load = self._ended.get_nowait()
            except queue.Empty:
                return
            if load not in self._loads:
                continue  # it was given up before
            if load.error:
                self._give_up(load, TransferFailure(load.error), output)
                continue
            self._loads.remove(load)
            output.loaded.add(load.order.request_id)
            self._counters.add("blocks_loaded", load.num_arrived)
            self._counters.add("bytes_loaded", load.num_arrived * self._bytes_per_block)

    def _give_up(self, load: Load, failure: TransferFailure, output: KVConnectorOutput) -> None:
        with load.lock:  # a copy that has begun ends first, and there will be no other
            load.is_cancelled, load.has_timed_out = True, failure.timed_out
        self._loads.remove(load)
        output.failed[load.order.request_id] = failure
        self._counters.add("loads_failed")

    def _timed_out(self, load: Load) -> TransferFailure:
        left = len(load.order.block_ids) - load.num_arrived
        return TransferFailure(
            f"{left} of {len(load.order.block_ids)} KV blocks had not come from engine {load.order.source.engine_id!r} "
            f"after {self._timeout:g} s (kv_transfer_timeout)",
            timed_out=True,
        )
