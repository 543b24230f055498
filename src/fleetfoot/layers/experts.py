"""A mixture of experts in place of a decoder layer's MLP (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from fleetfoot.config.model import ExpertsSpec, MLPSpec, ModelConfig
from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.distributed.groups import DataGroup
from fleetfoot.kernels.experts.experts import ExpertPlacement, Routing, SharedExpert
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.layers.linear import ColumnParallelLinear
from fleetfoot.layers.mlp import GatedMLP
from fleetfoot.quantization.base import ExpertNames, ExpertsShape
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.weights import Span, WeightSpec


class Router(ColumnParallelLinear):
    """``x [n, hidden_size]`` -> the experts of each token. Every rank of a tensor group has all of it."""

    def __init__(self, context: ModelContext, spec: ExpertsSpec, hidden_size: int, name: str) -> None:
        super().__init__(context, hidden_size, ((name, spec.num_experts),), spec.router.has_bias)
        self._spec, self._route, self._name = spec.router, context.ops.route, name
        self._num_chosen = spec.num_chosen
        self.correction: torch.Tensor | None = None
        """``[num_experts]`` float32, added to the scores for the choice."""
        if spec.router.has_correction:
            self.correction = torch.zeros(spec.num_experts, dtype=torch.float32, device=context.device)

    def choose(self, x: torch.Tensor, shared: SharedExpert | None = None) -> Routing:
        """The experts of ``x [n, hidden_size]``, and one that all have."""
        return self._route(x, self.weight, self.correction, self._spec, self._num_chosen, shared)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        yield from super().own_weight_specs(prefix, name)
        if (correction := self.correction) is not None:
            place = f"{prefix}{self._name}.e_score_correction_bias"
            yield WeightSpec(place, tuple(correction.shape), lambda: correction)

    def own_stored_weights(self) -> Iterator[Span]:
        yield from super().own_stored_weights()
        if self.correction is not None:
            yield self.correction.data_ptr(), self.correction.nbytes


class Experts(WeightModule):
    """The experts of a layer, each a gated MLP. A rank has a part of each, or all of some."""

    def __init__(self, context: ModelContext, spec: ExpertsSpec, hidden_size: int, names: ExpertNames) -> None:
        super().__init__()
        group, path = context.groups.tensor, context.within("experts").prefix
        self._data = context.groups.data
        self.spec = spec
        method = context.linear_methods.of_experts(path.removesuffix("."))
        self.placement: ExpertPlacement | None = None
        """Where the experts are; None: each rank has a part of each."""
        self.experts: tuple[int, ...] = ()
        """The expert in each slot of all ranks, where there is a placement."""
        self._counted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._local_routing = context.ops.local_routing
        if (split := context.expert_split) is None:
            part = method.share(spec, group.rank, group.size)
            shape = ExpertsShape(spec, hidden_size, part, names, has_down_bias=group.is_first_rank)
        else:
            layer, everything = int(path.split(".")[-4]), slice(0, spec.intermediate_size)
            experts = context.first_placements.get(layer) or split.first_placement(spec.num_experts)
            self._own = own = split.slots(context.groups.expert.rank, spec.num_experts)
            shape = ExpertsShape(spec, hidden_size, everything, names, first_held=experts[own.start : own.stop])
            self.placement = make_placement(spec.num_experts, split, len(own), context.device)
            self._write_placement(experts)
        self.weight = method.make_weight(shape, context.ops, context.dtype, context.device)

    def forward(
        self, x: torch.Tensor, routing: Routing, *, is_selected: bool = False, rows_of_ranks: int = 0
    ) -> torch.Tensor:
        """``x [n, hidden_size]`` -> the same shape, this rank's part of a sum over the ranks. ``is_selected``: whether
        it has the rows of logits alone; ``rows_of_ranks``: as of `ForwardContext`."""
        if self.placement is None:
            return self.weight.apply(x, routing)
        counted = None if self._counted is None else self._counted[is_selected]
        if self._data.size == 1:
            return self.weight.apply(x, self._local_routing(routing, self.placement, counted))
        if counted is not None:  # each rank counts its own tokens
            self._local_routing(routing, self.placement, counted)
        own = len(x)
        x, routing = gather_tokens(self._data, x, routing, rows_of_ranks or own)  # [size * rows, hidden_size]
        routing = self._local_routing(routing, self.placement, None)  # all ranks' tokens
        return self._data.reduce_scatter(self.weight.apply(x, routing))[:own]

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        """Whether `with_shared` multiplies with a shared expert too: ranks with whole experts have a part of it."""
        return self.placement is None and self.weight.can_join(num_rows, shared)

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        """`forward`, and the shared expert, which is the last one of each token."""
        return self.weight.with_shared(x, routing, shared)

    # --- balancing ----------------------------------------------------------------------------------------------------

    def count_load(self, load: torch.Tensor, counted: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add to ``load [num_experts]`` int32 how often each expert is chosen, from the first rows: as many as
        ``counted`` has, each ``[1]`` int32, for all tokens and for the rows of logits."""
        assert self.placement is not None
        self.placement, self._counted = replace(self.placement, load=load), counted

    def place(self, experts: tuple[int, ...]) -> None:
        """The slots of all ranks have these experts from now on; the matrices of this rank's are there."""
        self._write_placement(experts)
        self.weight.hold(experts[self._own.start : self._own.stop])

    def _write_placement(self, experts: tuple[int, ...]) -> None:
        assert self.placement is not None
        self.experts = experts
        slots = torch.full(self.placement.slots.shape, -1, dtype=torch.int32)
        num_replicas = [0] * len(slots)
        for slot, expert in enumerate(experts):
            if slot in self._own:
                slots[expert, num_replicas[expert]] = slot - self._own.start
            num_replicas[expert] += 1
        self.placement.slots.copy_(slots)
        self.placement.num_replicas.copy_(torch.tensor(num_replicas, dtype=torch.int32))

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        return self.weight.weight_specs(prefix)

    def own_stored_weights(self) -> Iterator[Span]:
        return self.weight.stored()

    def process_own_weights(self) -> None:
        self.weight.process_weights_after_loading()


