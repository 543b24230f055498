"""The KV block pool: owners, the prefix cache, and the order in which blocks are given away."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.scheduler.kv_blocks import BlockPool, OutOfBlocksError, extend_chain, root_hash


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


def states(pool: BlockPool, blocks: list[int]) -> set[str]:
    return {pool.state(block) for block in blocks}


def test_blocks_are_taken_and_freed() -> None:
    pool = BlockPool(5, 4)
    assert pool.num_free == 5
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert states(pool, first + second) == {"FILLING"}
    pool.check_integrity([first, second])
    pool.free(first)
    assert pool.num_free == 2
    assert states(pool, first) == {"FREE"}
    pool.check_integrity([second])
    assert sorted(pool.take(2)) == sorted(first)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"not {num_blocks} of {block_size}"):
        BlockPool(num_blocks, block_size)


def test_errors() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.take(1)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks requested, 2 of 3 free"):
        pool.take(3)
    assert pool.num_free == 2
    assert pool.take(0) == []
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


def test_a_published_block_is_hit_while_in_use_and_after() -> None:
    pool = BlockPool(4, 4)
    blocks = published(pool, "a", "b")
    assert states(pool, blocks) == {"READY"}
    assert lookup(pool, "a", "b", "c") == blocks
    assert lookup(pool, "x", "a") == []  # a chain ends at the first missing block
    assert pool.num_unreferenced(blocks) == 0
    pool.share(blocks)
    pool.check_integrity([blocks, blocks])
    pool.free(blocks)
    assert pool.num_free == 2  # the second owner remains
    pool.free(blocks)
    assert pool.num_free == 4
    assert lookup(pool, "a", "b") == blocks
    assert pool.num_unreferenced(blocks) == 2
    pool.share(blocks)
    assert states(pool, blocks) == {"READY"}
    assert pool.num_free == 2
    pool.check_integrity([blocks])


def test_plain_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(5, 4)
    old, new = published(pool, "old1", "old2"), published(pool, "new1")
    plain = pool.take(2)
    pool.free(old)
    pool.free(new)
    pool.free(plain)
    assert pool.take(2) == plain  # the last block of a list is freed first, so its first one is taken first
    pool.share(lookup(pool, "old1"))  # a hit makes it the most recently used once it is free again
    pool.free(old[:1])
    assert pool.take(1) == [old[1]]  # of one prefix, the tail before the head
    assert lookup(pool, "old1", "old2") == [old[0]]
    assert pool.take(1) == new
    assert lookup(pool, "new1") == []
    assert pool.take(1) == [old[0]]
    assert lookup(pool, "old1") == []


def test_of_two_equal_blocks_the_first_is_cached_under_its_first_hash() -> None:
    pool = BlockPool(3, 4)
    first, second = published(pool, "a"), published(pool, "a")
    pool.publish(first[0], digest("b"))
    assert (lookup(pool, "a"), lookup(pool, "b")) == (first, [])
    pool.free(second)
    assert lookup(pool, "a") == first
    pool.check_integrity([first])
    assert pool.take(2)[0] == second[0]  # it holds no cached prefix


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 4, enable_caching=False)
    blocks = published(pool, "a")
    assert lookup(pool, "a") == []
    pool.free(blocks)
    pool.check_integrity([])


def test_held_blocks_are_not_free_until_they_are_released() -> None:
    pool = BlockPool(4, 4)
    alone, shared = pool.take(2), published(pool, "s")
    pool.share(shared)
    pool.hold(alone + shared)
    assert states(pool, alone) == {"HELD"}
    assert states(pool, shared) == {"READY"}  # it has another owner
    assert pool.num_free == 1
    pool.check_integrity([alone + shared, shared], [alone + shared])
    pool.release(alone + shared)
    assert pool.num_free == 3
    pool.check_integrity([shared])


def test_a_held_block_that_is_hit_has_an_owner_again() -> None:
    pool = BlockPool(2, 4)
    blocks = published(pool, "a")
    pool.hold(blocks)
    assert states(pool, blocks) == {"HELD"}
    pool.share(lookup(pool, "a"))
    assert states(pool, blocks) == {"READY"}
    pool.release(blocks)  # the step has retired
    assert (states(pool, blocks), pool.num_free) == ({"READY"}, 1)
    pool.check_integrity([blocks])


def test_blocks_have_several_holds() -> None:
    pool = BlockPool(3, 4)
    blocks = published(pool, "a", "b")
    pool.hold(blocks, add_reference=True)  # a connector reads them,
    assert states(pool, blocks) == {"READY"}
    pool.hold(blocks)  # then their request ends, with a step in flight
    assert states(pool, blocks) == {"HELD"}
    pool.check_integrity([blocks, blocks], [blocks, blocks])
    pool.release(blocks)
    assert states(pool, blocks) == {"HELD"}
    pool.share(blocks[:1])
    assert [pool.state(block) for block in blocks] == ["READY", "HELD"]
    pool.free(blocks[:1])
    assert states(pool, blocks) == {"HELD"}
    pool.publish(blocks[0], digest("c"))
    assert pool.state(blocks[0]) == "HELD"
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 3
    assert lookup(pool, "a", "b") == blocks
    pool.check_integrity([])


def test_clearing_the_cache_keeps_blocks_in_use() -> None:
    pool = BlockPool(4, 4)
    used, idle = published(pool, "used"), published(pool, "idle")
    pool.free(idle)
    pool.clear_cache()
    assert lookup(pool, "used") == lookup(pool, "idle") == []
    assert pool.num_free == 3
    pool.check_integrity([used])
    pool.free(used)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([], "has 1 references, 0 owners"),
        ([[0, 1], [0]], "block 0 has 1 references, 2 owners"),
        ([[0, 2]], "has 0 references, 1 owners"),
    ],
)
def test_wrong_owners_are_found(owners: list[list[int]], message: str) -> None:
    pool = BlockPool(3, 4)
    assert pool.take(2) == [0, 1]
    pool.check_integrity([[0], [1]])
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity(owners)


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


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12), caching=st.booleans())
def test_against_a_plain_model(seed: int, num_blocks: int, caching: bool) -> None:
    """Random owners take, share, publish and free; a dictionary of what each block holds must agree with every hit."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 1, caching)
    owners: list[list[int]] = []
    contents: dict[int, str] = {}  # block -> what was last published in it, until it is given away
    for _ in range(60):
        action = rng.choice(["take", "share", "publish", "free", "clear"])
        if action == "take":
            count = rng.randint(0, num_blocks)
            if count <= pool.num_free:
                blocks = pool.take(count)
                assert len(set(blocks)) == count
                assert not any(block in owned for owned in owners for block in blocks)
                for block in blocks:
                    contents.pop(block, None)
                owners.append(blocks)
            else:
                with pytest.raises(OutOfBlocksError):
                    pool.take(count)
        elif action == "share":
            found = lookup(pool, rng.choice("abcd"))
            if found:
                pool.share(found)
                owners.append(found)
        elif action == "publish" and owners and (blocks := rng.choice(owners)):
            block = rng.choice(blocks)
            if block not in contents:
                contents[block] = rng.choice("abcd")
                pool.publish(block, digest(contents[block]))
        elif action == "free" and owners:
            pool.free(owners.pop(rng.randrange(len(owners))))
        elif action == "clear" and rng.random() < 0.2:
            pool.clear_cache()
            contents = dict.fromkeys(contents, "cleared")
        for name in "abcd":
            found = lookup(pool, name)
            assert caching or not found
            assert all(contents[block] == name for block in found)
        pool.check_integrity(owners)
        assert pool.num_free == num_blocks - len({block for blocks in owners for block in blocks})
    for blocks in owners:
        pool.free(blocks)
    assert sorted(pool.take(num_blocks)) == list(range(num_blocks))


