"""The decoder: a stack of layers on the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import nn

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.layers.attention import Attention
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.rotary import rotary_table
from fleetfoot.records.forward_context import ForwardContext


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, gate and up in one product; GeGLU with GELU."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, group = config.intermediate_size, context.tensor_group
        part = even_span(size, group.rank, group.size)
        parts = (("gate_proj", size), ("up_proj", size))
        merged = "gate_up_proj" if config.has_merged_projections else None
        self.gate_up_proj = ColumnParallelLinear(
            context, config.hidden_size, parts, config.mlp_bias, rows=(part, part), merged=merged
        )
        self.down_proj = RowParallelLinear(context, "down_proj", size, config.hidden_size, config.mlp_bias, part)
        ops = context.ops
        self._activate = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_and_mul}[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        gate_up = self.gate_up_proj(x)  # [num_tokens, 2 * intermediate size of this rank]
        return self.down_proj(self._activate(gate_up))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[nn.Module]] = GatedMLP
    residual_multiplier = 1.0

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__()
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.input_layernorm: nn.Module = RMSNorm(context, *norm)
        self.self_attn = self.attention_class(config, context, cos_sin, layer, kv_index)
        self.post_attention_layernorm = RMSNorm(context, *norm)
        self.mlp = self.mlp_class(config, context)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


class ScaledDecoderLayer(DecoderLayer):
    """A `DecoderLayer` with a factor on what is added to the residual stream."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__(config, context, cos_sin, layer, kv_index)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        x = x + self.residual_multiplier * self.self_attn(self.input_layernorm(x), ctx)
        return x + self.residual_multiplier * self.mlp(self.post_attention_layernorm(x))


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
        ropes = config.distinct_ropes(numbers)
        tables = [rotary_table(rope, config.head_dim, max_positions, context.device) for rope in ropes]
        cos_sin = [tables[ropes.index(config.layer_ropes[layer])] for layer in numbers]
        layers = (layer_class(config, context, cos_sin[index], layer, index) for index, layer in enumerate(numbers))
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
    def shortened(self, windows: Sequence[int | None]) -> Iterator[None]:
        """Within this context, as few layers run as launch all the kernels that this launches. ``windows``: of each."""
        runs = self._runs
        if all(isinstance(run, nn.Module) for run in runs):
            self._runs = [runs[index] for index in representatives(windows)]
        else:
            self._runs = [run if isinstance(run, nn.Module) else run.shortened() for run in runs]
        try:
            yield
        finally:
            self._runs = runs


def representatives(windows: Sequence[int | None]) -> list[int]:
    """Indices of layers that launch all kernels: the first, the last, and one with each window. In between the first
    and the last, layers differ in nothing else."""
    last = len(windows) - 1
    return sorted({0, last, *(windows.index(window) for window in windows[:last])})
