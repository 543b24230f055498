"""Where experts go for the load that they have, against all possibilities."""

from itertools import chain, combinations_with_replacement, permutations
from random import Random

import pytest

from fleetfoot.distributed.placement import (
    LEAST_GAIN,
    balancedness,
    keep_slots,
    pack,
    place,
    rank_loads,
    rebalanced,
    replicate,
)


@pytest.mark.parametrize("seed", range(5))
def test_replicas_make_the_largest_load_of_a_slot_smallest(seed: int) -> None:
    random = Random(seed)
    load = [random.randint(0, 50) for _ in range(4)]
    for num_redundant in range(5):
        counts = replicate(load, 4 + num_redundant)
        assert sum(counts) == 4 + num_redundant and min(counts) == 1

        def largest(counts: list[int]) -> float:
            return max(load[expert] / count for expert, count in enumerate(counts))

        choices = combinations_with_replacement(range(4), num_redundant)
        assert largest(counts) == min(largest([1 + more.count(e) for e in range(4)]) for more in choices)


@pytest.mark.parametrize("seed", range(5))
def test_packs_are_nearly_as_even_as_can_be(seed: int) -> None:
    random = Random(seed)
    loads, sizes = [random.randint(1, 30) for _ in range(7)], [3, 2, 2]
    packs = pack(loads, range(7), sizes)
    assert [*map(len, packs)] == sizes and sorted(chain(*packs)) == [*range(7)]
    ends = [(0, 3), (3, 5), (5, 7)]
    best = min(max(sum(order[a:b]) for a, b in ends) for order in permutations(loads))
    assert best <= max(sum(loads[item] for item in items) for items in packs) <= 4 / 3 * best


def test_replicas_are_on_different_ranks() -> None:
    assert pack([5, 5, 5, 1, 1, 1], [0, 0, 0, 1, 2, 3], [2, 2, 2]) == [[0, 3], [1, 4], [2, 5]]
    assert pack([5, 5, 5], [0, 0, 0], [2, 1]) == [[0, 2], [1]]  # no room


@pytest.mark.parametrize("seed", range(4))
def test_groups_stay_on_a_node(seed: int) -> None:
    random = Random(seed)
    load = [random.random() for _ in range(16)]
    ranks = place(load, [5] * 4, num_groups=4, num_nodes=2)
    nodes = [{expert // 4 for rank in ranks[first : first + 2] for expert in rank} for first in (0, 2)]
    assert [*map(len, nodes)] == [2, 2] and not nodes[0] & nodes[1]
    held = {expert for rank in ranks for expert in rank}
    assert held == set(range(16)) and [*map(len, ranks)] == [5] * 4
    # groups that nodes cannot share evenly, or unequal nodes, are placed as a whole
    assert place(load, [5] * 4, num_groups=1, num_nodes=2) == place(load, [5] * 4)
    assert place(load, [5, 5, 5, 4], num_groups=4, num_nodes=2) == place(load, [5, 5, 5, 4])


def test_experts_that_stay_keep_their_slots() -> None:
    slots = [range(3), range(3, 5)]
    assert keep_slots([[4, 0, 1], [2, 3]], (0, 1, 2, 3, 4), slots) == (0, 1, 4, 3, 2)
    assert keep_slots([[2, 2, 1], [0, 0]], (0, 1, 2, 0, 1), slots) == (2, 1, 2, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_rebalancing_is_better_or_none(seed: int) -> None:
    random = Random(seed)
    slots = [range(6), range(6, 11), range(11, 16)]
    placement = tuple(slot % 12 for slot in range(16))
    for _ in range(20):
        load = [random.expovariate(1) for _ in range(12)]
        new = rebalanced(load, placement, slots)
        assert set(new) == set(range(12))
        before, after = (max(rank_loads(load, each, slots)) for each in (placement, new))
        assert new == placement or after <= before * (1 - LEAST_GAIN)
        placement = new
    assert rebalanced([0] * 12, placement, slots) == placement
    assert balancedness([1, 3]) == 2 / 3 and balancedness([0, 0]) == 1
