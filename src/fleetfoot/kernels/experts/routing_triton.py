"""Routing on a GPU: the router's product, the choice of experts, and what the products of experts read.

One kernel multiplies and chooses: programs compute parts of the logits of a tile of tokens, and the last one that is
done chooses. Sums are those of the same steps over the inputs for any number of tokens, so that a token's experts do
not depend on the batch.

Up to `FEW_ROWS` tokens, each distinct expert of the batch gets a slot, with its weight for each token, and nothing is
sorted. Beyond, a second kernel groups pairs of a token and an expert by experts, in tiles of a fixed number of rows.
How many slots and tiles are used only the device knows; there is memory for the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from fleetfoot.config.model import RouterSpec
from fleetfoot.kernels.experts.experts import (
    ExpertPlacement,
    RouterLinear,
    Routing,
    SharedExpert,
    local_routing_torch,
    route_torch,
    rows_in_turn,
)
from fleetfoot.kernels.experts.tilings import FEW_ROWS, choosing_rows, router_rows, router_splits
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.dry_tensors import real_memory
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_EXPERTS = 512
_AT_ONCE = 16  # parts of the logits that are loaded at once
_MOST_PAIRS = 8192  # pairs of experts that are compared at once
_MAX_TILES = 1 << 16
_MAX_COUNTED = 64  # tiles of counts that are added at once


@dataclass(frozen=True, slots=True)
class Slots:
    """The distinct experts of a batch of few tokens."""

    experts: torch.Tensor
    """``[num_slots]`` int32, in order; those from ``count`` on are not set."""
    weights: torch.Tensor
    """``[num_slots, FEW_ROWS]`` float32: of each token, 0 for those that the expert was not chosen for."""
    count: torch.Tensor
    """``[1]`` int32"""


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of tokens and experts by experts. Pair ``t * k + j`` is the j-th expert of token t."""

    pairs: torch.Tensor
    """``[num_tiles * rows]`` int32: the pairs of each tile, and the number of pairs in rows without one."""
    experts: torch.Tensor
    """``[num_tiles]`` int32: of each tile, -1 for tiles that are not used."""
    rows: int
    """Rows of a tile."""


class RouterShape(NamedTuple):
    """The constants of the kernel."""

    num_experts: int
    padded: int
    """``num_experts``, rounded up to a power of 2."""
    num_chosen: int
    is_sigmoid: bool
    is_normalized: bool
    scale: float
    has_bias: bool
    has_correction: bool
    num_groups: int
    num_chosen_groups: int
    shared: str
    """The factor of a shared expert: ``gated``, ``plain``: 1; empty: there is none."""
    row_size: int
    """``num_chosen`` and the shared expert."""
    num_inputs: int
    inputs: int
    """Inputs of a step of the product, of which there is a sum."""
    num_steps: int
    splits: int
    """Programs for a tile of tokens."""
    rows: int
    """Tokens of a product."""
    own_rows: int
    """Those of them that are computed; `few` tokens are divided, so that several programs choose."""
    all_rows: int
    """All tokens, rounded up to a power of 2, where they are divided; else 0."""
    are_ranked_at_once: bool
    """Whether each pair of experts is compared."""
    few: bool
    """Whether slots are made; else the experts of each tile are counted."""
    slot_rows: int
    overlap: bool


