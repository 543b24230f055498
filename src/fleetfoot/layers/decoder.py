"""The decoder: a stack of layers on the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import nn

from fleetfoot.config.model import LayerSpec, ModelConfig
from fleetfoot.layers.attention import Attention
from fleetfoot.layers.branch import Branch, Offering
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.layers.mlp import GatedMLP
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.rotary import rotary_table
from fleetfoot.records.forward_context import ForwardContext


class DecoderLayer(Offering):
    """A mixer and an MLP, each a `Branch` on the residual stream. Which norms there are follows the config.

    A norm after the mixer takes the name that the norm before the MLP has without it, as in all checkpoints.
    """

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[nn.Module]] = GatedMLP
    experts_class: ClassVar[type[nn.Module]] = SparseMLP
    """In place of the MLP, in layers with experts."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__()
        self.spec = spec = config.layers[layer]
        before_mlp = "pre_feedforward_layernorm" if spec.mixer_norms.after else "post_attention_layernorm"
        self._norms = (
            ("input_layernorm", spec.mixer_norms.before),
            ("post_attention_layernorm", spec.mixer_norms.after),
            (before_mlp, spec.mlp_norms.before),
            ("post_feedforward_layernorm", spec.mlp_norms.after),
        )
        for name, is_present in self._norms:
            if is_present:
                setattr(self, name, RMSNorm(context, config.hidden_size, config.rms_norm_eps, config.norm_offset))
        self._mixer = self.mixer_name(spec)
        mixer = self.make_mixer(config, context.within(self._mixer), cos_sin, layer, kv_index)
        setattr(self, self._mixer, mixer)
        mlp_class = self.mlp_class if spec.experts is None else self.experts_class
        self.mlp = mlp_class(config, context.within("mlp"), layer)

    def mixer_name(self, spec: LayerSpec) -> str:
        """The name of the mixer in the checkpoint."""
        return "self_attn"

    def make_mixer(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> nn.Module:
        """See `fleetfoot.layers.attention.Attention`."""
        return self.attention_class(config, context, cos_sin, layer, kv_index)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """In the order of computation."""
        a, b, c, d = (getattr(self, name) if is_present else None for name, is_present in self._norms)
        scale = self.spec.residual_multiplier
        return Branch(getattr(self, self._mixer), a, b, scale), Branch(self.mlp, c, d, scale)

    def offer(self) -> tuple[Branch, ...] | None:
        return self.branches

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        for branch in self.branches:
            x = branch(x, ctx)
        return x


class DecoderRun(Protocol):
    """Consecutive layers that run as one, such as those of `fleetfoot.fusion`."""

    selects_logits: bool
    """Whether it returns only the rows of ``ctx.logits``."""

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape, or only the rows of ``ctx.logits`` of it."""

    def shortened(self) -> DecoderRun:
        """The run with as few layers as launch all of its kernels."""


class DecoderStack(nn.ModuleDict):
    """The layers of one rank, by their numbers in the model.

    `set_runs` replaces layers by runs of them; the modules stay, and with them the weights.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, numbers: range, layer_class: type[DecoderLayer] = DecoderLayer
    ) -> None:
        max_positions = context.max_positions or config.max_position_embeddings
        config = config.for_context(max_positions)
        kinds = config.rotary_tables(numbers)
        tables = [rotary_table(rope, head_dim, max_positions, context.device) for rope, head_dim in kinds]
        mixers = [config.layers[layer].attention for layer in numbers]
        nothing = torch.empty(0, device=context.device)
        cos_sin = [tables[kinds.index((each.rope, each.head_dim))] if each else nothing for each in mixers]
        within = context.within("layers").within
        layers = (
            layer_class(config, within(str(layer)), cos_sin[index], layer, index) for index, layer in enumerate(numbers)
        )
        super().__init__({str(number): layer for number, layer in zip(numbers, layers, strict=True)})
        self._runs: list[DecoderRun | nn.Module] = list(self.values())
        self._selects_logits = False

    def set_runs(self, runs: Sequence[DecoderRun | nn.Module]) -> None:
        """What `forward` calls, in order."""
        self._runs = list(runs)
        self._selects_logits = bool(getattr(runs[-1], "selects_logits", False))

    @property
    def fused_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are part of a run."""
        return tuple(int(number) for number, layer in self.items() if layer not in self._runs)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape, or ``[num_logits, hidden_size]`` where ``ctx`` has
        `LogitsMetadata`."""
        for run in self._runs:
            x = run(x, ctx)
        return x if ctx.logits is None or self._selects_logits else ctx.logits.select(x)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """In this context as few layers run as launch all the kernels that this launches."""
        runs = self._runs
        layers = [run.spec for run in runs if isinstance(run, DecoderLayer)]
        if len(layers) == len(runs):
            self._runs = [runs[index] for index in representatives(layers)]
        else:
            self._runs = [run if isinstance(run, nn.Module) else run.shortened() for run in runs]
        try:
            yield
        finally:
            self._runs = runs


def representatives(layers: Sequence[LayerSpec]) -> list[int]:
    """Indices of layers that together launch all kernels of ``layers``: the first, the last, one of each kind, and
    neighbors of each pair of shapes, since a layer's last kernel may depend on the next layer. A layer's rotation and
    that of its neighbor, and the neighbor's window, change no kernel."""
    kinds = [replace(each, mixer=replace(each.attention, rope=None)) if each.attention else each for each in layers]
    shapes = [replace(each, mixer=replace(each.attention, window=None)) if each.attention else each for each in kinds]
    last = len(layers) - 1
    kept = {0, last, *(kinds.index(kind) for kind in kinds[:last])}
    for index, pair in enumerate(pairwise(shapes)):
        if pair not in pairwise(shapes[each] for each in sorted(kept)):
            kept |= {index, index + 1}
    return sorted(kept)
