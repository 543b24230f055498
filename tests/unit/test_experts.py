"""Routing and products of experts: the reference by definition, and the kernels against it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.interpreter import interpreted

from fleetfoot.config.model import RouterSpec
from fleetfoot.kernels.experts import experts as experts_module
from fleetfoot.kernels.experts import experts_triton, tilings
from fleetfoot.kernels.experts.experts import (
    ExpertPlacement,
    ExpertSizes,
    Routing,
    SharedExpert,
    TorchExperts,
    activate_torch,
    add_shared_torch,
    local_routing_torch,
    route_torch,
)
from fleetfoot.kernels.experts.experts_triton import TritonExperts, add_shared_triton
from fleetfoot.kernels.experts.routing_triton import group, local_routing_triton, route_triton
from fleetfoot.kernels.experts.tilings import FEW_ROWS, OneTiling, choose_group_tiling
from fleetfoot.kernels.native_ops import NativeExperts, experts_native
from fleetfoot.kernels.quantized.packed import PackedMatrix, pack_words
from fleetfoot.kernels.quantized.scaled import ScaledMatrix
from fleetfoot.native.loading import load_library, native_problem

CPU = torch.device("cpu")
CLAMPED: dict[str, Any] = {"has_bias": True, "activation": "clamped", "alpha": 1.7, "limit": 1.0}
GROUPS = RouterSpec("sigmoid", True, 2.5, has_correction=True, num_groups=4, num_chosen_groups=2)
CASES: dict[str, tuple[ExpertSizes, int, RouterSpec]] = {
    "softmax of the chosen": (ExpertSizes(6, 64, 48), 2, RouterSpec()),
    "softmax of all": (ExpertSizes(16, 128, 32, is_interleaved=True, **CLAMPED), 4, RouterSpec(is_normalized=False)),
    "biases": (ExpertSizes(16, 48, 32, **CLAMPED), 3, RouterSpec(has_bias=True)),
    "groups": (ExpertSizes(20, 80, 16), 3, GROUPS),
    "inputs in steps": (ExpertSizes(16, 320, 16), 3, RouterSpec()),
    "sigmoid": (ExpertSizes(5, 64, 16), 5, RouterSpec("sigmoid", False, 0.5)),
}
BAD = 2
"""A row of NaN."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Layer:
    """Random experts, and a router."""

    def __init__(self, case: str, dtype: torch.dtype = torch.float32) -> None:
        self.sizes, self.num_chosen, self.router = CASES[case]
        self.experts = TorchExperts(self.sizes, dtype, CPU)
        for matrix in self.experts.matrices.values():
            matrix.copy_(torch.randn(matrix.shape) * matrix.shape[2] ** -0.5)
        for bias in self.experts.biases.values():
            if bias is not None:
                bias.copy_(torch.randn(bias.shape))
        weight = torch.randn(self.sizes.num_experts, self.sizes.hidden_size) * self.sizes.hidden_size**-0.5
        bias = torch.randn(len(weight)).to(dtype) if self.router.has_bias else None
        self.linear: Any = SimpleNamespace(dense=(weight.to(dtype), bias))
        self.correction = torch.randn(len(weight)) if self.router.has_correction else None
        self.dtype = dtype

    def other(self, kind: Callable[..., TorchExperts]) -> TorchExperts:
        """The same experts of another kind."""
        experts = kind(self.sizes, self.dtype, CPU)
        for name in ("gate_up", "down"):
            experts.open(name).copy_(self.experts.matrices[name])
            if (bias := self.experts.biases[name]) is not None:
                experts.biases[name].copy_(bias)  # type: ignore[union-attr]
        experts.close()
        return experts

    def inputs(self, rows: int) -> torch.Tensor:
        x = torch.randn(rows, self.sizes.hidden_size).to(self.dtype)
        x[BAD:][:1] = float("nan")
        return x

    def route(self, x: torch.Tensor, route: Callable[..., Routing] = route_torch) -> Routing:
        return route(x, self.linear, self.correction, self.router, self.num_chosen)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_by_definition(case: str) -> None:
    layer = Layer(case)
    x = layer.inputs(9)
    routing = layer.route(x)
    output = layer.experts(x, routing)
    assert (output.isnan().all(1) == x.isnan().all(1)).all()
    weight, bias = layer.linear.dense
    for row in [row for row in range(9) if row != BAD]:
        logits = weight @ x[row] + (0 if bias is None else bias)
        scores = logits.sigmoid() if layer.router.scores == "sigmoid" else logits.softmax(0)
        ranked = scores if layer.correction is None else scores + layer.correction
        if layer.router.num_groups > 1:
            groups = ranked.view(4, -1)
            eligible = groups.topk(2).values.sum(1).topk(2).indices.tolist()
            ranked = torch.where(torch.tensor([[index in eligible] for index in range(4)]), groups, -9).flatten()
        chosen = sorted(ranked.topk(layer.num_chosen).indices.tolist())
        assert routing.experts[row].tolist() == chosen
        weights = scores[chosen] / (scores[chosen].sum() if layer.router.is_normalized else 1) * layer.router.scale
        torch.testing.assert_close(routing.weights[row], weights)
        expected = torch.zeros_like(x[row])
        for expert, factor in zip(chosen, weights, strict=True):
            gate_up = layer.experts.open("gate_up", expert) @ x[row]
            if layer.sizes.has_bias:
                gate_up = gate_up + layer.experts.biases["gate_up"][expert]  # type: ignore[index]
            halves = (gate_up[::2], gate_up[1::2]) if layer.sizes.is_interleaved else gate_up.chunk(2)
            down = layer.experts.open("down", expert) @ activate_torch(*halves, layer.sizes)
            bias_of_down = layer.experts.biases["down"]
            expected += factor * (down if bias_of_down is None else down + bias_of_down[expert])
        torch.testing.assert_close(output[row], expected, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1, 70])
