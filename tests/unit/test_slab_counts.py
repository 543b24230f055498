"""Groups of layers without a model: their sizes, how many requests fit, and slabs against a plain model."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.records.kv_layout import (
    KVGroup,
)
from fleetfoot.scheduler.block_pool import BlockPools


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
