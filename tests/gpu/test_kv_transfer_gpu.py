"""KV connectors on a GPU: copies on a side stream keep their order with the steps; KV between two engines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kv_bench import Bench, same, transfer_config
from tests.helpers.kv_pair import Engine, skip_without
from tests.helpers.prefill_decode import REQUESTS, decodes, nixl, prefilled, settle, tokens_of

from fleetfoot.assets import embedded_model_path
from fleetfoot.kv_transfer.base.block_copies import CudaBlockCopies, HostMemory, block_copies
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout, make_groups
from fleetfoot.runner.base import allocate_kv_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda")
WINDOWS = tuple(KVCacheSpec(8, 128, window) for window in (64, None, 64, 64, 64))
SHAPES = {
    "plain": KVLayout(64, 16, "bfloat16", (KVCacheSpec(8, 128),) * 8),
    "with-drafter": KVLayout(64, 4, "float16", (*[KVCacheSpec(2, 64)] * 3, KVCacheSpec(1, 32))),
    "odd": KVLayout(16, 1, "float16", (KVCacheSpec(1, 3),) * 2),
    "groups": KVLayout(16, 16, "bfloat16", WINDOWS, groups=make_groups(WINDOWS, (), 16, "bfloat16", 1000)),
    "fp8": KVLayout(64, 16, "float8_e4m3fn", (KVCacheSpec(8, 128),) * 8),
}


def host_memory(num_units: int, layout: KVLayout) -> HostMemory:
    slots = zip([group.blocks_per_slab for group in layout.groups], layout.group_bytes, strict=True)
    return HostMemory(num_units, layout.bytes_per_block, [*slots], pinned=True, asked_by="")


@pytest.mark.parametrize(("shape", "group"), [*((shape, 0) for shape in SHAPES), ("groups", 1)])
def test_blocks_round_trip(shape: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SHAPES[shape]
    monkeypatch.setattr(
        "fleetfoot.kv_transfer.base.block_copies.STAGING_BYTES", 3 * layout.bytes_per_block
    )  # several turns
    caches = [torch.randn(size, device=GPU).to(getattr(torch, layout.dtype)) for size in layout.tensor_shapes]
    copies = block_copies(caches, layout)
    assert isinstance(copies, CudaBlockCopies)
    host = host_memory(12, layout)
    assert host.slots[group].is_pinned()
    views = [
        view for view, index in zip(layout.layer_views(caches), layout.group_of_layers, strict=True) if index == group
    ]
    before = [view.clone() for view in views]
    order, slots, targets = [5, 0, 9, 3, 2, 7, 11], [1, 2, 3, 9, 0, 11, 7], [4, 1, 8, 6, 10, 14, 15]
    copies.to_host(group, order, host, slots).synchronize()
    pieces = [view[3].contiguous().view(-1).view(torch.uint8).cpu() for view in before]
    assert torch.equal(host.slots[group][9], torch.cat(pieces))
    copies.from_host(group, host, slots, targets).synchronize()
    for view, was in zip(views, before, strict=True):
        assert torch.equal(view[targets].view(torch.uint8), was[order].view(torch.uint8))
        untouched = [block for block in range(layout.num_blocks) if block not in targets]
        assert torch.equal(view[untouched].view(torch.uint8), was[untouched].view(torch.uint8))
    copies.close()
    host.close()


def test_later_writes_do_not_reach_saved_blocks() -> None:
    """The copy waits for the writer before it, and the next writer for the copy; the host waits for neither."""
    layout = SHAPES["plain"]
    caches = allocate_kv_cache(layout, GPU)
    copies = block_copies(caches, layout)
    host = host_memory(64, layout)
    blocks, big = list(range(64)), torch.randn(4096, 4096, device=GPU)
    events = []
    for value in (1.0, 2.0):
        for _ in range(20):
            big = (big @ big).clamp(-1, 1)  # keeps the device busy
        for cache in caches:
            cache.fill_(value)
        events.append(copies.to_host(0, blocks, host, blocks))
        copies.fence([3, 99])
        for cache in caches:
            cache.fill_(-1.0)
    events[-1].synchronize()
    values = host.slots[0].view(torch.bfloat16)
    assert bool((values == 2.0).all())
    copies.to_host(0, blocks, host, blocks)  # what comes in waits for it, as they share blocks and slots
    copies.from_host(0, host, blocks, blocks).synchronize()
    copies.to_host(0, blocks, host, blocks).synchronize()
    assert bool((values == -1.0).all())
    values.fill_(2.0)
    copies.from_host(0, host, blocks, blocks).synchronize()
    assert all(bool((cache == 2.0).all()) for cache in caches)
    copies.close()
    host.close()


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SharedStorageConnector"])
def test_connectors(connector: str, tmp_path: Path) -> None:
    extra = {"num_cpu_blocks": 8} if connector == "OffloadingConnector" else {"shared_storage_path": str(tmp_path)}
    config = transfer_config(connector, **extra)
    tokens = list(range(17))
    bench = Bench(config, device=GPU)
    request = bench.request("r", tokens, [3, 7, 1, 12, 5])
    bench.save(request, 0, 3)
    contents = bench.contents([3, 7, 1, 12])
    bench.scheduler.blocks_filled(request, 3, 4, by_this_step=False)
    bench.step(during=lambda: bench.scramble([3, 7, 1, 12]), new_blocks=[3, 7, 1, 12])
    if connector == "SharedStorageConnector":
        bench.shutdown()
        bench = Bench(config, device=GPU)
    assert bench.load(bench.request("again", tokens, [9, 8, 2, 0, 4])).loaded == {"again"}
    assert same(bench.contents([9, 8, 2, 0]), contents)
    bench.shutdown()


BACKENDS = pytest.mark.parametrize("backend", ["tcp", "nixl"])


@pytest.fixture
def pair(backend: str) -> Iterator[tuple[Engine, Engine]]:
    """A producer, and a consumer that has room for one block at a time."""
    skip_without(backend)
    producer = Engine(backend=backend, device="cuda")
    consumer = Engine(backend=backend, device="cuda", extra={"buffer_bytes": 1, "num_threads": 1})
    yield producer, consumer
    consumer.shutdown()
    producer.shutdown()


@BACKENDS
def test_blocks_are_the_same_bits(pair: tuple[Engine, Engine], backend: str) -> None:
    """Also while the device's queue is full: held blocks are written before they are read."""
    producer, consumer = pair
    big = torch.randn(4096, 4096, device="cuda")
    for number in range(3):
        for _ in range(20):
            big = (big @ big).clamp(-1, 1)
        producer.scramble([3, 7, 1, 12])
        params = producer.hold(f"p{number}")
        untouched = consumer.contents([4, 5, 6])
        assert consumer.load(consumer.remote(params, f"r{number}")).loaded == {f"r{number}"}
        assert same(consumer.contents([9, 8, 2, 0]), producer.contents([3, 7, 1, 12]))
        assert same(consumer.contents([4, 5, 6]), untouched)
        producer.until_sent(f"p{number}")


@BACKENDS
def test_tokens_are_of_one_engine(runner: str, backend: str) -> None:
    skip_without(backend)
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "model_runner": runner,
        "skip_tokenizer_init": True,
    }
    settings |= {"block_size": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64}
    alone = make_engine(embedded_model_path(), **settings)
    expected = tokens_of(run_requests(alone, REQUESTS))
    alone.shutdown()
    producer, consumer = [
        make_engine(embedded_model_path(), kv_transfer_config=nixl(role, backend=backend), **settings)
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        assert tokens_of(run_requests(consumer, decodes(prefilled(producer)))) == expected
        settle(producer)
        settle(consumer)
        stats = consumer.stats().transfers
        assert stats.loads_done >= 3 and stats.loads_failed == 0
    finally:
        consumer.shutdown()
        producer.shutdown()