def test_kernels_equal_the_reference(case: str, rows: int) -> None:
    layer = Layer(case)
    x = layer.inputs(rows)
    expected, routing = layer.route(x), layer.route(x, route_triton)
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.weights, expected.weights, equal_nan=True)
    output = layer.other(TritonExperts)(x, routing)
    torch.testing.assert_close(output, layer.experts(x, expected), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(bool(native_problem()), reason="the C kernels are not built")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9])
def test_c_kernels_equal_the_reference(case: str, dtype: torch.dtype, rows: int) -> None:
    layer = Layer(case, dtype)
    x, native = layer.inputs(rows), layer.other(partial(experts_native, load_library()))
    assert isinstance(native, NativeExperts)
    routing = layer.route(x)
    bound = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(native(x, routing), layer.experts(x, routing), rtol=bound, atol=bound, equal_nan=True)

    # matrices can be opened again, one of an expert or all of them
    for name, matrix in layer.experts.matrices.items():
        assert torch.equal(native.open(name, 1), matrix[1])
        native.open(name, 1).mul_(2)
        native.close(1)
        matrix[1].mul_(2)
        assert torch.equal(native.open(name), matrix)
        native.open(name)[2].zero_()
        native.close()
        matrix[2].zero_()
    torch.testing.assert_close(native(x, routing), layer.experts(x, routing), rtol=bound, atol=bound, equal_nan=True)


@interpreted
@pytest.mark.parametrize("rows", [1, 20])
def test_the_shared_expert_is_added(rows: int) -> None:
    output, shared, x = torch.randn(3, rows, 72).unbind()
    gate = torch.randn(72)
    expected = add_shared_torch(output, shared, x, gate)
    torch.testing.assert_close(expected, output + shared * (x @ gate).sigmoid()[:, None])
    torch.testing.assert_close(add_shared_triton(output, shared, x, gate), expected)