# --- block hashes ---------------------------------------------------------------------------------------------------


def chain(parent: bytes, tokens: list[int], start: int, stop: int, block_size: int = 4) -> list[bytes]:
    return extend_chain(parent, array("i", tokens), start, stop, block_size)


def test_hashes_depend_on_all_tokens_before() -> None:
    tokens = list(range(12))
    root = root_hash(None)
    hashes = chain(root, tokens, 0, 12)
    assert len(set(hashes)) == 3
    assert chain(root, tokens, 0, 11) == hashes[:2]  # the rest of a block is left out
    assert chain(hashes[0], tokens, 4, 12) == hashes[1:]  # in pieces or at once
    assert not set(chain(root, [99, *tokens[1:]], 0, 12)) & set(hashes)
    assert not set(chain(root, tokens[4:8] + tokens[:4], 0, 8)) & set(hashes)
    assert chain(root, tokens, 0, 3) == []


def test_salts_give_other_chains() -> None:
    roots = [root_hash(salt) for salt in (None, "a", "b", "ab")]
    assert len(set(roots)) == 4
    assert root_hash("a") == roots[1]


@pytest.mark.parametrize(("first", "second"), [([256, 0], [0, 1]), ([2**31 - 1, 0], [0, 2**31 - 1])])
def test_every_token_has_its_own_bytes(first: list[int], second: list[int]) -> None:
    root = root_hash(None)
    assert chain(root, first, 0, 2, 2) != chain(root, second, 0, 2, 2)