def route_triton(
    x: torch.Tensor,
    linear: RouterLinear,
    correction: torch.Tensor | None,
    router: RouterSpec,
    num_chosen: int,
    shared: SharedExpert | None = None,
) -> Routing:
    """See `route_torch`. A shared expert is for at most `FEW_ROWS` tokens."""
    dense = linear.dense
    if dense is None or dense[0].shape[0] > MAX_EXPERTS or x.dtype is not dense[0].dtype or not len(x):
        return route_torch(x, linear, correction, router, num_chosen, shared)
    weight, bias = dense
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_inputs = x.shape
    num_experts, device, num_sms = len(weight), x.device, gpu_limits(x.device).num_sms
    padded = max(16, next_power_of_2(num_experts))
    inputs = max(16, min(16384 // padded // x.element_size() * 2, 128))
    num_steps, few = cdiv(num_inputs, inputs), num_rows <= FEW_ROWS
    rows, splits = router_rows(num_rows, num_sms), router_splits(num_rows, num_steps, num_sms)
    own_rows = choosing_rows(num_rows, padded) if few and splits > 1 else rows
    num_tiles = cdiv(num_rows, own_rows)
    overlap = can_overlap(device)
    row_size, gate = num_chosen + (shared is not None), None if shared is None else shared.gate
    kind = "" if shared is None else "plain" if gate is None else "gated"
    shape = RouterShape(
        num_experts, padded, num_chosen, router.scores == "sigmoid", router.is_normalized, router.scale,
        bias is not None, correction is not None, router.num_groups, router.num_chosen_groups, kind, row_size,
        num_inputs, inputs, num_steps, splits, rows, own_rows,
        next_power_of_2(num_rows) if few and num_tiles > 1 else 0,
        own_rows * padded * padded <= _MOST_PAIRS, few, FEW_ROWS, overlap,
    )  # fmt: skip

    def integers(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=device)

    experts = integers(num_rows, row_size)
    weights = torch.empty(num_rows, row_size, dtype=torch.float32, device=device)
    parts = gate_parts = weights
    if shape.splits > 1:
        parts = torch.empty(num_steps, num_tiles * own_rows, padded, dtype=torch.float32, device=device)
    if shape.splits > 1 and gate is not None:
        gate_parts = torch.empty(num_steps, num_tiles * own_rows, dtype=torch.float32, device=device)
    all_weights = weights
    if shape.all_rows:
        all_weights = torch.empty(shape.all_rows, padded, dtype=torch.float32, device=device)
    num_slots = min(num_rows * num_chosen, num_experts) + row_size - num_chosen if few else 1
    slot_weights = torch.empty(num_slots, FEW_ROWS, dtype=torch.float32, device=device) if few else weights
    slots = Slots(integers(num_slots), slot_weights, integers(1))
    counts = slots.count if few else integers(num_tiles, padded)
    _route_kernel[(num_tiles, shape.splits)](
        experts, weights, all_weights, parts, arrivals(device), slots.experts, slots.weights, counts,
        x, weight, weight if bias is None else bias, weights if correction is None else correction,
        weight if gate is None else gate, gate_parts, num_rows, x.stride(0),
        shape=shape, at_once=_AT_ONCE if own_rows * padded <= 1024 else _AT_ONCE // 4,
        num_warps=8 if rows * padded > 4096 else 4, num_stages=3, **launch_options(overlap),
    )  # fmt: skip
    return Routing(experts, weights, slots if few else counts)


class LocalShape(NamedTuple):
    """The constants of the kernel that finds a rank's part of a routing."""

    num_experts: int
    padded_experts: int
    """``num_experts``, rounded up to a power of 2."""
    most_replicas: int
    padded: int
    """The rank's slots, rounded up to a power of 2."""
    num_chosen: int
    padded_chosen: int
    shared: str
    """As of `RouterShape`, like the next ones."""
    row_size: int
    few: bool
    slot_rows: int
    has_load: bool
    overlap: bool


def local_routing_triton(
    routing: Routing, placement: ExpertPlacement, num_counted: torch.Tensor | None = None
) -> Routing:
    """See `local_routing_torch`."""
    if routing.grouping is None:
        return local_routing_torch(routing, placement, num_counted)
    (num_rows, num_chosen), device = routing.experts.shape, routing.experts.device
    num_experts, most_replicas = placement.slots.shape
    few, padded = num_rows <= FEW_ROWS, max(16, next_power_of_2(placement.num_slots))
    rows = next_power_of_2(num_rows) if few else router_rows(num_rows, gpu_limits(device).num_sms)
    load = placement.load if num_counted is not None else None
    shape = LocalShape(
        num_experts, max(16, next_power_of_2(num_experts)), most_replicas, padded, num_chosen,
        next_power_of_2(num_chosen), "", num_chosen, few, FEW_ROWS, load is not None, can_overlap(device),
    )  # fmt: skip
    experts, weights = torch.empty_like(routing.experts), torch.empty_like(routing.weights)
    num_tiles = cdiv(num_rows, rows)
    num_slots = min(num_rows * num_chosen, placement.num_slots) if few else 1
    slots = Slots(
        torch.empty(num_slots, dtype=torch.int32, device=device),
        torch.empty(num_slots, FEW_ROWS, dtype=torch.float32, device=device) if few else weights,
        torch.empty(1, dtype=torch.int32, device=device),
    )
    counts = slots.count if few else torch.empty(num_tiles, padded, dtype=torch.int32, device=device)
    _local_kernel[(num_tiles,)](
        experts, weights, slots.experts, slots.weights, counts,
        routing.experts, routing.weights, placement.slots, placement.num_replicas,
        experts if load is None else load, experts if num_counted is None else num_counted,
        num_rows, rows_in_turn(num_rows),
        shape=shape, rows=rows, num_warps=8 if rows * (padded + shape.padded_experts) > 4096 else 4,
        **launch_options(shape.overlap),
    )  # fmt: skip
    return Routing(experts, weights, slots if few else counts)


@cache
def arrivals(device: torch.device) -> torch.Tensor:
    """``[_MAX_TILES]`` int32, zeros before and after each launch: counts programs whose results a last one adds."""
    with real_memory():
        return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def group(routing: Routing, num_experts: int, rows: int) -> Groups:
    """The pairs of more than `FEW_ROWS` tokens in tiles of as many ``rows``."""
    num_rows, num_chosen = routing.experts.shape
    counts, device = routing.grouping, routing.experts.device
    num_pairs = num_rows * num_chosen
    num_tiles = min(num_experts, num_pairs) + num_pairs // rows
    groups = Groups(
        torch.empty(num_tiles * rows, dtype=torch.int32, device=device),
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        rows,
    )
    num_programs, padded = counts.shape
    overlap = can_overlap(device)
    _group_kernel[(num_programs,)](
        groups.pairs, groups.experts, routing.experts, counts, num_rows, num_programs, num_tiles,
        num_experts=num_experts, padded=padded, num_chosen=num_chosen, rows=rows,
        tile_rows=router_rows(num_rows, gpu_limits(device).num_sms), counted=min(_MAX_COUNTED, 8192 // padded),
        overlap=overlap, num_warps=8, **launch_options(overlap),
    )  # fmt: skip
    return groups


@triton_kernel(unspecialized=("num_rows",))
def _route_kernel(
    experts_ptr, weights_ptr, all_weights_ptr, parts_ptr, arrivals_ptr, slot_experts_ptr, slot_weights_ptr, counts_ptr,
    x_ptr, weight_ptr, bias_ptr, correction_ptr, gate_ptr, gate_parts_ptr,
    num_rows, x_stride,
    shape: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    launch_dependents(shape.overlap)
    rows: tl.constexpr = shape.rows
    padded: tl.constexpr = shape.padded
    own_rows: tl.constexpr = shape.own_rows
    row = tl.program_id(0) * own_rows + tl.arange(0, rows)
    is_own = (tl.arange(0, rows) < own_rows) & (row < num_rows)
    expert = tl.arange(0, padded)
    column = tl.arange(0, shape.inputs)
    is_expert = expert < shape.num_experts
    weight_ptrs = weight_ptr + expert[:, None] * shape.num_inputs + column[None, :]  # [padded, inputs]
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_stride + column[None, :]  # [rows, inputs]
    total = tl.zeros((rows, padded), tl.float32)
    part_stride = tl.num_programs(0) * own_rows * padded
    part_ptrs = parts_ptr + row[:, None] * padded + expert[None, :]
    gate_total = tl.zeros((rows,), tl.float32)  # the logit of the shared expert's factor
    gate_stride = tl.num_programs(0) * own_rows
    if shape.splits == shape.num_steps:
        # One step: the weight is read while the kernel before still runs.
        begin = tl.program_id(1) * shape.inputs
        is_input = (column + begin < shape.num_inputs)[None, :]
        weight = tl.load(weight_ptrs + begin, mask=is_expert[:, None] & is_input, other=0.0)
        wait_for_inputs(shape.overlap)
        x = tl.load(x_ptrs + begin, mask=is_own[:, None] & is_input, other=0.0)
        total = tl.dot(x, weight.T, input_precision="ieee")
        if shape.shared == "gated":
            gate_total = _gate_products(x, gate_ptr + column + begin, is_input)
        if shape.splits > 1:
            tl.store(part_ptrs + tl.program_id(1) * part_stride, total, mask=is_own[:, None])
            if shape.shared == "gated":
                tl.store(gate_parts_ptr + tl.program_id(1) * gate_stride + row, gate_total, mask=is_own)
    else:
        wait_for_inputs(shape.overlap)
        first = tl.program_id(1) * shape.num_steps // shape.splits
        last = (tl.program_id(1) + 1) * shape.num_steps // shape.splits
        for index in tl.range(first, last):
            begin = index * shape.inputs
            is_input = (column + begin < shape.num_inputs)[None, :]
            x = tl.load(x_ptrs + begin, mask=is_own[:, None] & is_input, other=0.0)
            weight = tl.load(weight_ptrs + begin, mask=is_expert[:, None] & is_input, other=0.0)
            sums = tl.dot(x, weight.T, input_precision="ieee")
            if shape.shared == "gated":
                products = _gate_products(x, gate_ptr + column + begin, is_input)
                gate_total += products
                if shape.splits > 1:
                    tl.store(gate_parts_ptr + index * gate_stride + row, products, mask=is_own)
            if shape.splits > 1:
                tl.store(part_ptrs + index * part_stride, sums, mask=is_own[:, None])
            else:
                total += sums
    if shape.splits > 1:
        tl.debug_barrier()  # all threads have written their parts before one signals it
        if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == shape.splits - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            own_row = tl.program_id(0) * own_rows + tl.arange(0, own_rows)
            is_row = own_row < num_rows
            own_ptrs = parts_ptr + own_row[:, None] * padded + expert[None, :]
            logits = tl.zeros((own_rows, padded), tl.float32)
            gates = tl.zeros((own_rows,), tl.float32)
            for begin in tl.range(0, shape.num_steps, at_once, num_stages=1):
                for i in tl.static_range(at_once):
                    pointers = own_ptrs + (begin + i) * part_stride
                    is_part = is_row & (begin + i < shape.num_steps)
                    logits += tl.load(pointers, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
                    if shape.shared == "gated":
                        pointers = gate_parts_ptr + (begin + i) * gate_stride + own_row
                        gates += tl.load(pointers, mask=is_part, other=0.0, cache_modifier=".cg")
            _choose(
                logits, gates, own_row, num_rows, experts_ptr, weights_ptr, all_weights_ptr, arrivals_ptr,
                slot_experts_ptr, slot_weights_ptr, counts_ptr, bias_ptr, correction_ptr, own_rows, shape,
            )  # fmt: skip
    else:
        _choose(
            total, gate_total, row, num_rows, experts_ptr, weights_ptr, all_weights_ptr, arrivals_ptr,
            slot_experts_ptr, slot_weights_ptr, counts_ptr, bias_ptr, correction_ptr, rows, shape,
        )  # fmt: skip


@triton_kernel()
def _gate_products(x, gate_ptrs, is_input):
    """``[rows]``: the sum of ``x [rows, inputs]`` times a part of the shared expert's gate."""
    gate = tl.load(gate_ptrs[None, :], mask=is_input, other=0.0)
    return tl.sum(x.to(tl.float32) * gate.to(tl.float32), 1)


@triton_kernel()
def _choose(
    logits, gates, row, num_rows, experts_ptr, weights_ptr, all_weights_ptr, arrivals_ptr,
    slot_experts_ptr, slot_weights_ptr, counts_ptr, bias_ptr, correction_ptr, rows: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Choose and weight the experts of a tile, with sums ``logits [rows, padded]`` and ``gates [rows]``."""
    expert = tl.arange(0, shape.padded)
    is_expert = (expert < shape.num_experts)[None, :]
    lowest: tl.constexpr = float("-inf")
    if shape.has_bias:
        logits += tl.load(bias_ptr + expert, mask=expert < shape.num_experts, other=0.0).to(tl.float32)[None, :]
    is_valid = tl.min((tl.abs(logits) < float("inf")).to(tl.int32), 1)[:, None] > 0  # [rows, 1]
    logits = tl.where(is_valid, logits, 0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits)) if shape.is_sigmoid else logits
    ranked = scores
    if shape.has_correction:
        ranked += tl.load(correction_ptr + expert, mask=expert < shape.num_experts, other=0.0)[None, :]
    ranked = tl.where(is_expert, ranked, lowest)
    if shape.num_groups > 1:
        ranked = _of_best_groups(ranked, shape)
    if shape.are_ranked_at_once:
        # Each pair of experts is compared, which has no steps that wait for each other.
        others = ranked[:, None, :]
        is_before = (others > ranked[:, :, None]) | (
            (others == ranked[:, :, None]) & (expert[:, None] > expert[None, :])
        )
        chosen = (tl.sum(is_before.to(tl.int32), 2) < shape.num_chosen) & is_expert
    else:
        chosen = ranked != ranked  # none
        num_chosen: tl.constexpr = shape.num_chosen
        for _ in tl.static_range(num_chosen):
            left = tl.where(chosen | ~is_expert, float("nan"), ranked)
            best = tl.max(tl.where(left == left, left, lowest), 1)[:, None]
            # of equal ones the first; those of groups that are not eligible only if no others are left
            index = tl.min(tl.where(left == best, expert[None, :], shape.padded), 1)[:, None]
            chosen |= expert[None, :] == index
    if shape.is_sigmoid:
        weights = tl.where(chosen, scores, 0.0)
        if shape.is_normalized:
            weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    else:
        is_counted = chosen if shape.is_normalized else chosen | is_expert
        largest = tl.max(tl.where(is_counted, logits, lowest), 1)[:, None]
        powers = tl.where(is_counted, tl.exp(logits - largest), 0.0)
        weights = tl.where(chosen, powers, 0.0) / tl.sum(powers, 1)[:, None]
    weights = tl.where(is_valid, weights * shape.scale, float("nan"))
    chosen &= (row < num_rows)[:, None]
    _record(chosen, weights, row, experts_ptr, weights_ptr, counts_ptr, shape)
    factor = gates
    if shape.shared != "":
        factor = 1.0 / (1.0 + tl.exp(-gates)) if shape.shared == "gated" else tl.full((rows,), 1.0, tl.float32)
        factor = tl.where(tl.sum(is_valid.to(tl.int32), 1) > 0, factor, float("nan"))
        place = row * shape.row_size + shape.num_chosen
        tl.store(experts_ptr + place, tl.full((rows,), shape.num_experts, tl.int32), mask=row < num_rows)
        tl.store(weights_ptr + place, factor, mask=row < num_rows)
    if shape.few and shape.all_rows == 0:
        _make_slots(chosen, weights, factor, row, num_rows, slot_experts_ptr, slot_weights_ptr, counts_ptr, shape)
    elif shape.few:  # the last program that has chosen has the experts of all
        all_ptrs = all_weights_ptr + expert[None, :]
        tl.store(
            all_ptrs + row[:, None] * shape.padded, tl.where(chosen, weights, -1.0), mask=(row < num_rows)[:, None]
        )
        tl.debug_barrier()  # all threads have written before one signals it
        if tl.atomic_add(arrivals_ptr + tl.num_programs(0), 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(arrivals_ptr + tl.num_programs(0), 0)
            all_rows: tl.constexpr = shape.all_rows
            each = tl.arange(0, all_rows)
            is_row = each < num_rows
            pointers = all_ptrs + each[:, None] * shape.padded
            found = tl.load(pointers, mask=is_row[:, None], other=-1.0, cache_modifier=".cg")  # [all_rows, padded]
            factors = tl.zeros((all_rows,), tl.float32)
            if shape.shared != "":
                factor_ptrs = weights_ptr + each * shape.row_size + shape.num_chosen
                factors = tl.load(factor_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
            _make_slots(
                found != -1.0, found, factors, each, num_rows, slot_experts_ptr, slot_weights_ptr, counts_ptr, shape
            )  # fmt: skip


@triton_kernel()
def _record(chosen, weights, row, experts_ptr, weights_ptr, counts_ptr, shape: tl.constexpr):
    """Write the routing of a tile: ``chosen``, ``weights [rows, padded]``; of many tokens also the experts' counts."""
    expert = tl.arange(0, shape.padded)
    position = tl.cumsum(chosen.to(tl.int32), 1) - 1
    place = row[:, None] * shape.row_size + position
    tl.store(experts_ptr + place, tl.zeros_like(place) + expert[None, :], mask=chosen)
    tl.store(weights_ptr + place, weights, mask=chosen)
    if not shape.few:
        counts = tl.sum(chosen.to(tl.int32), 0)  # [padded]
        tl.store(counts_ptr + tl.program_id(0) * shape.padded + expert, counts)


@triton_kernel()
def _make_slots(
    chosen, weights, factor, row, num_rows, slot_experts_ptr, slot_weights_ptr, count_ptr, shape: tl.constexpr
):  # fmt: skip
    """Write the slots of a few tokens: ``chosen``, ``weights [rows, padded]``, ``factor [rows]`` of a shared expert."""
    expert = tl.arange(0, shape.padded)
    is_used = tl.sum(chosen.to(tl.int32), 0) > 0  # [padded]
    slot = tl.cumsum(is_used.to(tl.int32), 0) - 1
    count = tl.sum(is_used.to(tl.int32), 0)
    tl.store(slot_experts_ptr + slot, expert, mask=is_used)
    slot_ptrs = slot_weights_ptr + slot[None, :] * shape.slot_rows + row[:, None]
    tl.store(slot_ptrs, tl.where(chosen, weights, 0.0), mask=is_used[None, :] & (row[:, None] >= 0))
    if shape.shared != "":
        tl.store(slot_experts_ptr + count, shape.num_experts)
        tl.store(slot_weights_ptr + count * shape.slot_rows + row, tl.where(row < num_rows, factor, 0.0))
        count += 1
    tl.store(count_ptr, count)


@triton_kernel()
def _of_best_groups(ranked, shape: tl.constexpr):
    """``ranked [rows, padded]``, -inf for experts outside of the groups with the best sums of two."""
    lowest: tl.constexpr = float("-inf")
    expert = tl.arange(0, shape.padded)[None, :]
    per_group: tl.constexpr = shape.num_experts // shape.num_groups
    of_expert = expert // per_group
    sums = tl.zeros_like(ranked)
    num_groups: tl.constexpr = shape.num_groups
    for index in tl.static_range(num_groups):
        of_group = tl.where(of_expert == index, ranked, lowest)
        best = tl.max(of_group, 1)[:, None]
        first = tl.min(tl.where(of_group == best, expert, shape.padded), 1)[:, None]
        second = tl.max(tl.where(expert == first, lowest, of_group), 1)[:, None]
        sums = tl.where(of_expert == index, best + second, sums)
    eligible = ranked != ranked
    is_expert = expert < shape.num_experts
    num_chosen_groups: tl.constexpr = shape.num_chosen_groups
    for _ in tl.static_range(num_chosen_groups):
        left = tl.where(eligible | ~is_expert, lowest, sums)
        best = tl.max(left, 1)[:, None]
        index = tl.min(tl.where((left == best) & ~eligible, of_expert, shape.padded), 1)[:, None]
        eligible |= (of_expert == index) & is_expert
    return tl.where(eligible, ranked, lowest)


@triton_kernel(unspecialized=("num_rows", "in_turn"))
def _local_kernel(
    out_experts_ptr, out_weights_ptr, slot_experts_ptr, slot_weights_ptr, counts_ptr,
    experts_ptr, weights_ptr, slots_ptr, replicas_ptr, load_ptr, num_counted_ptr,
    num_rows, in_turn, shape: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """A rank's part of the routing of a tile of tokens."""
    launch_dependents(shape.overlap)
    padded: tl.constexpr = shape.padded
    padded_experts: tl.constexpr = shape.padded_experts
    padded_chosen: tl.constexpr = shape.padded_chosen
    num_chosen: tl.constexpr = shape.num_chosen
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    slot = tl.arange(0, padded)
    expert = tl.arange(0, padded_experts)
    chosen = tl.zeros((rows, padded), tl.int32)
    weights = tl.zeros((rows, padded), tl.float32)
    load = tl.zeros((rows, padded_experts), tl.int32)
    is_row = row < num_rows
    wait_for_inputs(shape.overlap)
    for j in tl.static_range(num_chosen):
        given = tl.load(experts_ptr + row * num_chosen + j, mask=is_row, other=-1)
        weight = tl.load(weights_ptr + row * num_chosen + j, mask=is_row, other=0.0)
        is_token = given >= 0
        replica = (row // in_turn + given) % tl.load(replicas_ptr + given, mask=is_token, other=1)
        found = tl.load(slots_ptr + given * shape.most_replicas + replica, mask=is_token, other=-1)
        is_here = found[:, None] == slot[None, :]
        chosen += is_here.to(tl.int32)
        weights = tl.where(is_here, weight[:, None], weights)
        if shape.has_load:
            load += (given[:, None] == expert[None, :]).to(tl.int32)
    if shape.has_load:
        is_counted = row < tl.minimum(tl.load(num_counted_ptr), num_rows)
        total = tl.sum(tl.where(is_counted[:, None], load, 0), 0)
        tl.atomic_add(load_ptr + expert, total, mask=total > 0, sem="relaxed")
    index = tl.arange(0, padded_chosen)[None, :]
    is_absent = (index >= tl.sum(chosen, 1)[:, None]) & (index < num_chosen) & is_row[:, None]
    place = row[:, None] * num_chosen + index
    tl.store(out_experts_ptr + place, tl.full((rows, padded_chosen), -1, tl.int32), mask=is_absent)
    tl.store(out_weights_ptr + place, tl.zeros((rows, padded_chosen), tl.float32), mask=is_absent)
    _record(chosen > 0, weights, row, out_experts_ptr, out_weights_ptr, counts_ptr, shape)
    if shape.few:
        none = tl.zeros((rows,), tl.float32)
        _make_slots(chosen > 0, weights, none, row, num_rows, slot_experts_ptr, slot_weights_ptr, counts_ptr, shape)


@triton_kernel(unspecialized=("num_rows", "num_programs", "num_tiles"))
def _group_kernel(
    pairs_ptr, tile_experts_ptr, experts_ptr, counts_ptr, num_rows, num_programs, num_tiles,
    num_experts: tl.constexpr, padded: tl.constexpr, num_chosen: tl.constexpr, rows: tl.constexpr,
    tile_rows: tl.constexpr, counted: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Write the pairs of ``tile_rows`` tokens to their places. ``counts [programs, padded]``: of each program's."""
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    program = tl.program_id(0)
    expert = tl.arange(0, padded)
    total = tl.zeros((padded,), tl.int32)
    before = tl.zeros((padded,), tl.int32)
    for first in tl.range(0, num_programs, counted, num_stages=1):
        index = first + tl.arange(0, counted)[:, None]
        counts = tl.load(counts_ptr + index * padded + expert[None, :], mask=index < num_programs, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(index < program, counts, 0), 0)
    tiles = (total + rows - 1) // rows
    ends = tl.cumsum(tiles, 0)
    offset = (ends - tiles) * rows  # of the first row of each expert

    row = program * tile_rows + tl.arange(0, tile_rows)
    chosen = tl.zeros((tile_rows, padded), tl.int32)
    for j in tl.static_range(num_chosen):
        found = tl.load(experts_ptr + row * num_chosen + j, mask=row < num_rows, other=-1)
        chosen += (found[:, None] == expert[None, :]).to(tl.int32)
    # a token's experts are in order
    pair = row[:, None] * num_chosen + tl.cumsum(chosen, 1) - 1
    place = (offset + before)[None, :] + tl.cumsum(chosen, 0) - 1
    tl.store(pairs_ptr + place, pair, mask=chosen > 0)

    # The programs share the rows without a pair, and the experts of tiles.
    per_program = (num_experts + num_programs - 1) // num_programs
    is_own = (expert >= program * per_program) & (expert < (program + 1) * per_program)
    for first in tl.range(0, rows, 16, num_stages=1):
        padding = total[:, None] + first + tl.arange(0, 16)[None, :]  # [padded, 16]
        is_padding = is_own[:, None] & (padding < (tiles * rows)[:, None])
        tl.store(pairs_ptr + offset[:, None] + padding, tl.zeros_like(padding) + num_rows * num_chosen, mask=is_padding)
    tiles_each = (num_tiles + num_programs - 1) // num_programs
    for first in tl.range(0, tiles_each, 16, num_stages=1):
        in_program = first + tl.arange(0, 16)
        tile = program * tiles_each + in_program
        of_tile = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        of_tile = tl.where(tile < tl.max(ends, 0), of_tile, -1)
        tl.store(tile_experts_ptr + tile, of_tile, mask=(in_program < tiles_each) & (tile < num_tiles))
