"""Connectors that are written with vLLM's names, around `ExampleConnector`: with faults, with slow loads, and one that
records what it gets."""

import dataclasses
from typing import Any

import torch
from fleetfoot.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from fleetfoot.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.helpers.faulty_connector import Faults

POINTS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "take_events",
    "bind_connector_metadata", "handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_finished", "get_block_ids_with_load_errors", "clear_connector_metadata",
    "update_connector_output", "request_finished",
)  # fmt: skip
"""In the order of a step."""


def _hooked(point: str) -> Any:
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.faults.at(point)
        return getattr(ExampleConnector, point)(self, *arguments, **keywords)

    return call


class FaultyExample(ExampleConnector):
    """Setting ``faults``: a `Faults`; `POINTS` are its points, and ``loads`` is ``fail``, ``hold`` or nothing. With the
    setting ``asynchronous`` loads are."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.faults: Faults = vllm_config.kv_transfer_config.get_from_extra_config("faults", None) or Faults()
        self.is_async = vllm_config.kv_transfer_config.get_from_extra_config("asynchronous", False)
        self._ids: dict[str, list[int]] = {}
        self._started: set[str] = set()

    @classmethod
    def check_settings(cls, vllm_config: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.faults.at("get_num_new_matched_tokens")
        if self.faults.calls.count("get_num_new_matched_tokens") <= 2:
            return None, False  # not known yet
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, bool(count and self.is_async)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.faults.at("update_state_after_alloc")
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._ids[request.request_id] = self._loads[-1].block_ids

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.faults.at("build_connector_meta")
        metadata = super().build_connector_meta(scheduler_output)
        metadata.ids, self._ids = self._ids, {}
        return metadata

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.faults.at("get_finished")
        ids = self._get_connector_metadata().ids
        if self.faults.loads == "fail":
            self._invalid_block_ids.update(block for blocks in ids.values() for block in blocks)
        self._started |= ids.keys() if self.is_async else set()
        if self.faults.loads == "hold" and not self.faults.released.is_set():
            return None, None
        loaded, self._started = self._started, set()
        return set(), loaded


for point in POINTS:
    if point not in vars(FaultyExample):
        setattr(FaultyExample, point, _hooked(point))


class RecordingExample(ExampleConnector):
    """Appends each `SchedulerOutput` to the list in the setting ``steps``."""

    @classmethod
    def check_settings(cls, vllm_config: Any) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._kv_transfer_config.kv_connector_extra_config["steps"].append(scheduler_output)
        return super().build_connector_meta(scheduler_output)


class EitherExample(ExampleConnector):
    """Accepts both layouts, or that in the setting ``layout``; blocks are the second dimension of a view of the other
    one."""

    accepted_kv_layouts = ("NHD", "block-contiguous-hnd")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        return vllm_config.kv_transfer_config.get_from_extra_config("layout", None)

    @classmethod
    def check_settings(cls, vllm_config: Any) -> None: ...

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._blocks_first = next(iter(kv_caches.values())).shape[0] != 2
        super().register_kv_caches({name: self._view(kv_cache) for name, kv_cache in kv_caches.items()})

    def _view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        return kv_cache.permute(1, 0, 3, 2, 4) if self._blocks_first else kv_cache

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, self._view(kv_layer), attn_metadata, **kwargs)


@dataclasses.dataclass
class Record(KVConnectorMetadata):
    step: Any


class Recorder(KVConnectorBase_V1):
    """Appends what its methods get to the list in the setting ``records``, and holds requests that end until the
    setting ``released`` is set."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.records: list[tuple[str, Any]] = extra["records"]
        self.released = extra.get("released")
        self.held: set[str] = extra.setdefault("held", set())
        self.records.append((role.name, (vllm_config, kv_cache_config)))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.records.append(("kv_caches", {name: tuple(kv_cache.shape) for name, kv_cache in kv_caches.items()}))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.records.append(("allocated", (request.request_id, blocks, num_external_tokens)))

    def build_connector_meta(self, scheduler_output: Any) -> Record:
        self.records.append(("step", scheduler_output))
        return Record(scheduler_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = next(iter(forward_context.attn_metadata.values()))
        self.records.append(("slots", metadata.slot_mapping.tolist()))
        assert metadata.query_start_loc[-1] == metadata.num_actual_tokens == len(metadata.slot_mapping)
        assert [
            layer.kv_cache[forward_context.virtual_engine].shape for layer in forward_context.no_compile_layers.values()
        ]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The slots of the step are the ones that it has written."""
        slots = attn_metadata.slot_mapping
        written = kv_layer.flatten(1, 2)[:, slots]  # [2, num_tokens, num_kv_heads, head_dim]
        assert written.any(dim=(0, 2, 3)).all()

    def wait_for_save(self) -> None: ...

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.records.append(
            ("finished", (request.request_id, request.status.name, list(request.all_token_ids), block_ids))
        )
        self.held.add(request.request_id)
        return self.released is not None, {"seen": request.kv_transfer_params}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.released is None or not self.released.is_set():
            return None, None
        sent = set(self.held)
        self.held.clear()
        return sent, None

    def update_connector_output(self, connector_output: Any) -> None:
        self.records.append(("output", connector_output))