def make_placement(num_experts: int, split: ExpertSplit, num_slots: int, device: torch.device) -> ExpertPlacement:
    """The tensors of a layer's placement."""
    most_replicas = 1 + split.num_redundant
    return ExpertPlacement(
        num_slots,
        torch.full((num_experts, most_replicas), -1, dtype=torch.int32, device=device),
        torch.ones(num_experts, dtype=torch.int32, device=device),
    )


def gather_tokens(group: DataGroup, x: torch.Tensor, routing: Routing, num_rows: int) -> tuple[torch.Tensor, Routing]:
    """The tokens of all ranks of a group and their experts, ``num_rows`` of each, in one operation. Padding has no
    experts."""
    parts = x, routing.experts, routing.weights
    words = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)  # [n, bytes of a row]
    if num_rows > len(x):
        padding = words.new_zeros((num_rows - len(x), words.shape[1]))
        padding[:, x.shape[1] * x.itemsize :][:, : 4 * routing.experts.shape[1]] = 0xFF  # -1
        words = torch.cat((words, padding))
    sizes = [part.shape[1] * part.itemsize for part in parts]
    gathered = group.gather(words).split(sizes, dim=1)
    x, experts, weights = (each.contiguous().view(part.dtype) for each, part in zip(gathered, parts, strict=True))
    return x, routing._replace(experts=experts, weights=weights)


class SparseMLP(nn.Module):
    """A router, the experts that it chooses for each token, and an MLP for every token where the model has one."""

    names: ClassVar[ExpertNames] = ExpertNames()
    router_name: ClassVar[str] = "gate"
    """The name of the router's layer in the checkpoint."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int) -> None:
        super().__init__()
        spec, hidden_size = config.layers[layer].mlp, config.hidden_size
        assert isinstance(spec, ExpertsSpec)
        self.gate = Router(context, spec, hidden_size, self.router_name)
        self.experts = Experts(context, spec, hidden_size, self.names)
        self._add_shared = context.ops.add_shared
        self._group, self._shared_name = context.groups.tensor, spec.shared_name if spec.shared_size else ""
        self.shared_gate: ColumnParallelLinear | None = None
        if spec.shared_size:
            shared = replace(config.layers[layer], mlp=MLPSpec(spec.shared_size))
            layers = (*config.layers[:layer], shared, *config.layers[layer + 1 :])
            mlp = GatedMLP(replace(config, layers=layers), context.within(spec.shared_name), layer)
            self.add_module(spec.shared_name, mlp)
        if spec.has_shared_gate:
            self.shared_gate = ColumnParallelLinear(context, hidden_size, ((f"{spec.shared_name}_gate", 1),))

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        if (joined := self._joined(len(x))) is not None:
            return self._group.all_reduce(self.experts.with_shared(x, self.gate.choose(x, joined), joined))
        is_selected = len(x) != len(ctx.attention.positions)
        rows_of_ranks = ctx.rows_of_ranks
        output = self.experts(x, self.gate.choose(x), is_selected=is_selected, rows_of_ranks=rows_of_ranks)
        output = self._group.all_reduce(output)
        if not self._shared_name:
            return output
        shared = self.get_submodule(self._shared_name)(x, ctx)
        if self.shared_gate is None:
            return output + shared
        if (dense := self.shared_gate.weight.dense) is None:
            return output + shared * self.shared_gate(x).sigmoid()
        return self._add_shared(output, shared, x, dense[0][0])

    def joins(self, num_rows: int) -> bool:
        """Whether the shared expert is one of those of ``num_rows`` tokens."""
        return self._joined(num_rows) is not None

    def _joined(self, num_rows: int) -> SharedExpert | None:
        """The shared expert, where it is one of those of ``num_rows`` tokens; None: it has layers of its own."""
        if not self._shared_name:
            return None
        mlp = self.get_submodule(self._shared_name)
        assert isinstance(mlp, GatedMLP)
        gate_up, down = mlp.gate_up_proj.weight.expert_matrix, mlp.down_proj.weight.expert_matrix
        dense = None if self.shared_gate is None else self.shared_gate.weight.dense
        if gate_up is None or down is None or (self.shared_gate is not None and dense is None):
            return None
        shared = SharedExpert(gate_up, down, None if dense is None else dense[0][0])
        return shared if self.experts.can_join(num_rows, shared) else None
