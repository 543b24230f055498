"""Several connectors at once: all of them save, and each request is loaded by the one that has most of its KV."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fleetfoot.kv_transfer.base.connector import (
    ARENA,
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
    warn_of_unused_fields,
)
from fleetfoot.kv_transfer.base.registry import find_connector, part_configs
from fleetfoot.records.kv_layout import KVGroup, slab_of
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput
from fleetfoot.utils.process import run_all

if TYPE_CHECKING:
    import torch

    from fleetfoot.records.kv_layout import KVLayout


@dataclass(slots=True)
class MultiMetadata:
    """The metadata of all parts for a step."""

    parts: list[object | None]
    num_holds: dict[str, int] = field(default_factory=dict)
    """Requests that have ended -> how many parts hold their blocks."""


class MultiScheduler(SchedulerConnector):
    """The scheduler sides of all parts, in the order of the settings."""

    def __init__(self, parts: Sequence[SchedulerConnector], block_size: int, groups: Sequence[KVGroup]) -> None:
        self._parts = parts
        self._block_size, self._groups = block_size, groups
        self._chosen: dict[str, SchedulerConnector] = {}  # request -> the first part with the most tokens
        self._num_holds: dict[str, int] = {}

    def check_request(self, request: Request) -> None:
        for part in self._parts:
            if part.takes_params:
                part.check_request(request)
        if not self.takes_params:
            super().check_request(request)

    @property
    def takes_params(self) -> bool:
        return any(part.takes_params for part in self._parts)

    def inherit(self, previous: SchedulerConnector) -> None:
        assert isinstance(previous, MultiScheduler)
        for part, before in zip(self._parts, previous._parts, strict=True):
            part.inherit(before)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        found = [part.get_num_new_matched_tokens(request, num_computed_tokens) for part in self._parts]
        counts = [count for count in found if count is not None]
        if len(counts) < len(found):
            return None
        best = max(counts)
        if best:
            self._chosen[request.request_id] = self._parts[counts.index(best)]
        return best

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        chosen = self._chosen.pop(request.request_id)
        chosen.update_state_after_alloc(request, num_computed_tokens, num_external_tokens)
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        written = request.blocks_between(first, last)
        slabs = {slab_of(self._groups, group, block_id) for group, _, ids in written for block_id in ids}
        for part in self._parts:
            if part is not chosen:
                part.slabs_reused(sorted(slabs))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        for part in self._parts:
            part.blocks_filled(request, first, last, by_this_step=by_this_step)

    def holds_prompt(self, request: Request) -> bool:
        return any(part.holds_prompt(request) for part in self._parts)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        results = [part.request_finished(request) for part in self._parts]
        num_holds = sum(is_held for is_held, _ in results)
        if num_holds:
            self._num_holds[request.request_id] = num_holds
        merged = dict(ChainMap(*(params or {} for _, params in results)))  # the first part wins
        return num_holds > 0, merged or None

    def evict(self, request_id: str) -> bool:
        return any([part.evict(request_id) for part in self._parts])  # each part that holds the blocks

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata | None:
        for request_id in scheduler_output.finished_req_ids:
            self._chosen.pop(request_id, None)
        metadata = MultiMetadata([part.build_connector_meta(scheduler_output) for part in self._parts], self._num_holds)
        self._num_holds = {}
        if not metadata.num_holds and all(part is None for part in metadata.parts):
            return None
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for part in self._parts:
            part.update_connector_output(output)

    @property
    def has_pending(self) -> bool:
        return bool(self._num_holds) or any(part.has_pending for part in self._parts)

    def reset_cache(self, weights: str = "") -> None:
        self._chosen.clear()
        for part in self._parts:
            part.reset_cache(weights)

    def shutdown(self) -> None:
        run_all(*(part.shutdown for part in self._parts))


class MultiWorker(WorkerConnector):
    """The worker sides of all ``parts``, by the prefix of their counters, in the order of the settings."""

    def __init__(self, parts: dict[str, WorkerConnector]) -> None:
        self._named, self._parts = parts, list(parts.values())
        self._num_holds: dict[str, int] = {}
        self._num_sent: Counter[str] = Counter()

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        for part in self._parts:
            part.register_kv_caches(kv_caches, layout)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if metadata is None:
            metadata = MultiMetadata([None] * len(self._parts))
        if not isinstance(metadata, MultiMetadata):
            raise TypeError(f"KV connector metadata is a {type(metadata).__name__}; it must be MultiMetadata or None")
        self._num_holds.update(metadata.num_holds)
        for part, content in zip(self._parts, metadata.parts, strict=True):
            part.bind_connector_metadata(content)

    def flush(self) -> None:
        for part in self._parts:
            part.flush()

    def start_load_kv(self) -> None:
        for part in self._parts:
            part.start_load_kv()

    def save_kv(self) -> None:
        for part in self._parts:
            part.save_kv()

    def wait_for_save(self) -> None:
        for part in self._parts:
            part.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        merged = KVConnectorOutput()
        for name, part in self._named.items():
            output = part.get_finished(finished_req_ids)
            merged.loaded |= output.loaded
            merged.failed |= output.failed
            merged.addresses |= output.addresses
            merged.counters |= {f"{name}.{counter}": count for counter, count in output.counters.items()}
            self._num_sent.update(output.sent)
        for request_id, num_sent in list(self._num_sent.items()):
            if num_sent == self._num_holds.get(request_id):
                merged.sent.add(request_id)
                del self._num_sent[request_id], self._num_holds[request_id]
        return merged

    def clear_connector_metadata(self) -> None:
        run_all(*(part.clear_connector_metadata for part in self._parts))

    def wait_for_progress(self) -> None:
        for part in self._parts:
            part.wait_for_progress()

    def shutdown(self) -> None:
        run_all(*(part.shutdown for part in self._parts))


class MultiConnector(KVConnector):
    """Settings: ``connectors``, a list of kv_transfer_configs (`fleetfoot.kv_transfer.base.registry.part_configs`)."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        warn_of_unused_fields(context.config)
        for connector, part in _parts(context).values():
            connector.check_settings(part)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        sides = [connector.scheduler_side(part) for connector, part in _parts(context).values()]
        return MultiScheduler(sides, context.block_size, context.groups)

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        parts = _parts(context)
        return MultiWorker({name: connector.worker_side(part) for name, (connector, part) in parts.items()})


def _parts(context: TransferContext) -> dict[str, tuple[type[KVConnector], TransferContext]]:
    """Class and context of each part by its connector's name, with a number if the name is not unique."""
    found: dict[str, tuple[type[KVConnector], TransferContext]] = {}
    num_named: Counter[str] = Counter()
    for config in part_configs(context.config):
        name = str(config.kv_connector)
        num_named[name] += 1
        label = name if num_named[name] == 1 else f"{name}-{num_named[name]}"
        found[label] = find_connector(config), dataclasses.replace(context, config=config, shares_blocks=True)
    return found
