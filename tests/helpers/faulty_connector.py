"""A KV connector around a real one that goes wrong where and how a test wants it to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import BLOCK_CONTIGUOUS_HND, KVConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput

SCHEDULER_POINTS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "blocks_filled", "request_finished",
    "build_connector_meta", "update_connector_output",
)  # fmt: skip
WORKER_POINTS = (
    "bind_connector_metadata", "flush", "start_load_kv", "save_kv", "wait_for_save", "get_finished",
    "clear_connector_metadata",
)  # fmt: skip
"""In the order of a step."""


class InjectedError(RuntimeError):
    """What `Faults.raise_at` raises."""


@dataclass
class Faults:
    """What goes wrong. One object for both sides, so a test can change its mind, and set `released`, on the way."""

    raise_at: str = ""
    """One of SCHEDULER_POINTS or WORKER_POINTS, which raises."""
    on_call: int = 1
    """At which of its calls."""
    loads: str = ""
    """``fail``, ``time_out``: loads that have ended well are reported so. ``corrupt``: their blocks are NaN besides.
    ``hold``: nobody hears of them before `released` is set."""
    lends: bool = False
    """The blocks of requests that end are lent until `released` is set."""
    released: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)
    """Every point, as it was called."""

    def at(self, point: str) -> None:
        self.calls.append(point)
        if point == self.raise_at and self.calls.count(point) == self.on_call:
            raise InjectedError(f"injected at {point}")


@dataclass
class FaultyMetadata:
    inner: object | None
    loads: dict[str, list[int]]
    """Request -> the blocks that are loaded for it."""
    lent: list[str]


class FaultyScheduler(SchedulerConnector):
    def __init__(self, inner: SchedulerConnector, faults: Faults, block_size: int) -> None:
        self._inner, self._faults, self._block_size = inner, faults, block_size
        self._loads: dict[str, list[int]] = {}
        self._lent: list[str] = []
        self._unsent: set[str] = set()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        self._faults.at("get_num_new_matched_tokens")
        return self._inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        self._faults.at("update_state_after_alloc")
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        self._loads[request.request_id] = request.block_ids[first:last]
        self._inner.update_state_after_alloc(request, num_computed_tokens, num_external_tokens)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        self._faults.at("blocks_filled")
        self._inner.blocks_filled(request, first, last, by_this_step=by_this_step)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._faults.at("request_finished")
        if self._faults.lends:
            self._lent.append(request.request_id)
            self._unsent.add(request.request_id)
        return self._faults.lends, self._inner.request_finished(request)[1]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        self._faults.at("build_connector_meta")
        metadata = FaultyMetadata(self._inner.build_connector_meta(scheduler_output), self._loads, self._lent)
        self._loads, self._lent = {}, []
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._faults.at("update_connector_output")
        self._unsent -= output.sent
        self._inner.update_connector_output(output)

    @property
    def has_pending(self) -> bool:
        return bool(self._lent or self._loads or self._unsent) or self._inner.has_pending

    def reset_cache(self) -> None:
        self._inner.reset_cache()

    def shutdown(self) -> None:
        self._inner.shutdown()


class FaultyWorker(WorkerConnector):
    def __init__(self, inner: WorkerConnector, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._blocks: dict[str, list[int]] = {}
        self._held: set[str] = set()
        self._lent: set[str] = set()
        self._kv_caches: list[torch.Tensor] = []

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._kv_caches = list(kv_caches)
        self._inner.register_kv_caches(kv_caches, layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if metadata is None:  # a runner's own step, as when it warms up
            self._inner.bind_connector_metadata(None)
            return
        assert isinstance(metadata, FaultyMetadata)
        self._blocks |= metadata.loads
        self._lent |= set(metadata.lent)
        self._inner.bind_connector_metadata(metadata.inner)
        self._faults.at("bind_connector_metadata")

    def flush(self) -> None:
        self._faults.at("flush")
        self._inner.flush()

    def start_load_kv(self) -> None:
        self._faults.at("start_load_kv")
        self._inner.start_load_kv()

    def save_kv(self) -> None:
        self._faults.at("save_kv")
        self._inner.save_kv()

    def wait_for_save(self) -> None:
        self._faults.at("wait_for_save")
        self._inner.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        self._faults.at("get_finished")
        output = self._inner.get_finished(finished_req_ids)
        kind = self._faults.loads
        if kind == "hold":
            self._held |= output.loaded
            output.loaded = set()
            if self._faults.released.is_set():
                output.loaded, self._held = self._held, set()
        elif kind:
            for request_id in output.loaded:
                output.failed[request_id] = TransferFailure(f"injected: {kind}", timed_out=kind == "time_out")
                if kind == "corrupt":
                    for cache in self._kv_caches:
                        cache[self._blocks[request_id]] = float("nan")
            output.loaded = set()
        if self._faults.released.is_set():
            output.sent |= self._lent
            self._lent = set()
        return output

    def clear_connector_metadata(self) -> None:
        self._inner.clear_connector_metadata()
        self._faults.at("clear_connector_metadata")

    def wait_for_progress(self) -> None:
        self._faults.at("wait_for_progress")
        self._inner.wait_for_progress()

    def shutdown(self) -> None:
        self._inner.shutdown()


class FaultyConnector(KVConnector):
    """``kv_connector_extra_config``: ``inner``, the kv_transfer_config of the real one; ``faults``, a `Faults`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        inner, faults = _parts(context)
        connector = find_connector(inner.config)
        return FaultyScheduler(connector.scheduler_side(inner), faults, context.block_size)

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        inner, faults = _parts(context)
        return FaultyWorker(find_connector(inner.config).worker_side(inner), faults)


def faulty(inner: dict[str, Any], faults: Faults, **settings: Any) -> dict[str, Any]:
    """A kv_transfer_config for an engine in this process."""
    return {
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"inner": inner, "faults": faults},
        **settings,
    }


def _parts(context: TransferContext) -> tuple[TransferContext, Faults]:
    extra = context.config.kv_connector_extra_config
    config = KVTransferConfig.parse({"kv_role": context.config.kv_role, **extra["inner"]})
    return dataclasses.replace(context, config=config), extra["faults"]
