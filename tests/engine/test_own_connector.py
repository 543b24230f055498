"""A connector that is not Fleetfoot's own, named by its import path: it keeps KV blocks in a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.faulty_connector import WORKER_POINTS
from tests.helpers.prefill_decode import REQUESTS, RUNNERS, SIZE, settle, tokens_of

from fleetfoot import LLMEngine
from fleetfoot.kv_transfer.base.connector import KVConnector, TransferContext, WorkerConnector
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput

Block = tuple[bytes, int]
"""Its chain hash, and its place in the KV cache."""


@dataclass
class Store:
    """What both sides share in this test; they would talk to a server."""

    blocks: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)
    """Chain hash -> the block of each layer."""
    calls: list[str] = field(default_factory=list)


@dataclass
class Orders:
    """A step's metadata."""

    flush: list[Block] = field(default_factory=list)
    save: list[Block] = field(default_factory=list)
    load: dict[str, list[Block]] = field(default_factory=dict)


class DictScheduler(SchedulerConnector):
    def __init__(self, context: TransferContext) -> None:
        self._block_size = context.block_size
        self._store: Store = context.config.kv_connector_extra_config["store"]
        self._saved: set[bytes] = set(self._store.blocks)
        self._orders = Orders()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        self._store.calls.append("get_num_new_matched_tokens")
        first = last = num_computed_tokens // self._block_size
        while last < (request.num_tokens - 1) // self._block_size and request.block_hashes[last] in self._saved:
            last += 1
        return (last - first) * self._block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        self._store.calls.append("update_state_after_alloc")
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        self._orders.load[request.request_id] = _blocks(request, first, last)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        self._store.calls.append("blocks_filled")
        blocks = _blocks(request, first, last)
        (self._orders.save if by_this_step else self._orders.flush).extend(blocks)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._store.calls.append("request_finished")
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        self._store.calls.append("build_connector_meta")
        orders, self._orders = self._orders, Orders()
        # only the loads of later steps come behind what this step saves
        self._saved.update(block_hash for block_hash, _ in (*orders.flush, *orders.save))
        return orders

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._store.calls.append("update_connector_output")

    @property
    def has_pending(self) -> bool:
        return bool(self._orders.flush)


class DictWorker(WorkerConnector):
    """Copies on a CPU are over when they return; on a GPU, `kv_transfer.base.block_copies` has what is needed."""

    def __init__(self, context: TransferContext) -> None:
        self._store: Store = context.config.kv_connector_extra_config["store"]
        self._orders = Orders()
        self._caches: Sequence[torch.Tensor] = ()
        self._loaded: set[str] = set()

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._store.calls.append("register_kv_caches")
        self._caches = kv_caches

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._store.calls.append("bind_connector_metadata")
        assert metadata is None or isinstance(metadata, Orders)
        self._orders = metadata or Orders()

    def flush(self) -> None:
        self._store.calls.append("flush")
        self._copy_out(self._orders.flush)

    def start_load_kv(self) -> None:
        self._store.calls.append("start_load_kv")
        for request_id, blocks in self._orders.load.items():
            for block_hash, block_id in blocks:
                for cache, content in zip(self._caches, self._store.blocks[block_hash], strict=True):
                    cache[block_id] = content
            self._loaded.add(request_id)

    def save_kv(self) -> None:
        self._store.calls.append("save_kv")
        self._copy_out(self._orders.save)

    def wait_for_save(self) -> None:
        self._store.calls.append("wait_for_save")

    def wait_for_progress(self) -> None:
        self._store.calls.append("wait_for_progress")

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        self._store.calls.append("get_finished")
        loaded, self._loaded = self._loaded, set()
        return KVConnectorOutput(loaded=loaded, counters={"requests_loaded": len(loaded)} if loaded else {})

    def clear_connector_metadata(self) -> None:
        self._store.calls.append("clear_connector_metadata")
        self._orders = Orders()

    def shutdown(self) -> None:
        self._store.calls.append("shutdown")

    def _copy_out(self, blocks: list[Block]) -> None:
        for block_hash, block_id in blocks:
            self._store.blocks[block_hash] = [cache[block_id].clone() for cache in self._caches]


class DictConnector(KVConnector):
    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({"block-contiguous-hnd"})

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return DictScheduler(context)

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        return DictWorker(context)


def _blocks(request: Request, first: int, last: int) -> list[Block]:
    return list(zip(request.block_hashes[first:last], request.block_ids[first:last], strict=True))


EXPECTED_CALLS = [
    "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", *WORKER_POINTS[:3], "wait_for_progress", "save_kv", *WORKER_POINTS[-2:],
    "update_connector_output",
    "build_connector_meta", *WORKER_POINTS,
]  # fmt: skip
"""Of a request whose KV is loaded in an idle step, up to the end of its first step with a forward pass."""

# --- the tests ------------------------------------------------------------------------------------------------------


def start(model: Path, runner: str, store: Store, **settings: Any) -> LLMEngine:
    config = {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }
    return make_engine(model, runner=runner, kv_transfer_config=config, **{**SIZE, **settings})


@RUNNERS
@pytest.mark.parametrize("caching", [True, False])
def test_kv_goes_through_it(runner: str, caching: bool, text_model: Path, no_connector: dict[str, list[int]]) -> None:
    """Within an engine, and on to the next one."""
    store = Store()
    for _ in range(2):
        engine = start(text_model, runner, store, enable_prefix_caching=caching)
        assert engine.runner_name == runner
        outputs = run_requests(engine, REQUESTS)
        assert tokens_of(outputs) == no_connector
        num_loaded = settle(engine).get("requests_loaded", 0)
        assert engine.stats().transfers.loads_done == num_loaded
        engine.shutdown()
    assert num_loaded >= 4
    assert {name: output.num_cached_tokens for name, output in outputs.items()} == {
        "alone": 16, "one": 28, "two": 24, "tiny": 0, "long": 36,
    }  # fmt: skip


@RUNNERS
def test_what_it_loads_is_what_is_used(runner: str, text_model: Path, no_connector: dict[str, list[int]]) -> None:
    store = Store()
    engine = start(text_model, runner, store)
    run_requests(engine, REQUESTS)
    engine.shutdown()
    store.blocks = {block_hash: [-layer for layer in layers] for block_hash, layers in store.blocks.items()}
    other = start(text_model, runner, store)
    assert tokens_of(run_requests(other, {"long": REQUESTS["long"]}))["long"] != no_connector["long"]
    other.shutdown()


@RUNNERS
def test_the_order_of_its_calls(runner: str, text_model: Path) -> None:
    """As docs/kv_connectors.md has it. A step without a forward pass brings a request's KV, the next ones compute."""
    store = Store()
    engine = start(text_model, runner, store, async_scheduling=False)
    run_requests(engine, {"alone": REQUESTS["alone"]})
    engine.shutdown()
    store.calls.clear()
    engine = start(text_model, runner, store, async_scheduling=False)
    run_requests(engine, {"alone": REQUESTS["alone"]})
    engine.shutdown()
    calls = store.calls
    assert calls[0] == "register_kv_caches"
    begin = calls.index("get_num_new_matched_tokens")
    assert calls[begin : begin + len(EXPECTED_CALLS)] == EXPECTED_CALLS
    assert calls.count("bind_connector_metadata") == calls.count("clear_connector_metadata")
    assert calls.count("blocks_filled") > 0  # by what was generated
    assert calls.index("request_finished") > calls.index("update_connector_output")
    assert calls[-1] == "shutdown"
