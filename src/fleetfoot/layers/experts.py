"""A mixture of experts in place of a decoder layer's MLP (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from fleetfoot.config.model import ExpertsSpec, MLPSpec, ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.kernels.experts.experts import Routing
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

    def choose(self, x: torch.Tensor) -> Routing:
        """The experts of ``x [n, hidden_size]``."""
        return self._route(x, self.weight, self.correction, self._spec, self._num_chosen)

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
    """The experts of a layer, each a gated MLP. A rank of a tensor group has a part of each."""

    def __init__(self, context: ModelContext, spec: ExpertsSpec, hidden_size: int, names: ExpertNames) -> None:
        super().__init__()
        group, path = context.groups.tensor, context.within("experts").prefix
        part = even_span(spec.intermediate_size, group.rank, group.size)
        shape = ExpertsShape(spec, hidden_size, part, names, has_down_bias=group.is_first_rank)
        method = context.linear_methods.of_experts(path.removesuffix("."))
        self.weight = method.make_weight(shape, context.ops, context.dtype, context.device)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """``x [n, hidden_size]`` -> the same shape, this rank's part of a sum over the tensor group."""
        return self.weight.apply(x, routing)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        return self.weight.weight_specs(prefix)

    def own_stored_weights(self) -> Iterator[Span]:
        return self.weight.stored()

    def process_own_weights(self) -> None:
        self.weight.process_weights_after_loading()


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
        output = self._group.all_reduce(self.experts(x, self.gate.choose(x)))
        if not self._shared_name:
            return output
        shared = self.get_submodule(self._shared_name)(x, ctx)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return output + shared
