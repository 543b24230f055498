"""The worker side of the NIXL connector: holds this rank's blocks, and loads from the same rank of other engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters, WorkerConnector
from fleetfoot.kv_transfer.base.io_threads import IOThreads
from fleetfoot.kv_transfer.nixl.consumer import Loads, ReceiveBuffers
from fleetfoot.kv_transfer.nixl.params import NixlMetadata, NixlSettings, engine_description
from fleetfoot.kv_transfer.nixl.side_channel import EVICTED, PROTOCOL, SENT, Granted, Leases, ProducerServer
from fleetfoot.kv_transfer.nixl.transfer_agent import TransferAgent, make_agent
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput
from fleetfoot.utils.cluster_key import ClusterKey

WAIT_SECONDS = 0.02
"""How long an idle step waits for progress."""
SHUTDOWN_SECONDS = 5.0
NO_TRANSFERS = NixlMetadata()


class NixlWorker(WorkerConnector):
    """Threads do all work that waits for other engines.

    Args:
        key: of the deployment.
        jobs: run the loads; None: threads.
    """

    def __init__(
        self,
        context: TransferContext,
        settings: NixlSettings,
        key: ClusterKey,
        *,
        make_agent: Callable[[str, str, str, ClusterKey], TransferAgent] = make_agent,
        jobs: IOThreads | None = None,
    ) -> None:
        self._context = context
        self._settings = settings
        self._key = key
        self._clock = context.clock or time.monotonic
        name = f"{context.engine_id}-{context.rank}-{secrets.token_hex(8)}"
        self._agent = make_agent(settings.backend, name, settings.side_channel_host, key)
        self._jobs = jobs or IOThreads("kv-read-remote", settings.num_threads)
        self._counters = TransferCounters()
        self._leases = Leases(settings.kv_lease_duration, settings.abort_timeout, self._clock)
        self._server: ProducerServer | None = None
        self._loads: Loads | None = None
        self._addresses: dict[int, str] = {}
        self._metadata = NO_TRANSFERS

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._device = kv_caches[0].device
        self._block_bytes = layout.group_bytes
        description = {
            "protocol": PROTOCOL,
            "backend": self._settings.backend,
            "rank": self._context.rank,
            "layout": layout.fingerprint,
            **engine_description(self._context),
        }
        try:
            if self._context.config.can_load:
                self._loads = self._make_loads(kv_caches, layout, description)
            if self._context.config.can_save:
                self._server = self._make_server(kv_caches, layout, description)
                self._addresses = {self._context.rank: self._server.address}
        except BaseException:  # such as a port that is in use
            self.shutdown()
            raise

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if not isinstance(metadata, NixlMetadata | None):
            kind = type(metadata).__name__
            raise TypeError(f"KV connector metadata is a {kind}; it must be NixlMetadata or None")
        self._metadata = metadata or NO_TRANSFERS

    def start_load_kv(self) -> None:
        if self._metadata is NO_TRANSFERS:
            return
        queued = None  # after all work that writes to held blocks, or accesses blocks to be loaded
        if self._device.type != "cpu":
            queued = torch.cuda.current_stream(self._device).record_event()
        for hold in self._metadata.holds:
            self._leases.grant(hold.lease, hold.request_id, hold.block_ids, queued)
        for lease in self._metadata.evictions:
            self._leases.give_up(lease, EVICTED)
        if self._loads is not None:
            for load in self._metadata.loads:
                self._loads.start(load, queued)
            for offer in self._metadata.declines:
                self._loads.decline(offer)
            self._loads.renew(self._metadata.renewals)

    def save_kv(self) -> None:
        """Consumers read held blocks in place."""

    def wait_for_save(self) -> None:
        """Nothing is copied, and held blocks are not written."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput()
        output.addresses, self._addresses = self._addresses, {}
        if self._loads is not None:
            self._loads.get_finished(finished_req_ids, output)
        for lease, reason in self._leases.get_finished():
            output.sent.add(lease.request_id)
            self._counters.add(f"sends_{reason}")
            if reason == SENT:
                for size, block_ids in zip(self._block_bytes, lease.block_ids, strict=True):
                    self._counters.add("blocks_sent", len(block_ids))
                    self._counters.add("bytes_sent", len(block_ids) * size)
        output.counters = self._counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._metadata = NO_TRANSFERS

    def wait_for_progress(self) -> None:
        if self._loads is None or not self._loads.wait(WAIT_SECONDS):
            self._leases.wait(WAIT_SECONDS)

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._loads is not None:
            self._loads.close(SHUTDOWN_SECONDS)
        self._agent.close()

    def _make_loads(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, description: dict[str, Any]) -> Loads:
        sizes = self._settings.num_threads, self._settings.buffer_bytes
        buffers = ReceiveBuffers(kv_caches, layout, *sizes, self._agent.local_device(self._device))
        self._agent.register([buffers.memory])
        shared = self._agent, buffers, description, self._context, self._counters
        return Loads(*shared, key=self._key, jobs=self._jobs, clock=self._clock)

    def _make_server(
        self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, description: dict[str, Any]
    ) -> ProducerServer:
        self._agent.register(kv_caches)
        caches = [cache.data_ptr() for cache in kv_caches]
        granted = Granted(self._agent.metadata, caches, self._device.index or 0, layout.num_slabs, [])
        host, port = self._settings.side_channel_host, self._settings.side_channel_port
        port = port + self._context.rank if port else 0
        return ProducerServer(host, port, self._context.engine_id, description, self._leases, granted, self._key)
