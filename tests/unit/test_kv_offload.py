"""Host memory: blocks are loaded bitwise equal, and the least recently used are evicted first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.kv_bench import BLOCK_SIZE, LAYOUT, Bench, same, transfer_config

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.blockstore.blocks import num_host_blocks
from fleetfoot.kv_transfer.blockstore.connector import BlockStoreScheduler, HostIndex, SlotTable

TOKENS = list(range(17))
OTHERS = list(range(100, 117))
BLOCKS = [3, 7, 1, 12, 5]
MakeBench = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make_bench(num_blocks: int = 8, *, role: str = "kv_both", num_ranks: int = 1) -> Bench:
        config = transfer_config("OffloadingConnector", role=role, num_cpu_blocks=num_blocks)
        benches.append(Bench(config, num_ranks=num_ranks))
        return benches[-1]

    yield make_bench
    for bench in benches:
        index_of(bench).check_integrity()
        bench.shutdown()


def index_of(bench: Bench) -> SlotTable:
    assert isinstance(bench.scheduler, BlockStoreScheduler) and isinstance(bench.scheduler.index, HostIndex)
    return bench.scheduler.index.slots


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_come_back(make: MakeBench, num_ranks: int) -> None:
    bench = make(num_ranks=num_ranks)
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 2)
    bench.save(request, 2, 4)
    contents = bench.contents(BLOCKS[:4])
    bench.scramble(BLOCKS)
    again = bench.request("again", TOKENS, [9, 8, 2, 0, 4])
    assert bench.load(again).loaded == {"again"}
    assert same(bench.contents([9, 8, 2, 0]), contents)
    assert bench.counters["blocks_saved"] == bench.counters["blocks_loaded"] == 4 * num_ranks
    bench.save(again, 0, 4)  # it is there already
    assert bench.counters["blocks_saved"] == 4 * num_ranks


def test_freed_blocks_are_flushed_before_they_are_overwritten(make: MakeBench) -> None:
    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    contents = bench.contents(BLOCKS[:4])
    bench.scheduler.blocks_filled(request, 0, 4, by_this_step=False)
    assert bench.scheduler.has_pending
    bench.step(during=lambda: bench.scramble(BLOCKS), new_blocks=BLOCKS)
    assert not bench.scheduler.has_pending
    assert bench.load(bench.request("again", TOKENS, [9, 8, 2, 0, 4])).loaded == {"again"}
    assert same(bench.contents([9, 8, 2, 0]), contents)


def test_a_flush_comes_before_a_load_into_the_same_blocks(make: MakeBench) -> None:
    bench = make()
    first, second = bench.request("first", TOKENS, BLOCKS), bench.request("second", OTHERS, BLOCKS)
    bench.save(second, 0, 4)
    of_second = bench.contents(BLOCKS[:4])
    bench.scramble(BLOCKS)
    of_first = bench.contents(BLOCKS[:4])
    bench.scheduler.blocks_filled(first, 0, 4, by_this_step=False)  # it is preempted, and its blocks go to the second
    assert bench.load(second).loaded == {"second"}
    assert same(bench.contents(BLOCKS[:4]), of_second)
    assert bench.load(bench.request("again", TOKENS, [9, 8, 2, 0, 4])).loaded == {"again"}
    assert same(bench.contents([9, 8, 2, 0]), of_first)


def test_what_a_step_stores_is_not_there_before_the_next(make: MakeBench) -> None:
    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    again = bench.request("again", TOKENS, [9, 8, 2, 0, 4])
    bench.scheduler.blocks_filled(request, 0, 2, by_this_step=True)
    assert bench.matched(again) == 0
    bench.step()
    assert bench.matched(again) == 8


def test_the_least_recently_used_go_and_of_a_prefix_the_end(make: MakeBench) -> None:
    bench = make(num_blocks=6)
    one, two = bench.request("one", TOKENS, BLOCKS), bench.request("two", OTHERS, [9, 8, 2, 0, 4])
    bench.save(one, 0, 4)
    bench.scheduler.request_finished(one)
    bench.save(two, 0, 4)
    bench.scheduler.request_finished(two)
    assert bench.matched(one) == 8
    assert bench.matched(two) == 16
    assert bench.load(one).loaded == {"one"}  # it is the more recent one now
    bench.save(bench.request("three", range(200, 213), [6, 10, 11]), 0, 2)
    assert bench.matched(one) == 8
    assert bench.matched(two) == 8


def test_a_slot_that_is_being_read_stays(make: MakeBench) -> None:
    bench = make(num_blocks=4)
    one, two = bench.request("one", TOKENS, BLOCKS), bench.request("two", OTHERS, [9, 8, 2, 0, 4])
    bench.save(one, 0, 4)
    contents = bench.contents(BLOCKS[:4])
    bench.begin(one)
    bench.scheduler.blocks_filled(two, 0, 4, by_this_step=True)  # every slot is pinned: none is left
    assert bench.step().loaded == {"one"}
    assert same(bench.contents(BLOCKS[:4]), contents)
    assert bench.matched(two) == 0
    bench.save(two, 0, 4)
    assert bench.matched(two) == 16


def test_a_store_that_was_lost_is_not_taken_for_kv(make: MakeBench) -> None:
    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    bench.scheduler.blocks_filled(request, 0, 4, by_this_step=True)

    def fail() -> None:
        raise RuntimeError("the forward pass")

    with pytest.raises(RuntimeError, match="the forward pass"):
        bench.step(during=fail)
    for step in bench.steps:
        step.abandon()
    failure = bench.load(bench.request("again", TOKENS, [9, 8, 2, 0, 4])).failed["again"]
    assert "does not hold KV block" in failure.reason
    assert bench.counters == {"loads_failed": 1}
    assert bench.matched(request) == 0  # the lost blocks are not matched again


def test_roles(make: MakeBench) -> None:
    for role, num_saved in (("kv_producer", 4), ("kv_consumer", 0)):
        bench = make(role=role)
        request = bench.request("r", TOKENS, BLOCKS)
        bench.save(request, 0, 4)
        assert len(index_of(bench)) == num_saved
        assert bench.matched(request) == 0


def test_reset_cache(make: MakeBench) -> None:
    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 2)
    bench.scheduler.blocks_filled(request, 2, 4, by_this_step=False)
    early = bench.request("early", TOKENS, [9, 8])
    bench.begin(early)
    bench.scheduler.reset_cache()
    assert bench.matched(request) == 0
    assert "does not hold KV block" in bench.until_ended(early).failed["early"].reason
    bench.save(request, 0, 4)
    again = bench.request("again", TOKENS, [9, 8, 2, 0, 4])
    contents = bench.contents(BLOCKS[:4])
    assert bench.load(again).loaded == {"again"}
    assert same(bench.contents([9, 8, 2, 0]), contents)


@pytest.mark.parametrize(
    ("extra", "num_ranks", "expected"),
    [
        ({"num_cpu_blocks": 5}, 1, 5),
        ({"cpu_bytes_to_use": 10 * LAYOUT.bytes_per_block}, 1, 10),
        ({"cpu_bytes_to_use": 10 * LAYOUT.bytes_per_block}, 2, 5),
        ({"cpu_bytes_to_use": float(11 * LAYOUT.bytes_per_block)}, 2, 5),
    ],
)
def test_size(extra: dict[str, Any], num_ranks: int, expected: int) -> None:
    assert num_host_blocks(context_with(extra, num_ranks)) == expected


def context_with(extra: dict[str, Any], num_ranks: int = 1) -> TransferContext:
    config = transfer_config("OffloadingConnector", **extra)
    return TransferContext(config, 4, "f", "e", num_ranks, bytes_per_block=num_ranks * LAYOUT.bytes_per_block)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_slots=st.integers(1, 12))
def test_whatever_happens_what_is_loaded_is_what_was_saved(seed: int, num_slots: int) -> None:
    """Random saves, flushes, loads and steps; every block's first value tells which tokens it stands for."""
    rng = random.Random(seed)
    bench = Bench(transfer_config("OffloadingConnector", num_cpu_blocks=num_slots))
    prompts = [[first, *range(first % 3, first % 3 + 12)] for first in range(4)]
    truth: dict[bytes, float] = {}
    for number in range(30):
        prompt = rng.choice(prompts)
        blocks = rng.sample(range(LAYOUT.num_blocks), 3)
        request = bench.request(f"r{number}", prompt, blocks)
        matched = bench.matched(request) // BLOCK_SIZE
        if matched and rng.random() < 0.6:
            bench.scheduler.update_state_after_alloc(request, 0, matched * BLOCK_SIZE)
            assert bench.until_ended(request).loaded == {request.request_id}
            for digest, block in zip(request.block_hashes[:matched], blocks, strict=False):
                assert all(bool((cache[block] == truth[digest]).all()) for cache in bench.caches[0])
        else:
            for digest, block in zip(request.block_hashes, blocks, strict=True):
                truth.setdefault(digest, rng.random())
                for cache in bench.caches[0]:
                    cache[block] = truth[digest]
            truth |= {digest: float(bench.caches[0][0][block].flatten()[0]) for digest, block in
                      zip(request.block_hashes, blocks, strict=True)}  # fmt: skip
            last = rng.randint(0, 3)
            bench.scheduler.blocks_filled(request, 0, last, by_this_step=rng.random() < 0.5)
            if rng.random() < 0.7:
                bench.scheduler.request_finished(request)
            bench.step()
            bench.scramble(blocks)
        index_of(bench).check_integrity()
        assert len(index_of(bench)) <= num_slots
    bench.shutdown()


# --- the index ------------------------------------------------------------------------------------------------------


def test_pinned_slots_are_not_given_away() -> None:
    index = SlotTable(2)
    first, second = index.add(b"1"), index.add(b"2")
    assert first is not None and second is not None
    index.pin(first)
    assert index.add(b"3") == second
    index.pin(second)
    assert index.add(b"4") is None
    index.remove(b"1")
    assert index.add(b"4") is None  # it is still pinned
    index.unpin(first)
    assert index.add(b"4") == first
    index.check_integrity()


def test_an_index_that_is_not_consistent_says_so() -> None:
    index = SlotTable(2)
    index.add(b"1")
    index._free.append(0)
    with pytest.raises(RuntimeError, match="not consistent"):
        index.check_integrity()