@interpreted
def test_one_token_through_experts_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_triton, "_SPAN", 16)
    monkeypatch.setattr(experts_triton, "choose_one_tiling", lambda *, is_down: OneTiling(16, 1, 4))
    monkeypatch.setitem(CASES, "long", (ExpertSizes(4, 144, 144), 2, RouterSpec()))
    layer = Layer("long")
    x = layer.inputs(1)
    output = layer.other(TritonExperts)(x, layer.route(x, route_triton))
    torch.testing.assert_close(output, layer.experts(x, layer.route(x)), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("rows", [7, 40])
def test_kernels_in_bfloat16(rows: int) -> None:
    layer = Layer("softmax of the chosen", torch.bfloat16)
    x = layer.inputs(rows)
    output = layer.other(TritonExperts)(x, layer.route(x, route_triton))
    torch.testing.assert_close(output, layer.experts(x, layer.route(x)), rtol=0.03, atol=0.03, equal_nan=True)


def ranks_of(layer: Layer, spans: list[list[int]], kind: Callable[..., TorchExperts]) -> Iterator[Any]:
    """The experts of each rank with the experts ``spans``, and its placement, with the load of rank 0 counted."""
    num_experts = layer.sizes.num_experts
    owners = [
        [(rank, s) for rank, own in enumerate(spans) for s, e in enumerate(own) if e == x] for x in range(num_experts)
    ]
    most = max(map(len, owners))
    counts = torch.tensor([len(each) for each in owners], dtype=torch.int32)
    for rank, own in enumerate(spans):
        slots = torch.tensor(
            [[s if r == rank else -1 for r, s in each] + [-1] * (most - len(each)) for each in owners],
            dtype=torch.int32,
        )
        experts = kind(replace(layer.sizes, num_experts=len(own)), layer.dtype, CPU)
        for name in ("gate_up", "down"):
            experts.open(name).copy_(layer.experts.matrices[name][own])
            if (bias := layer.experts.biases[name]) is not None:
                experts.biases[name].copy_(bias[own])  # type: ignore[union-attr]
        load = torch.zeros(num_experts, dtype=torch.int32) if rank == 0 else None
        yield experts, ExpertPlacement(len(own), slots, counts, load)


@interpreted
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("case", ["softmax of the chosen", "biases", "groups"])
@pytest.mark.parametrize("is_triton", [False, True])
def test_ranks_with_some_of_the_experts_add_up(case: str, rows: int, is_triton: bool) -> None:
    """Three ranks, of which one has no expert of its own in the first case, with unequal numbers of slots; experts with
    two and three replicas, two of them on one rank."""
    layer = Layer(case)
    last = layer.sizes.num_experts - 1
    spans = [[last, 0, 0], [*range(1, last), 0], [last]]
    x, num_counted = layer.inputs(rows), torch.tensor([min(rows, 4)], dtype=torch.int32)
    whole = layer.route(x)
    given = layer.route(x, route_triton) if is_triton else whole
    padding = -torch.ones_like(whole.experts[:2])  # of another rank's tokens
    given, whole = (each._replace(experts=torch.cat((padding, each.experts[2:]))) for each in (given, whole))
    make_local = local_routing_triton if is_triton else local_routing_torch
    total = torch.zeros_like(x)
    for experts, placement in ranks_of(layer, spans, TritonExperts if is_triton else TorchExperts):
        routing = make_local(given, placement, None if placement.load is None else num_counted)
        expected = local_routing_torch(whole, replace(placement, load=None))
        assert torch.equal(routing.experts, expected.experts)
        torch.testing.assert_close(routing.weights, expected.weights, equal_nan=True)
        total += experts(x, routing)
        if placement.load is not None:
            counted = whole.experts[2:4].flatten().long().bincount(minlength=last + 1)
            assert placement.load.tolist() == counted.tolist()
    torch.testing.assert_close(
        total[2:],
        layer.experts(x[2:], whole._replace(experts=whole.experts[2:], weights=whole.weights[2:], grouping=None)),
        rtol=1e-5,
        atol=1e-5,
        equal_nan=True,
    )
    assert not total[:2].any()


@interpreted
@pytest.mark.parametrize("is_triton", [False, True])
def test_replicas_share_many_tokens_alone(is_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens read an expert's weights on one rank."""
    layer = Layer("softmax of the chosen")
    x = torch.randn(40, layer.sizes.hidden_size)
    given = layer.route(x, route_triton if is_triton else route_torch)
    make_local = local_routing_triton if is_triton else local_routing_torch
    placements = [placement for _, placement in ranks_of(layer, [[0, 1, 2], [3, 4, 5, 0, 1, 2]], TorchExperts)]

    def used() -> list[int]:
        """Slots of all ranks that get tokens."""
        return [
            int(each.experts[each.experts >= 0].unique().numel())
            for each in map(partial(make_local, given), placements)
        ]

    assert sum(used()) == layer.sizes.num_experts
    monkeypatch.setattr(experts_module, "_MOST_UNDIVIDED", 32)
    assert used() == [3, 6]


def scaled(rows: int, columns: int, dtype: torch.dtype, block: tuple[int, int]) -> ScaledMatrix:
    values = (torch.randn(rows, columns) * 40).clamp(-127, 127).to(dtype)
    scales = (torch.rand(rows // block[0], -(-columns // block[1])) + 0.5) * 3e-3
    return ScaledMatrix(values, scales, *block, "group")


def packed(rows: int, columns: int, group: int, zeros: bool, is_e2m1: bool = False) -> PackedMatrix:
    words = pack_words(torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
    scales = ((torch.rand(rows, -(-columns // group)) + 0.5) * 0.03).to(torch.bfloat16)
    if is_e2m1:
        scales = torch.randint(121, 125, (rows, -(-columns // 128) * 128 // group), dtype=torch.uint8)
    points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if zeros else None
    return PackedMatrix(words, scales, points, group, columns, is_e2m1)


FORMS: dict[str, Callable[[int, int], Any]] = {
    "fp8 in blocks": lambda rows, columns: scaled(rows, columns, torch.float8_e4m3fn, (16, 32)),
    "fp8 by output": lambda rows, columns: scaled(rows, columns, torch.float8_e4m3fn, (1, columns)),
    "int8 by output": lambda rows, columns: scaled(rows, columns, torch.int8, (1, columns)),
    "int4 with zeros": lambda rows, columns: packed(rows, columns, 64, True),
    "int4 by output": lambda rows, columns: packed(rows, columns, columns, False),
    "mxfp4": lambda rows, columns: packed(rows, columns, 32, False, True),
}


@interpreted
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "rows"), [("softmax of all", 1), ("groups", 7), ("softmax of all", 40)])
def test_quantized_kernels_equal_the_reference(form: str, case: str, rows: int) -> None:
    """And the reference the plain experts with the dequantized weights."""
    layer = Layer(case, torch.bfloat16)
    sizes = layer.sizes
    shapes = {"gate_up": (2 * sizes.size, sizes.hidden_size), "down": (sizes.hidden_size, sizes.size)}
    stacks = {name: FORMS[form](sizes.num_experts * shape[0], shape[1]) for name, shape in shapes.items()}
    quantized = [kind(sizes, torch.bfloat16, CPU, stacks) for kind in (TorchExperts, TritonExperts)]
    plain = TorchExperts(sizes, torch.float32, CPU)
    for name, stack in stacks.items():
        plain.matrices[name].copy_(stack.dequantized().view(plain.matrices[name].shape))
    for experts in (plain, *quantized):
        experts.biases = layer.experts.biases
    x = layer.inputs(rows)
    routing = layer.route(x, route_triton)
    expected = plain(x.float(), routing)
    reference, kernels = (experts(x, routing) for experts in quantized)
    assert (expected.isnan() == kernels.isnan()).all() and kernels.nan_to_num().abs().max() > 0.1
    torch.testing.assert_close(reference, expected.to(torch.bfloat16), rtol=0.01, atol=0.01, equal_nan=True)
    torch.testing.assert_close(kernels, expected.to(torch.bfloat16), rtol=0.03, atol=0.03, equal_nan=True)


@interpreted
@pytest.mark.parametrize("rows", [2, 7, FEW_ROWS])
def test_programs_share_the_choice_of_a_few_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routing and the slots are those of one program."""
    layer = Layer("inputs in steps")
    x = layer.inputs(rows)
    whole = layer.route(x, route_triton)
    monkeypatch.setattr(tilings, "_LEAST_DIVIDED", 0)
    divided = layer.route(x, route_triton)
    torch.testing.assert_close(divided[:2], whole[:2], equal_nan=True)
    count = int(whole.grouping.count)
    assert int(divided.grouping.count) == count
    assert torch.equal(divided.grouping.experts[:count], whole.grouping.experts[:count])
    weights = (each.grouping.weights[:count, :rows] for each in (divided, whole))
    torch.testing.assert_close(*weights, equal_nan=True)


SHARED = [("inputs in steps", 1, True), ("groups", 5, False), ("inputs in steps", 14, True)]


@interpreted
@pytest.mark.parametrize(
    ("form", "case", "rows", "is_gated"),
    [*(("plain", *each) for each in SHARED), *((form, *SHARED[number % 3]) for number, form in enumerate(FORMS))],
)
def test_a_shared_expert_joins_the_chosen_ones(form: str, case: str, rows: int, is_gated: bool) -> None:
    """Of few tokens: the reference's sum is that of layers of its own, and the kernels' is as the reference's."""
    layer = Layer(case, torch.bfloat16)
    sizes, x = layer.sizes, layer.inputs(rows)
    shapes = {"gate_up": (2 * sizes.size, sizes.hidden_size), "down": (sizes.hidden_size, sizes.size)}
    make = FORMS.get(form, lambda height, width: (torch.randn(height, width) * width**-0.5).to(torch.bfloat16))
    stacks = {name: make(sizes.num_experts * height, width) for name, (height, width) in shapes.items()}
    gate = (torch.randn(sizes.hidden_size) * sizes.hidden_size**-0.5).to(torch.bfloat16) if is_gated else None
    shared = SharedExpert(*(make(*shape) for shape in shapes.values()), gate)
    if form == "plain":
        plain, kernels = layer.experts, layer.other(TritonExperts)
    else:
        plain, kernels = (kind(sizes, torch.bfloat16, CPU, stacks) for kind in (TorchExperts, TritonExperts))

    arguments = x, layer.linear, layer.correction, layer.router, layer.num_chosen, shared
    routing, found = route_torch(*arguments), route_triton(*arguments)
    torch.testing.assert_close(found[:2], routing[:2], equal_nan=True)
    factor = torch.ones(rows, 1) if gate is None else (x.float() @ gate.float()).sigmoid()[:, None]
    dense = [each if isinstance(each, torch.Tensor) else each.dequantized() for each in (shared.gate_up, shared.down)]
    own = (
        activate_torch(*(x.float() @ dense[0].float().T).chunk(2, dim=1), sizes).bfloat16().float() @ dense[1].float().T
    )
    expected = (plain(x, layer.route(x)).float() + factor * own).bfloat16()
    bound = 0.02 * expected.nan_to_num().abs().max().item()
    assert (expected - plain(x, layer.route(x))).nan_to_num().abs().max() > bound
    near = partial(torch.testing.assert_close, expected=expected, rtol=0.03, atol=bound, equal_nan=True)
    near(plain.with_shared(x, routing, shared))
    assert kernels.can_join(rows, shared) and not kernels.can_join(FEW_ROWS + 1, shared)
    near(kernels.with_shared(x, found, shared))
    other = SharedExpert(make(4 * sizes.size, sizes.hidden_size), make(sizes.hidden_size, 2 * sizes.size), gate)
    assert not kernels.can_join(rows, other)


@interpreted
@pytest.mark.parametrize(("rows", "tile"), [(17, 16), (70, 16), (70, 64)])
def test_groups(rows: int, tile: int) -> None:
    """Each pair has one place, in a tile of its expert, in the order of tokens."""
    layer = Layer("groups")
    routing = layer.route(layer.inputs(rows), route_triton)
    groups = group(routing, layer.sizes.num_experts, tile)
    tiles, experts = groups.pairs.view(-1, tile).tolist(), routing.experts.flatten().tolist()
    used = [index for index, expert in enumerate(groups.experts.tolist()) if expert >= 0]
    assert used == list(range(len(used)))
    found = [pair for index in used for pair in tiles[index] if pair < len(experts)]
    assert sorted(found) == list(range(len(experts)))
    assert [experts[pair] for pair in found] == sorted(experts)
    for index in used:
        pairs = [pair for pair in tiles[index] if pair < len(experts)]
        assert pairs == sorted(pairs) and {experts[pair] for pair in pairs} == {int(groups.experts[index])}


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    sizes = ExpertSizes(128, 2048, 768)
    tiles = [choose_group_tiling(8 * rows, sizes, "plain", 2, 227 * 1024).rows for rows in (17, 64, 256, 1024, 8192)]
    assert tiles == sorted(tiles) and (tiles[0], tiles[-1]) == (16, 128)
    small = ExpertSizes(8, 64, 64)
    assert all(choose_group_tiling(64, small, "plain", 4, shared).num_stages >= 2 for shared in (48 << 10, 99 << 10))


@interpreted
def test_unsupported_sizes_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("softmax of the chosen")
    experts = TritonExperts(ExpertSizes(4, 24, 20), torch.float32, CPU)
    for matrix in experts.matrices.values():
        matrix.normal_()
    x = torch.randn(3, 24)
    routing = Routing(torch.tensor([[0, 2], [1, 3], [0, 1]], dtype=torch.int32), torch.rand(3, 2), object())
    monkeypatch.setattr(experts_triton, "group", None)
    assert torch.equal(experts(x, routing), TorchExperts.__call__(experts, x, routing))
    assert layer.route(torch.randn(0, 64), route_triton).experts.shape == (0, 2)
