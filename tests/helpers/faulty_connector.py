"""A KV connector around a real one, with faults that a test chooses."""

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
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure

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
    """The faults. Both sides share the object, so a test can change them, and set `released`, at any time."""

    raise_at: str = ""
    """One of SCHEDULER_POINTS or WORKER_POINTS, which raises."""
    on_call: int = 1
    """At which of its calls."""
    loads: str = ""
    """``fail``, ``time_out``: successful loads are reported as such failures. ``corrupt``: their blocks are also NaN.
    ``hold``: they are not reported before `released` is set."""
    holds: bool = False
    """The blocks of requests that end are held until `released` is set."""
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
    held: list[str]


class FaultyScheduler(SchedulerConnector):
    def __init__(self, inner: SchedulerConnector, faults: Faults, block_size: int) -> None:
        self._inner, self._faults, self._block_size = inner, faults, block_size
        self._loads: dict[str, list[int]] = {}
        self._held: list[str] = []
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
        if self._faults.holds:
            self._held.append(request.request_id)
            self._unsent.add(request.request_id)
        return self._faults.holds, self._inner.request_finished(request)[1]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        self._faults.at("build_connector_meta")
        metadata = FaultyMetadata(self._inner.build_connector_meta(scheduler_output), self._loads, self._held)
        self._loads, self._held = {}, []
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._faults.at("update_connector_output")
        self._unsent -= output.sent
        self._inner.update_connector_output(output)

    @property
    def has_pending(self) -> bool:
        return bool(self._held or self._loads or self._unsent) or self._inner.has_pending

    def reset_cache(self) -> None:
        self._inner.reset_cache()

    def shutdown(self) -> None:
        self._inner.shutdown()


class HookedWorker(WorkerConnector):
    """A worker side that calls `at` with the name of each method, then the same method of ``inner``."""

    def __init__(self, inner: WorkerConnector | None = None) -> None:
        self._inner = inner
        self.kv_caches: Sequence[torch.Tensor] = ()

    def at(self, point: str) -> None:
        pass

    def _forward(self, point: str, *arguments: Any) -> Any:
        self.at(point)
        return None if self._inner is None else getattr(self._inner, point)(*arguments)

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.kv_caches = kv_caches
        self._forward("register_kv_caches", kv_caches, layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._forward("bind_connector_metadata", metadata)

    def flush(self) -> None:
        self._forward("flush")

    def start_load_kv(self) -> None:
        self._forward("start_load_kv")

    def save_kv(self) -> None:
        self._forward("save_kv")

    def wait_for_save(self) -> None:
        self._forward("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        return self._forward("get_finished", finished_req_ids) or KVConnectorOutput()

    def clear_connector_metadata(self) -> None:
        self._forward("clear_connector_metadata")

    def wait_for_progress(self) -> None:
        self._forward("wait_for_progress")

    def shutdown(self) -> None:
        self._forward("shutdown")

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        for cache in self.kv_caches:
            cache[list(block_ids)] = float("nan")


class FaultyWorker(HookedWorker):
    def __init__(self, inner: WorkerConnector, faults: Faults) -> None:
        super().__init__(inner)
        self._faults = faults
        self._blocks: dict[str, list[int]] = {}
        self._delayed: set[str] = set()
        self._held: set[str] = set()

    def at(self, point: str) -> None:
        self._faults.at(point)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        inner = None  # a runner's own step, as in warm-up
        if metadata is not None:
            assert isinstance(metadata, FaultyMetadata)
            self._blocks |= metadata.loads
            self._held |= set(metadata.held)
            inner = metadata.inner
        super().bind_connector_metadata(inner)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = super().get_finished(finished_req_ids)
        kind = self._faults.loads
        if kind == "hold":
            self._delayed |= output.loaded
            output.loaded = set()
            if self._faults.released.is_set():
                output.loaded, self._delayed = self._delayed, set()
        elif kind:
            for request_id in output.loaded:
                output.failed[request_id] = TransferFailure(f"injected: {kind}", timed_out=kind == "time_out")
                if kind == "corrupt":
                    self.spoil(self._blocks[request_id])
            output.loaded = set()
        if self._faults.released.is_set():
            output.sent |= self._held
            self._held = set()
        return output


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


def inner_context(context: TransferContext) -> TransferContext:
    """The context of the connector in the setting ``inner``."""
    config = KVTransferConfig.parse(
        {"kv_role": context.config.kv_role, **context.config.kv_connector_extra_config["inner"]}
    )
    return dataclasses.replace(context, config=config)


def _parts(context: TransferContext) -> tuple[TransferContext, Faults]:
    return inner_context(context), context.config.kv_connector_extra_config["faults"]
