"""Mixtures of experts: which experts each token gets, and their products. The references in torch.

The experts of a token are in the order of their numbers, and their outputs are added in that order, whatever else is in
the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from fleetfoot.config.model import RouterSpec
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.scaled import ScaledMatrix

_MAX_GATHERED = 1 << 27
"""Weights that `TorchExperts` gathers at once on a GPU."""
_MOST_UNDIVIDED = 512
"""Tokens that the replicas of an expert do not share: reading its weights once more takes longer than multiplying."""
_SMALLEST_SUM = 1e-20
"""Added to the sum of weights by which they are divided."""


Stacks = Mapping[str, ScaledMatrix | PackedMatrix]
"""Quantized matrices, ``gate_up`` and ``down``, each with the rows of all experts, one below the other."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of a layer on one rank."""

    num_experts: int
    hidden_size: int
    size: int
    """Intermediate size of an expert on this rank."""
    has_bias: bool = False
    is_interleaved: bool = False
    """Whether gate ``i`` is row ``2 * i`` of the first matrix, and its up row ``2 * i + 1``; else all gates are first.
    """
    activation: str = "silu"
    """See `ExpertsSpec`, as for ``alpha`` and ``limit``."""
    alpha: float = 1.0
    limit: float = 0.0


class RouterLinear(Protocol):
    """The linear layer of a router: a `LinearWeight`."""

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None: ...

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor: ...


Matrix = torch.Tensor | ScaledMatrix | PackedMatrix
"""A weight ``[out, in]``."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token has, beside those that are chosen for it, in their form."""

    gate_up: Matrix
    """``[2 * size, hidden]``, all gates first."""
    down: Matrix
    """``[hidden, size]``"""
    gate: torch.Tensor | None
    """``[hidden]``: the output's factor is ``sigmoid(x @ gate)``; None: it is 1."""


class Routing(NamedTuple):
    """The experts of each token, in the order of their numbers, and their weights. A shared expert is the last one, and
    has the number of the experts."""

    experts: torch.Tensor
    """``[n, k]`` int32; of a `local_routing` slots, and -1 at the end of a row for each expert of another rank."""
    weights: torch.Tensor
    """``[n, k]`` float32; NaN in all of a row where the router's logits are not finite."""
    grouping: Any = None
    """What kernels need besides."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where the experts of a layer are. The tensors stay at their addresses; what is written to them counts from the
    next step on."""

    num_slots: int
    """Places for an expert's matrices on this rank."""
    slots: torch.Tensor
    """``[num_experts, most_replicas]`` int32: of each replica the slot on this rank, -1: another rank has it."""
    num_replicas: torch.Tensor
    """``[num_experts]`` int32"""
    load: torch.Tensor | None = None
    """``[num_experts]`` int32: how often each was chosen, which is added to; None: nobody counts."""


def local_routing_torch(
    routing: Routing, placement: ExpertPlacement, num_counted: torch.Tensor | None = None
) -> Routing:
    """The part of a routing that this rank computes, by slots. Tokens that are many take turns at an expert's replicas.
    Those of padding have experts -1.

    ``num_counted``: ``[1]`` int32: tokens at the front that count as load; None: none.
    """
    is_token, experts = routing.experts >= 0, routing.experts.clamp(min=0).long()  # [n, k]
    rows = torch.arange(len(experts), device=experts.device)[:, None]
    if placement.load is not None and num_counted is not None:
        is_counted = ((rows < num_counted) & is_token).to(torch.int32)
        placement.load.index_add_(0, experts.flatten(), is_counted.flatten())
    turns = rows // rows_in_turn(len(experts))
    slots = placement.slots[experts, (turns + experts) % placement.num_replicas[experts]]
    slots = torch.where(is_token, slots, -1)
    slots, order = torch.where(slots >= 0, slots, placement.num_slots).sort(dim=1, stable=True)
    is_here = slots < placement.num_slots
    weights = torch.where(is_here, routing.weights.gather(1, order), 0.0)
    return Routing(torch.where(is_here, slots, -1), weights)


