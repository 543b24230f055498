"""Where experts are placed for the load that they have (DeepSeek's expert parallelism load balancer, EPLB). No torch.

Slots are places for an expert's matrices. Experts with much load get several, and the slots are packed onto ranks so
that the ranks have equal loads. Where the router chooses groups of experts first, whole groups are packed onto nodes
before, so that a token's experts are on few nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetfoot.config.json_fields import read_json_object

LEAST_GAIN = 0.05
"""Experts stay where they are unless the largest load of a rank falls by this part of it."""


def rebalanced(
    load: Sequence[float],
    placement: Sequence[int],
    slots: Sequence[range],
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> tuple[int, ...]:
    """The expert for each slot: ``placement`` itself, or a better one.

    Args:
        load: of each expert.
        placement: the expert in each slot at present.
        slots: of each rank; those of a node are consecutive.
        num_groups: groups of the router, each with equally many experts.
    """
    sizes = [len(own) for own in slots]
    found = keep_slots(place(load, sizes, num_groups=num_groups, num_nodes=num_nodes), placement, slots)
    before, after = (max(rank_loads(load, each, slots)) for each in (placement, found))
    return tuple(placement) if after >= before * (1 - LEAST_GAIN) else found


def place(load: Sequence[float], sizes: Sequence[int], *, num_groups: int = 1, num_nodes: int = 1) -> list[list[int]]:
    """The experts of each rank. ``sizes``: slots of each; together at least one for each expert."""
    per_node, per_group = len(sizes) // num_nodes, len(load) // num_groups
    nodes = [sizes[first : first + per_node] for first in range(0, len(sizes), per_node)]
    if num_groups % num_nodes or len(sizes) % num_nodes or len({sum(node) for node in nodes}) > 1:
        return place(load, sizes) if num_nodes > 1 else _place_on_node(load, range(len(load)), sizes)
    groups = [range(first, first + per_group) for first in range(0, len(load), per_group)]
    totals = [sum(load[expert] for expert in group) for group in groups]
    packs = pack(totals, range(num_groups), [num_groups // num_nodes] * num_nodes)
    ranks: list[list[int]] = []
    for node, pack_of_groups in zip(nodes, packs, strict=True):
        experts = [expert for group in sorted(pack_of_groups) for expert in groups[group]]
        ranks += _place_on_node(load, experts, node)
    return ranks


def _place_on_node(load: Sequence[float], experts: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    counts = replicate([load[expert] for expert in experts], sum(sizes))
    replicas = [expert for expert, count in zip(experts, counts, strict=True) for _ in range(count)]
    shares = [load[expert] / count for expert, count in zip(experts, counts, strict=True) for _ in range(count)]
    return [[replicas[item] for item in found] for found in pack(shares, replicas, sizes)]


def replicate(load: Sequence[float], num_slots: int) -> list[int]:
    """How many slots each expert gets, at least one, so that the largest load of a slot is as small as can be."""
    counts = [1] * len(load)
    for _ in range(num_slots - len(load)):
        counts[max(range(len(load)), key=lambda expert: (load[expert] / counts[expert], -counts[expert]))] += 1
    return counts


def pack(loads: Sequence[float], kinds: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Distribute items over packs with so many places each, the heaviest first, each to the lightest pack with room:
    the items of each pack. Items of the same kind are kept apart where there is room."""
    packs: list[list[int]] = [[] for _ in sizes]
    totals = [0.0] * len(sizes)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        free = [index for index, size in enumerate(sizes) if len(packs[index]) < size]
        apart = [index for index in free if all(kinds[other] != kinds[item] for other in packs[index])]
        lightest = min(apart or free, key=lambda index: totals[index])
        packs[lightest].append(item)
        totals[lightest] += loads[item]
    return packs


def keep_slots(ranks: Sequence[Sequence[int]], placement: Sequence[int], slots: Sequence[range]) -> tuple[int, ...]:
    """The expert for each slot, so that experts that stay on a rank stay in their slot."""
    found = list(placement)
    for own, experts in zip(slots, ranks, strict=True):
        coming = Counter(experts)
        free = []
        for slot in own:
            if coming[placement[slot]]:
                coming[placement[slot]] -= 1
            else:
                free.append(slot)
        for slot, expert in zip(free, coming.elements(), strict=True):
            found[slot] = expert
    return tuple(found)


def rank_loads(load: Sequence[float], placement: Sequence[int], slots: Sequence[range]) -> list[float]:
    """The load of each rank, whose slots share that of an expert evenly."""
    counts = Counter(placement)
    return [sum(load[placement[slot]] / counts[placement[slot]] for slot in own) for own in slots]


def read_placements(
    folder: Path, sizes: Mapping[int, int], slots: Mapping[int, Sequence[range]], *, setting: str
) -> dict[int, tuple[int, ...]]:
    """The expert for each slot of each layer, for the load in the files of a folder.

    Args:
        sizes: the number of experts of each layer.
        slots: of each layer and rank.
        setting: its name, for messages.

    Raises:
        ValueError: there are no such files, or they are not of these layers.
    """
    found: dict[int, list[float]] = {}
    for path in sorted(folder.glob("layers-*.json")):
        content = read_json_object(path, ValueError)
        try:
            found |= {int(layer): [float(each) for each in of["load"]] for layer, of in content["layers"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{setting} is {str(folder)!r}, and {path.name} has no load of layers: {error!r}"
            ) from error
    for layer, size in sizes.items():
        if len(found.get(layer, ())) != size:
            held = f"{len(found[layer])} experts" if layer in found else "nothing"
            raise ValueError(
                f"{setting} is {str(folder)!r}, which has {held} of layer {layer}, and the model has {size}; give the "
                "folder that an engine of the same model has saved"
            )
    first = {layer: tuple(slot % size for slot in range(slots[layer][-1].stop)) for layer, size in sizes.items()}
    return {layer: rebalanced(found[layer], first[layer], slots[layer]) for layer in sizes}


def balancedness(loads: Sequence[float]) -> float:
    """The mean of the ranks' loads by the largest: 1 if all are equal."""
    largest = max(loads)
    return sum(loads) / len(loads) / largest if largest else 1.0
