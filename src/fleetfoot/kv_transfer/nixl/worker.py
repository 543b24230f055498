"""A worker's side of the NIXL connector: lends this rank's blocks, and reads those of the same rank elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import torch

from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters, WorkerConnector
from fleetfoot.kv_transfer.base.io_threads import IOThreads, Jobs
from fleetfoot.kv_transfer.nixl.agents import make_agent
from fleetfoot.kv_transfer.nixl.leases import SENT, Leases
from fleetfoot.kv_transfer.nixl.loads import NixlLoads
from fleetfoot.kv_transfer.nixl.orders import NO_ORDERS, orders_of
from fleetfoot.kv_transfer.nixl.pull import Puller
from fleetfoot.kv_transfer.nixl.server import LendingServer
from fleetfoot.kv_transfer.nixl.settings import NixlSettings
from fleetfoot.kv_transfer.nixl.side_channel import PROTOCOL, Identity, Welcome
from fleetfoot.kv_transfer.nixl.staging import Staging
from fleetfoot.kv_transfer.nixl.transfer_agent import TransferAgent
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput

WAIT_SECONDS = 0.02
"""How long an idle step waits for progress."""
SHUTDOWN_SECONDS = 5.0

MakeAgent = Callable[[str, str, str], TransferAgent]
"""As `fleetfoot.kv_transfer.nixl.agents.make_agent`."""


class NixlWorker(WorkerConnector):
    """Nothing here waits for another engine: its threads do.

    Args:
        jobs: run the loads; None: threads.
    """

    def __init__(
        self,
        context: TransferContext,
        settings: NixlSettings,
        *,
        make_agent: MakeAgent = make_agent,
        jobs: Jobs | None = None,
    ) -> None:
        self._context = context
        self._settings = settings
        self._clock = context.clock or time.monotonic
        name = f"{context.engine_id}-{context.rank}-{secrets.token_hex(8)}"
        self._agent = make_agent(settings.backend, name, settings.side_channel_host)
        self._jobs = jobs or IOThreads("kv-pull", settings.num_threads)
        self._tell = IOThreads("kv-decline", 1)
        self._counters = TransferCounters()
        self._leases = Leases(settings.abort_timeout, self._clock)
        self._server: LendingServer | None = None
        self._loads: NixlLoads | None = None
        self._addresses: dict[int, str] = {}
        self._orders = NO_ORDERS

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._device = kv_caches[0].device
        self._bytes_per_block = layout.bytes_per_block
        identity = self._identity(layout)
        try:
            if self._context.config.can_load:
                self._loads = self._make_loads(kv_caches, layout, identity)
            if self._context.config.can_save:
                self._server = self._make_server(kv_caches, layout, identity)
                self._addresses = {self._context.rank: self._server.address}
        except BaseException:  # a port that is taken, for one
            self.shutdown()
            raise

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._orders = orders_of(metadata)

    def start_load_kv(self) -> None:
        if self._orders is NO_ORDERS:
            return
        queued = self._record()  # behind all writers of what is lent, and all others who touch what is read into
        for grant in self._orders.grants:
            self._leases.grant(grant.lease, grant.request_id, grant.block_ids, queued)
        if self._loads is not None:
            for order in self._orders.pulls:
                self._loads.begin(order, queued)
            for source in self._orders.declines:
                self._loads.decline(source)

    def save_kv(self) -> None:
        """What is lent is read where it lies."""

    def wait_for_save(self) -> None:
        """Nothing is copied: lent blocks are written to by nobody."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput()
        output.addresses, self._addresses = self._addresses, {}
        if self._loads is not None:
            self._loads.get_finished(finished_req_ids, output)
        for lease, how in self._leases.get_finished():
            output.sent.add(lease.request_id)
            self._counters.add(f"sends_{how}")
            if how == SENT:
                self._counters.add("blocks_sent", len(lease.block_ids))
                self._counters.add("bytes_sent", len(lease.block_ids) * self._bytes_per_block)
        output.counters = self._counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._orders = NO_ORDERS

    def wait_for_progress(self) -> None:
        if self._loads:
            self._loads.wait(WAIT_SECONDS)
        else:
            self._leases.wait(WAIT_SECONDS)

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._loads is not None:
            self._loads.close()
        self._jobs.stop(SHUTDOWN_SECONDS, finish=False)
        self._tell.stop(SHUTDOWN_SECONDS, finish=False)
        self._agent.close()

    def _identity(self, layout: KVLayout) -> Identity:
        context = self._context
        return Identity(
            protocol=PROTOCOL,
            backend=self._settings.backend,
            block_size=layout.block_size,
            dtype=layout.dtype,
            tensor_parallel_size=context.tensor_parallel_size,
            pipeline_parallel_size=context.pipeline_parallel_size,
            rank=context.rank,
            layout=layout.fingerprint,
            fingerprint=context.fingerprint,
        )

    def _make_loads(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, identity: Identity) -> NixlLoads:
        staging = Staging(
            kv_caches,
            layout,
            num_lanes=self._settings.num_threads,
            num_bytes=self._settings.buffer_bytes,
            device=self._agent.local_device(self._device),
        )
        self._agent.register([staging.memory])
        return NixlLoads(
            Puller(self._agent, staging, identity, self._context.rank),
            self._jobs,
            self._tell,
            self._counters,
            rank=self._context.rank,
            num_ranks=self._context.num_ranks,
            bytes_per_block=layout.bytes_per_block,
            timeout=self._context.config.kv_transfer_timeout,
            clock=self._clock,
        )

    def _make_server(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, identity: Identity) -> LendingServer:
        self._agent.register(kv_caches)
        welcome = Welcome(
            agent=self._agent.metadata,
            layers=[cache.data_ptr() for cache in kv_caches],
            device=self._device.index or 0,
            num_blocks=layout.num_blocks,
        )
        port = self._settings.side_channel_port
        return LendingServer(
            self._settings.side_channel_host,
            port + self._context.rank if port else 0,
            self._context.engine_id,
            identity,
            self._leases,
            welcome,
        )

    def _record(self) -> torch.cuda.Event | None:
        if self._device.type == "cpu":
            return None
        return torch.cuda.current_stream(self._device).record_event()
