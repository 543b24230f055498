"""A KV connector with a fault in one worker process; in all others it is the real one.

Unlike those of `tests.helpers.faulty_connector`, its settings are plain values, which reach worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fleetfoot.kv_transfer.base.connector import BLOCK_CONTIGUOUS_HND, KVConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.kv_transfer.blockstore.blocks import BlockStoreMetadata
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from tests.helpers.faulty_connector import HookedWorker, inner_context

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 400},
}
"""The kv_transfer_config of a real connector."""
EXIT_CODE = 3
"""Of a worker that ends without a report."""


class InjectedError(RuntimeError):
    """Its constructor has two arguments, so it cannot be pickled."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__(f"injected {where} on rank {rank}")


def faulty_rank(rank: int, fault: str) -> dict[str, Any]:
    """The kv_transfer_config of OFFLOADING with a fault.

    Args:
        fault: what raises or happens. ``step``: the third step. ``start``: a ValueError when the KV cache is there.
            ``exit``: the process ends there. ``loads``: loads are reported as failed, and their blocks are NaN.
            ``flush``: a flush of blocks. ``shutdown``: the connector's.
    """
    return {
        "kv_connector": "FaultyRankConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"inner": OFFLOADING, "rank": rank, "fault": fault},
    }


class FaultyRankConnector(KVConnector):
    """See `faulty_rank`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        inner = inner_context(context)
        return find_connector(inner.config).scheduler_side(inner)

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        inner, extra = inner_context(context), context.config.kv_connector_extra_config
        worker = find_connector(inner.config).worker_side(inner)
        return _FaultyWorker(worker, context.rank, extra["fault"]) if context.rank == extra["rank"] else worker


class _FaultyWorker(HookedWorker):
    def __init__(self, inner: WorkerConnector, rank: int, fault: str) -> None:
        super().__init__(inner)
        self._rank, self._fault = rank, fault
        self._num_steps = 0
        self._has_flushes = False
        self._blocks: dict[str, list[int]] = {}  # request -> the blocks that are loaded for it

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        if self._fault == "start":
            raise ValueError(f"injected at the start of rank {self._rank}")
        if self._fault == "exit":
            os._exit(EXIT_CODE)
        super().register_kv_caches(kv_caches, layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._num_steps += 1
        if self._fault == "step" and self._num_steps == 3:
            raise InjectedError("in a step", self._rank)
        if isinstance(metadata, BlockStoreMetadata):
            self._has_flushes = bool(metadata.flushes)
            for request_id, blocks in metadata.loads:
                self._blocks[request_id] = [block.block_id for block in blocks]
        super().bind_connector_metadata(metadata)

    def flush(self) -> None:
        if self._fault == "flush" and self._has_flushes:
            raise InjectedError("in a flush", self._rank)
        super().flush()

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = super().get_finished(finished_req_ids)
        if self._fault == "loads":
            for request_id in output.loaded:
                output.failed[request_id] = TransferFailure(f"injected on rank {self._rank}")
                self.spoil(self._blocks[request_id])
            output.loaded = set()
        return output

    def shutdown(self) -> None:
        super().shutdown()
        if self._fault == "shutdown":
            raise InjectedError("at the end", self._rank)
