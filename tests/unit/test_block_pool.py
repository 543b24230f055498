"""The KV block pool: owners, the prefix cache, and the order in which blocks are reused."""

import random
from array import array
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.scheduler.block_pool import BlockPool
from fleetfoot.scheduler.kv_blocks import extend_chain, root_hash

NAMES = "abcd"


def digest(name: object) -> bytes:
    return repr(name).encode()


def published(pool: BlockPool, *names: str) -> list[int]:
    """Blocks in use that are cached under ``names``."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, digest(name))
    return blocks


def lookup(pool: BlockPool, *names: str) -> list[int]:
    return pool.lookup([digest(name) for name in names])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"not {num_blocks} of {block_size}"):
        BlockPool(num_blocks, block_size)


def test_errors() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.take(1)
    with pytest.raises(RuntimeError, match="KV block 0 is not held and cannot be released"):
        pool.release(blocks)
    pool.hold(blocks)
    with pytest.raises(RuntimeError, match="KV block 0 was freed twice"):
        pool.free(blocks)
    with pytest.raises(RuntimeError, match="block 0 has 1 holds, 0 holders"):
        pool.check_integrity([blocks])
    pool.release(blocks)
    pool.check_integrity([])
    with pytest.raises(RuntimeError, match=f"KV block {blocks[0]} was freed twice"):
        pool.free(blocks)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._plain.append(pool._plain[0]), "is free twice"),
        (lambda pool: pool._plain.pop(), "is FREE with 0 references"),
        (lambda pool: pool._states.__setitem__(2, 1), "block 2 is FILLING with 0 references"),
        (
            lambda pool: pool._hashes.__setitem__(slice(None), [None] * 4),
            "kept for a cached prefix that it does not hold.*the hash of block 0 maps elsewhere",
        ),
    ],
    ids=["double free", "lost", "wrong state", "wrong hash"],
)
def test_a_corrupt_pool_is_found(corrupt: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(4, 4)
    pool.free(published(pool, "a"))
    pool.check_integrity([])
    corrupt(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity([])


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12), caching=st.booleans())
def test_against_a_plain_model(seed: int, num_blocks: int, caching: bool) -> None:
    """Owners take, share, publish, hold and free at random; every state, hit and count is that of a plain model."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 1, caching)
    owners: list[list[int]] = []
    holds: list[list[int]] = []
    ready: set[int] = set()  # blocks that were published or hit since they were taken
    cached: dict[str, int] = {}  # name -> the block that it hits
    hashed: set[int] = set()  # blocks that keep their first hash
    for _ in range(80):
        action = rng.choice(["take", "share", "publish", "free", "hold", "hold more", "release", "clear"])
        if action == "take":
            count = rng.randint(0, num_blocks)
            if count > pool.num_free:
                with pytest.raises(RuntimeError, match=f"{count} KV blocks requested, {pool.num_free} of"):
                    pool.take(count)
                continue
            taken = pool.take(count)
            assert len(set(taken)) == count
            assert not any(block in blocks for blocks in owners + holds for block in taken)
            ready.difference_update(taken)
            hashed.difference_update(taken)
            cached = {name: block for name, block in cached.items() if block not in taken}
            owners.append(taken)
        elif action == "share" and (hits := lookup(pool, rng.choice(NAMES))):
            assert pool.num_unreferenced(hits) == (not any(hits[0] in blocks for blocks in owners + holds))
            pool.share(hits)
            ready.update(hits)
            owners.append(hits)
        elif action == "publish" and any(owners + holds):
            block = rng.choice([block for blocks in owners + holds for block in blocks])
            name = rng.choice(NAMES)
            pool.publish(block, digest(name))
            if any(block in blocks for blocks in owners):
                ready.add(block)
            if caching and block not in hashed and name not in cached:
                cached[name] = block
                hashed.add(block)
        elif action == "free" and owners:
            pool.free(owners.pop(rng.randrange(len(owners))))
        elif action == "hold" and owners:  # the owner has ended, a step in flight has not
            holds.append(owners.pop(rng.randrange(len(owners))))
            pool.hold(holds[-1])
        elif action == "hold more" and owners:  # a connector reads the blocks, too
            holds.append(list(rng.choice(owners)))
            pool.hold(holds[-1], add_reference=True)
        elif action == "release" and holds:
            pool.release(holds.pop(rng.randrange(len(holds))))
        elif action == "clear" and rng.random() < 0.2:
            pool.clear_cache()
            cached.clear()
            hashed.clear()
        pool.check_integrity(owners + holds, holds)
        in_use, held = set(chain(*owners, *holds)), set(chain(*holds)) - set(chain(*owners))
        assert pool.num_free == num_blocks - len(in_use)
        assert [lookup(pool, name) for name in NAMES] == [[cached[n]] if n in cached else [] for n in NAMES]
        for block in range(num_blocks):
            owned = "READY" if block in ready else "FILLING"
            assert pool.state(block) == ("FREE" if block not in in_use else "HELD" if block in held else owned)
    for blocks in owners:
        pool.free(blocks)
    for blocks in holds:
        pool.release(blocks)
    assert sorted(pool.take(num_blocks)) == list(range(num_blocks))


def chain_of(parent: bytes, tokens: list[int], start: int, stop: int, block_size: int = 4) -> list[bytes]:
    return extend_chain(parent, array("i", tokens), start, stop, block_size)


def test_hashes_depend_on_all_tokens_before_and_on_the_salt() -> None:
    tokens, root = list(range(12)), root_hash(None)
    hashes = chain_of(root, tokens, 0, 12)
    assert len(set(hashes)) == 3
    assert chain_of(root, tokens, 0, 11) == hashes[:2]  # the rest of a block is left out
    assert chain_of(hashes[0], tokens, 4, 12) == hashes[1:]  # in parts or at once
    assert not set(chain_of(root, [99, *tokens[1:]], 0, 12)) & set(hashes)
    assert not set(chain_of(root, tokens[4:8] + tokens[:4], 0, 8)) & set(hashes)
    assert chain_of(root, tokens, 0, 3) == []
    assert len({root_hash(salt) for salt in (None, "a", "b", "ab", "a")}) == 4
    assert len({root_hash(salt, weights) for salt in (None, "a") for weights in ("", "a", "b")}) == 6


@pytest.mark.parametrize(("first", "second"), [([256, 0], [0, 1]), ([2**31 - 1, 0], [0, 2**31 - 1])])
def test_every_token_has_its_own_bytes(first: list[int], second: list[int]) -> None:
    root = root_hash(None)
    assert chain_of(root, first, 0, 2, 2) != chain_of(root, second, 0, 2, 2)