def rows_in_turn(num_rows: int) -> int:
    """Tokens in a row that have the same replica of an expert."""
    return 1 if num_rows > _MOST_UNDIVIDED else max(1, num_rows)


def router_logits(x: torch.Tensor, linear: RouterLinear) -> torch.Tensor:
    """``x [n, hidden]`` -> ``[n, num_experts]`` float32."""
    if linear.dense is None:
        return linear.apply_unrounded(x).float()
    weight, bias = linear.dense
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def route_torch(
    x: torch.Tensor,
    linear: RouterLinear,
    correction: torch.Tensor | None,
    router: RouterSpec,
    num_chosen: int,
    shared: SharedExpert | None = None,
) -> Routing:
    """The experts of ``x [n, hidden]``.

    Args:
        linear: makes the logits.
        correction: ``[num_experts]`` float32, added to the scores for the choice alone.
        shared: one more of each token; None: there is none, or it is added to the output of the chosen ones.
    """
    logits = router_logits(x, linear)
    num_rows, num_experts = logits.shape
    is_valid = logits.isfinite().all(dim=1, keepdim=True)  # [n, 1]
    logits = torch.where(is_valid, logits, 0.0)
    scores = logits.sigmoid() if router.scores == "sigmoid" else logits
    ranked = scores if correction is None else scores + correction
    if router.num_groups > 1:
        groups = ranked.view(num_rows, router.num_groups, -1)
        best = groups.topk(2, dim=-1).values.sum(dim=-1)  # [n, num_groups]
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, router.num_chosen_groups), True)
        ranked = groups.masked_fill(~chosen[:, :, None], float("-inf")).view(num_rows, num_experts)
    experts = _largest(ranked, num_chosen).sort(dim=1).values  # [n, k]
    if router.scores == "sigmoid":
        weights = scores.gather(1, experts)
        if router.is_normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + _SMALLEST_SUM)
    elif router.is_normalized:
        weights = logits.gather(1, experts).softmax(dim=1)
    else:
        weights = logits.softmax(dim=1).gather(1, experts)
    weights, experts = weights * router.scale, experts.to(torch.int32)
    if shared is not None:
        experts = F.pad(experts, (0, 1), value=num_experts)
        factor = x.float() @ shared.gate.float() if shared.gate is not None else x.new_full((num_rows,), torch.inf)
        weights = torch.cat((weights, factor.float().sigmoid()[:, None]), dim=1)
    return Routing(experts, torch.where(is_valid, weights, float("nan")))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of each row; of equal ones the first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def activate_torch(gate: torch.Tensor, up: torch.Tensor, sizes: ExpertSizes) -> torch.Tensor:
    """The activation between the two products, in float32."""
    gate, up = gate.float(), up.float()
    if sizes.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=sizes.limit), up.clamp(-sizes.limit, sizes.limit)
    return (up + 1) * gate * torch.sigmoid(gate * sizes.alpha)


