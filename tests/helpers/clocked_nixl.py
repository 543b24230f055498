"""The NIXL connector with a clock that a test turns, for engines in the test's own process."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from fleetfoot.kv_transfer.base.connector import BLOCK_CONTIGUOUS_HND, KVConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.nixl.connector import NixlConnector
from fleetfoot.records.kv_connector import SchedulerConnector
from tests.helpers.kv_bench import Clock


class ClockedNixlConnector(KVConnector):
    """``kv_connector_extra_config``: ``clock``, and NixlConnector's own."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return NixlConnector.scheduler_side(_with_clock(context))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        return NixlConnector.worker_side(_with_clock(context))


def clocked(config: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The kv_transfer_config of a NixlConnector, with this clock."""
    return {
        **config,
        "kv_connector": "ClockedNixlConnector",
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"clock": clock, **config["kv_connector_extra_config"]},
    }


def _with_clock(context: TransferContext) -> TransferContext:
    extra = dict(context.config.kv_connector_extra_config)
    clock = extra.pop("clock")
    return dataclasses.replace(
        context, clock=clock, config=dataclasses.replace(context.config, kv_connector_extra_config=extra)
    )
