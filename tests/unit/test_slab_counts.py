"""Groups of layers without a model: their sizes, how many requests fit, and slabs against a plain model."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.schedulers import make_scheduler

from fleetfoot.records.kv_layout import (
    MOST_WASTE,
    ONE_GROUP,
    KVCacheSpec,
    KVGroup,
    KVLayout,
    LayerCacheSpec,
    StateSpec,
    make_groups,
    most_tokens,
    slabs_of,
)
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.scheduler.block_pool import BlockPools
from fleetfoot.scheduler.scheduler import Scheduler

GEMMA = tuple(KVCacheSpec(1, 256, None if layer % 6 == 5 else 512) for layer in range(26))
"""Gemma-3-1B."""
BLOCK = 16


def layout_of(specs: tuple[LayerCacheSpec, ...], num_bytes: int, max_model_len: int = 32768) -> KVLayout:
    groups = make_groups(specs, (), BLOCK, "bfloat16", max_model_len)
    one = KVLayout(1, BLOCK, "bfloat16", specs, groups=groups)
    return KVLayout(num_bytes // one.bytes_per_block - 1, BLOCK, "bfloat16", specs, groups=groups)


def request_of(number: int, length: int) -> Request:
    prompt = [(number * 7919 + position) % 50021 for position in range(length)]
    return Request(str(number), prompt, SamplingParams(max_tokens=400), max_tokens=400, seed=0)


@pytest.mark.parametrize(
    ("specs", "windows"),
    [
        (GEMMA, [None, 512]),
        ((KVCacheSpec(8, 128, 4096),) * 3, [None, 4096]),
        ((*[KVCacheSpec(4, 64)] * 3, *[KVCacheSpec(2, 128, 100)] * 2, KVCacheSpec(4, 64, 7)), [None, 7, 100]),
        ((*[StateSpec((16, 128, 128))] * 3, KVCacheSpec(2, 256)), [None, None]),
    ],
)
def test_blocks_fill_their_slabs(specs: tuple[LayerCacheSpec, ...], windows: list[int | None]) -> None:
    layout = layout_of(specs, 1 << 32)
    assert [group.window for group in layout.groups] == windows
    for group, size in zip(layout.groups, layout.group_bytes, strict=True):
        assert group.has_layers == (size > 0)
        assert layout.bytes_per_block % (16 * group.blocks_per_slab) == 0 or not size
        assert not size or size * group.blocks_per_slab >= (1 - MOST_WASTE) * layout.bytes_per_block


def test_windows_that_no_request_exceeds_are_none() -> None:
    assert make_groups(GEMMA, (), BLOCK, "bfloat16", 512) == ONE_GROUP


def steps(scheduler: Scheduler) -> Iterator[int]:
    """Run steps, and count those that decode in each."""
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, ModelRunnerOutput([[7]] * output.num_sampled))
        yield output.num_decodes


def test_gemma_runs_many_long_requests() -> None:
    """128 requests of 8,192 tokens in 4 GB: 18 with one group."""
    layout = layout_of(GEMMA, 4 * 10**9)
    limits = {"block_size": BLOCK, "max_num_seqs": 128, "max_num_batched_tokens": 8192, "enable_prefix_caching": False}
    scheduler = make_scheduler(num_blocks=layout.num_blocks, groups=layout.groups, **limits)
    for number in range(128):
        scheduler.add_request(request_of(number, 8192))
    most = max(num_decodes for num_decodes, _ in zip(steps(scheduler), range(140), strict=False))
    assert most >= 60
    scheduler.check_integrity()


def test_a_long_request_holds_its_windows_only() -> None:
    specs = tuple(KVCacheSpec(2, 64, None if layer % 6 == 5 else 1024) for layer in range(12))
    layout = layout_of(specs, 1 << 31, 131072)
    limits = {"block_size": BLOCK, "max_num_seqs": 2, "max_num_batched_tokens": 2048}
    scheduler = make_scheduler(
        request := request_of(0, 100_000), num_blocks=layout.num_blocks, groups=layout.groups, **limits
    )
    for _ in steps(scheduler):
        (window,) = request.group_block_ids or [[]]
        held = len(window) - sum(request.num_freed)
        assert held <= (1024 + 2048) // BLOCK + 1, "more than a window and a chunk"
        if len(request.output_token_ids) == 1:
            assert len(request.block_ids) == 6250 and held <= 1024 // BLOCK + 1
    assert len(request.output_token_ids) == 400


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    num_blocks=st.integers(1, 10),
    has_first=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_slabs_against_a_plain_model(sizes: list[int], num_blocks: int, has_first: bool, seed: int) -> None:
    """What is missing is never wrong: with nothing missing all blocks can be taken, and no block has two owners."""
    rng = random.Random(seed)
    groups = [KVGroup(blocks_per_slab=sizes[0] if has_first else 50, has_layers=has_first)]
    groups += [KVGroup(7, blocks_per_slab=size) for size in sizes[1:]]
    pools = BlockPools(num_blocks, 4, groups)
    owners: list[list[list[int]]] = []
    names = iter(range(10**6))
    for _ in range(60):
        action = rng.choice(["take", "take", "free", "publish", "share", "clear"])
        if action == "take":
            needs = [rng.randint(0, 6) for _ in groups]
            if pools.num_missing(needs) <= 0:
                owners.append(pools.take(needs))
                assert [len(blocks) for blocks in owners[-1]] == needs
        elif action == "free" and owners:
            pools.free(owners.pop(rng.randrange(len(owners))))
        elif action == "publish" and owners:
            for pool, blocks in zip(pools.all, rng.choice(owners), strict=True):
                for block in blocks:
                    pool.publish(block, str(next(names)).encode())
        elif action == "share":
            hits = [rng.sample(cached := sorted(pool._by_hash.values()), rng.randint(0, min(3, len(cached))))
                    for pool in pools.all]  # fmt: skip
            needs = [rng.randint(0, 4) for _ in groups]
            if pools.num_missing(needs, hits) <= 0:
                for pool, blocks in zip(pools.all, hits, strict=True):
                    pool.share(blocks)
                owners.append([shared + new for shared, new in zip(hits, pools.take(needs), strict=True)])
        elif action == "clear" and rng.random() < 0.2:
            pools.clear_cache()
        pools.check_integrity(owners)
        slabs = [
            {block // group.blocks_per_slab for lists in owners for block in lists[index]}
            for index, group in enumerate(groups)
            if group.has_layers
        ]
        assert sum(map(len, slabs)) == len(set().union(*slabs)) <= num_blocks, "a slab has two groups"
        assert 0 not in set().union(*slabs)
    for lists in owners:
        pools.free(lists)
    pools.clear_cache()
    assert pools.num_used == 0 and pools.num_missing([0] * len(groups)) == -num_blocks


def test_the_longest_request_that_fits() -> None:
    groups = (KVGroup(blocks_per_slab=2), KVGroup(window=8, blocks_per_slab=1))
    for num_blocks in range(1, 40):
        longest = most_tokens(groups, 4, num_blocks, 4)
        assert slabs_of(groups, 4, longest, 4) <= num_blocks < slabs_of(groups, 4, longest + 4, 4)
