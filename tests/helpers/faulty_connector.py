"""A KV connector around a real one, with faults that a test chooses."""

import abc
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import (
    ARENA,
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    TransferContext,
    WorkerConnector,
)
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.kv_transfer.blockstore.blocks import BlockStoreMetadata
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, TransferFailure

SCHEDULER_POINTS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "blocks_filled", "request_finished",
    "build_connector_meta", "update_connector_output",
)  # fmt: skip
WORKER_POINTS = (
    "bind_connector_metadata", "flush", "start_load_kv", "save_kv", "wait_for_save", "get_finished",
    "clear_connector_metadata",
)  # fmt: skip
"""In the order of a step."""


def connector(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config."""
    settings = {"kv_connector_module_path": module, "kv_connector_extra_config": extra}
    return {"kv_connector": name, "kv_role": "kv_both", **settings}


OFFLOADING = connector("OffloadingConnector", num_cpu_blocks=400)
EXIT_CODE = 3
"""Of a worker that ends without a report."""


class InjectedError(RuntimeError):
    """Its constructor has two arguments, so it cannot be pickled."""

    def __init__(self, point: str, rank: int) -> None:
        super().__init__(f"injected at {point} on rank {rank}")


@dataclass
class Faults:
    """The faults. Both sides share the object, so a test can change them, and set `released`, at any time. Worker
    processes get the values in a dict instead: then only the worker side of one rank has faults."""

    raise_at: str = ""
    """One of SCHEDULER_POINTS or WORKER_POINTS, ``register_kv_caches``, ``flushes`` (a step that flushes blocks)
    or ``shutdown``, which raises."""
    on_call: int = 1
    """At which of its calls."""
    error: str = "InjectedError"
    """What is raised there: that, ``ValueError``, or ``exit``: the process ends; ``kill``: by SIGKILL."""
    once: str = ""
    """A file that is made by the first fault: with it, there is no other. Else each new worker has the fault again."""
    rank: int = 0
    loads: str = ""
    """``fail``, ``time_out``: successful loads are reported as such failures. ``corrupt``: their blocks are also NaN.
    ``hold``: they are not reported before `released` is set."""
    holds: bool = False
    """The blocks of requests that end are held until `released` is set."""
    released: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)
    """Every point, as it was called."""
    blocks: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)
    """Request -> the blocks that are loaded for it."""
    held: list[str] = field(default_factory=list)
    """All requests that were held, in order."""

    def at(self, point: str) -> None:
        self.calls.append(point)
        if point == self.raise_at and self.calls.count(point) == self.on_call:
            if self.once and os.path.exists(self.once):
                return
            if self.once:
                open(self.once, "x").close()
            if self.error == "exit":
                os._exit(EXIT_CODE)
            if self.error == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"injected at {point}") if self.error == "ValueError" else InjectedError(point, self.rank)


def world_rank(context: TransferContext) -> int:
    """Of a worker, also where each data-parallel rank is an engine for its connector."""
    return dist.get_rank() if dist.is_initialized() else context.rank


def _call(side: Any, point: str, *arguments: Any, **options: Any) -> Any:
    side.at(point)
    return None if side.inner is None else getattr(side.inner, point)(*arguments, **options)


def hooked(*points: str) -> Callable[[type], type]:
    """Gives a class methods that call `at` with their name, then the same method of ``inner``, if there is one."""

    def add_methods(side: type) -> type:
        for point in points:
            setattr(side, point, partialmethod(_call, point))
        return abc.update_abstractmethods(side)

    return add_methods


@hooked(*(point for point in WORKER_POINTS if point != "get_finished"), "wait_for_progress", "shutdown")
class HookedWorker(WorkerConnector):
    """A worker side that calls `at` with the name of each method, then the same method of ``inner``."""

    def __init__(self, inner: WorkerConnector | None = None) -> None:
        self.inner = inner
        self.kv_caches: Sequence[torch.Tensor] = ()

    def at(self, point: str) -> None: ...

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.kv_caches, self.layout = kv_caches, layout
        _call(self, "register_kv_caches", kv_caches, layout)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        return _call(self, "get_finished", finished_req_ids) or KVConnectorOutput()

    def spoil(self, blocks: Sequence[tuple[int, list[int]]]) -> None:
        """Fill blocks of groups with NaN."""
        for group, block_ids in blocks if self.kv_caches else ():
            is_arena = self.layout.name == ARENA
            for cache in [self.layout.group_views(self.kv_caches)[group]] if is_arena else self.kv_caches:
                cache[block_ids] = float("nan")


@hooked("get_num_new_matched_tokens", "blocks_filled", "build_connector_meta", "reset_cache", "shutdown")
class FaultyScheduler(SchedulerConnector):
    def __init__(self, inner: SchedulerConnector, faults: Faults, block_size: int) -> None:
        self.inner, self._faults, self._block_size = inner, faults, block_size
        self.at = faults.at
        self._unsent: set[str] = set()

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        _call(self, "update_state_after_alloc", request, num_computed_tokens, num_external_tokens)
        first, count = num_computed_tokens // self._block_size, num_external_tokens // self._block_size
        written = request.blocks_between(first, first + count)
        self._faults.blocks[request.request_id] = [(group, ids) for group, _, ids in written]

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        _, params = _call(self, "request_finished", request)
        if self._faults.holds:
            self._faults.held.append(request.request_id)
            self._unsent.add(request.request_id)
        return self._faults.holds, params

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        _call(self, "update_connector_output", output)
        self._unsent -= output.sent

    @property
    def has_pending(self) -> bool:
        return bool(self._unsent) or self.inner.has_pending


class FaultyWorker(HookedWorker):
    def __init__(self, inner: WorkerConnector | None, faults: Faults) -> None:
        super().__init__(inner)
        self.at, self._faults = faults.at, faults
        self._delayed: set[str] = set()
        self._num_sent = 0

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if isinstance(metadata, BlockStoreMetadata):
            for request_id, blocks in metadata.loads:
                self._faults.blocks[request_id] = [(block.group, [block.block_id]) for block in blocks]
            if metadata.flushes:
                self.at("flushes")
        super().bind_connector_metadata(metadata)

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
                    self.spoil(self._faults.blocks[request_id])
            output.loaded = set()
        if self._faults.released.is_set():
            output.sent |= set(self._faults.held[self._num_sent :])
            self._num_sent = len(self._faults.held)
        return output


class FaultyConnector(KVConnector):
    """``kv_connector_extra_config``: ``inner``, the kv_transfer_config of the real one; ``faults``, see `Faults`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        inner, faults = inner_context(context), context.config.kv_connector_extra_config["faults"]
        scheduler = find_connector(inner.config).scheduler_side(inner)
        return FaultyScheduler(scheduler, faults, context.block_size) if isinstance(faults, Faults) else scheduler

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        inner, faults = inner_context(context), context.config.kv_connector_extra_config["faults"]
        worker = find_connector(inner.config).worker_side(inner)
        if isinstance(faults, dict):
            if faults["rank"] != world_rank(context):
                return worker
            faults = Faults(**faults)
        return FaultyWorker(worker, faults)


def faulty(inner: dict[str, Any], faults: Faults | dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A kv_transfer_config."""
    return connector("FaultyConnector", __name__, inner=inner, faults=faults) | settings


def inner_context(context: TransferContext) -> TransferContext:
    """The context of the connector in the setting ``inner``."""
    inner = context.config.kv_connector_extra_config["inner"]
    config = KVTransferConfig.parse({"kv_role": context.config.kv_role, **inner})
    return dataclasses.replace(context, config=config)