def add_shared_torch(output: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``output + shared * sigmoid(x @ gate)``.

    Args:
        output: of the chosen experts, ``[n, hidden]``.
        shared: of the expert that every token has, ``[n, hidden]``.
        x: their input, ``[n, hidden]``.
        gate: ``[hidden]``.
    """
    factor = (x.float() @ gate.float()).sigmoid()
    return (output.float() + shared.float() * factor[:, None]).to(output.dtype)


class TorchExperts:
    """The matrices of the experts of a layer, contiguous, and their products on any device. Products with ``stacks``,
    which their owner fills, are those of the dequantized weights, in float32, with inputs as they are."""

    def __init__(
        self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, stacks: Stacks | None = None
    ) -> None:
        self.sizes, self.dtype, self.device, self.stacks = sizes, dtype, device, stacks
        self.shapes = {"gate_up": (2 * sizes.size, sizes.hidden_size), "down": (sizes.hidden_size, sizes.size)}
        self.biases: dict[str, torch.Tensor | None] = {
            name: torch.zeros(sizes.num_experts, shape[0], dtype=dtype, device=device) if sizes.has_bias else None
            for name, shape in self.shapes.items()
        }
        for name, stack in (stacks or {}).items():
            if stack.bias is not None:
                self.biases[name] = stack.bias.view(sizes.num_experts, -1)
        if stacks is None:
            self._allocate()

    def _allocate(self) -> None:
        self.matrices = {
            name: torch.empty(self.sizes.num_experts, *shape, dtype=self.dtype, device=self.device)
            for name, shape in self.shapes.items()
        }

    def open(self, matrix: str, expert: int | None = None) -> torch.Tensor:
        """``gate_up [2 * size, hidden]`` or ``down [hidden, size]`` of an expert, to read and to write; None: of all,
        stacked. Valid until `close`."""
        return self.matrices[matrix] if expert is None else self.matrices[matrix][expert]

    def close(self, expert: int | None = None) -> None:
        """Bring what was written into the form that products read."""

    def tensors(self) -> list[torch.Tensor]:
        """All matrices and biases, each ``[num_experts, ...]``."""
        return [*self.matrices.values(), *(bias for bias in self.biases.values() if bias is not None)]

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        """Whether `with_shared` is faster than a shared expert's own layers."""
        return False

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        """A call, with the last expert of each token, which is shared."""
        chosen = Routing(routing.experts[:, :-1], routing.weights[:, :-1])
        between = self._activate(x @ _plain(shared.gate_up, x.dtype).T)
        output = (between @ _plain(shared.down, x.dtype).T).float() * routing.weights[:, -1:]
        return (self(x, chosen).float() + output).to(x.dtype)

    def __call__(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum of the outputs of each token's experts: ``x [n, hidden]`` -> the same shape."""
        num_rows, num_chosen = routing.experts.shape
        chosen = routing.experts.flatten().long()  # [n * k]
        x = x.contiguous()
        outputs = x.new_zeros((num_rows * num_chosen, x.shape[1]), dtype=torch.float32)
        if x.device.type == "cpu" and num_rows == 1:
            for row, expert in enumerate(chosen.tolist()):
                if expert >= 0:
                    outputs[row] = self._product(x, expert)[0]
        elif x.device.type == "cpu":
            pairs, counts = chosen.argsort(stable=True), (chosen + 1).bincount(minlength=1 + self.sizes.num_experts)
            for expert, rows in enumerate(pairs.split(counts.tolist()), start=-1):
                if len(rows) and expert >= 0:
                    outputs[rows] = self._product(x[rows // num_chosen], expert)
        else:
            step = max(1, _MAX_GATHERED // (2 * self.sizes.size * self.sizes.hidden_size))
            for some in torch.arange(len(chosen), device=x.device).split(step):
                product = self._product(x[some // num_chosen][:, None], chosen[some].clamp(min=0))[:, 0]
                outputs[some] = torch.where(chosen[some, None] >= 0, product, 0.0)
        weighted = outputs.view(num_rows, num_chosen, x.shape[1]) * routing.weights[:, :, None]
        return weighted.sum(dim=1).to(x.dtype)

    def _product(self, x: torch.Tensor, expert: Any) -> torch.Tensor:
        """``x [n, hidden]`` through an expert, or ``[n, 1, hidden]`` through as many."""
        between = self._activate(self._linear(x, "gate_up", expert))
        return self._linear(between, "down", expert).float()

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[..., 2 * size]`` -> ``[..., size]``"""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.sizes.is_interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return activate_torch(gate, up, self.sizes).to(gate_up.dtype)

    def _linear(self, x: torch.Tensor, matrix: str, expert: Any) -> torch.Tensor:
        bias = self.biases[matrix]
        if self.stacks is None:
            product = x @ self.open(matrix, None)[expert].transpose(-1, -2)
        else:
            weight = self.stacks[matrix].of_stack(self.sizes.num_experts, expert)
            product = x.float() @ weight.transpose(-1, -2)
        return product if bias is None else product + bias[expert].view(*product.shape[:-2], 1, product.shape[-1])


def _plain(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized().to(dtype)
