"""Mixers with a recurrent state, in place of attention: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import nn

from fleetfoot.config.model import GatedDeltaNetSpec, LayerSpec, Mamba2Spec, ModelConfig, ShortConvSpec, StateShapes
from fleetfoot.config.sharding import check_tensor_parallel_size, even_span
from fleetfoot.kernels.recurrent.conv import CausalConv
from fleetfoot.kernels.recurrent.gated_norm import GatedNorm
from fleetfoot.kernels.recurrent.recurrence import Recurrence, RecurrenceInputs
from fleetfoot.kernels.runtime.dry_tensors import real_memory
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.records.forward_context import ForwardContext, StateBatch
from fleetfoot.records.weights import Rows, Span, WeightSpec, count_rows, join_rows


class HeadParameter(WeightModule):
    """A number for each head, float32; ``heads``: those of this rank, out of ``num_heads``."""

    def __init__(self, context: ModelContext, num_heads: int, heads: slice, init: Literal["zeros", "ones"]) -> None:
        super().__init__()
        self.values = torch.empty(heads.stop - heads.start, dtype=torch.float32, device=context.device)
        self._num_heads, self._heads, self._init = num_heads, heads, init

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(
            f"{prefix}{name}", (self._num_heads,), lambda: self.values, init=self._init, part=(self._heads,)
        )


class ConvWeight(WeightModule):
    """The taps of a convolution over each channel, ``[num_taps, channels of this rank]``, and its bias.

    ``channels``: of the checkpoint; ``rows``: those of this rank, in the order in which they are stored.
    """

    def __init__(self, context: ModelContext, num_taps: int, channels: int, rows: Rows, *, has_bias: bool) -> None:
        super().__init__()
        size, dtype, device = count_rows(rows), context.dtype, context.device
        self.weight = torch.empty(num_taps, size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device) if has_bias else None
        self._channels, self._rows = channels, rows

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        shape, part = (self._channels, 1, len(self.weight)), (self._rows,)
        yield WeightSpec(f"{prefix}{name}.weight", shape, lambda: self.weight.T.unsqueeze(1), part=part)
        if (bias := self.bias) is not None:
            yield WeightSpec(f"{prefix}{name}.bias", shape[:1], lambda: bias, init="zeros", part=part)

    def own_stored_weights(self) -> Iterator[Span]:
        for tensor in (self.weight, self.bias):
            if tensor is not None:
                yield tensor.data_ptr(), tensor.nbytes


class StateMixer(nn.Module):
    """What the mixers share: the states of the layer. ``kv_index``: of them in `ForwardContext.kv_caches`."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int, kv_index: int) -> None:
        super().__init__()
        spec, size = config.layers[layer].recurrent, context.groups.tensor.size
        assert spec is not None
        shapes = spec.states(size)
        check_tensor_parallel_size(config, size, shares_experts=context.expert_split is None)
        self._shapes, self._kv_index = shapes, kv_index
        self._dtypes = getattr(torch, config.state_dtype), context.dtype
        self._split: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._conv, self._recurrence = context.ops.causal_conv, context.ops.recurrence

    def states(self, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor, StateBatch]:
        """The recurrence's matrices and the convolution's inputs of all slots, and the slots of the step."""
        assert ctx.states is not None
        whole = ctx.kv_caches[self._kv_index]  # [num_slots, words] float32
        if self._split is None or self._split[0] is not whole:
            with real_memory():  # the views outlive a dry pass
                self._split = whole, split_states(whole, self._shapes, *self._dtypes)
        return *self._split[1], ctx.states


def split_states(
    whole: torch.Tensor, shapes: StateShapes, of_matrices: torch.dtype, of_inputs: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``whole [num_slots, words]`` float32 -> the matrices ``[num_slots, *recurrent]`` and the inputs ``[num_slots,
    *inputs]``, each in its dtype, as views."""
    matrices, inputs = whole.split(shapes.num_words(of_matrices.itemsize, of_inputs.itemsize), dim=1)
    size = shapes.inputs[0] * shapes.inputs[1]
    inputs = inputs.view(of_inputs)[:, :size].unflatten(1, shapes.inputs)
    if not shapes.recurrent:
        return matrices, inputs
    return matrices.view(of_matrices)[:, : shapes.num_recurrent].unflatten(1, shapes.recurrent), inputs


class GatedDeltaNet(StateMixer):
    """A gated delta net (Yang et al. 2024) as in Qwen3-Next: heads of q and k are divided by their L2 norm, and heads
    of the output have an RMSNorm and then a gate."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int, kv_index: int) -> None:
        spec, group, hidden = config.layers[layer].mixer, context.groups.tensor, config.hidden_size
        assert isinstance(spec, GatedDeltaNetSpec)
        super().__init__(config, context, layer, kv_index)
        k_heads, heads = (even_span(num, group.rank, group.size) for num in (spec.num_k_heads, spec.num_v_heads))
        num_heads, v_size = spec.num_k_heads, spec.value_size
        each = spec.num_v_heads // num_heads  # heads of v for one of k
        sizes = spec.head_k_dim, spec.head_k_dim, each * spec.head_v_dim, each * spec.head_v_dim
        mixed = [run for runs in _stacked_rows(sizes[:3], k_heads, num_heads) for run in runs]  # q, k and v
        parts: list[tuple[str, int]]
        if spec.is_grouped:
            parts = [("in_proj_qkvz", num_heads * sum(sizes)), ("in_proj_ba", 2 * spec.num_v_heads)]
            rows = [[run for runs in _grouped_rows(each, k_heads) for run in runs] for each in (sizes, (each, each))]
        else:
            parts = [("in_proj_qkv", spec.conv_channels), ("in_proj_z", v_size)]
            parts += [(f"in_proj_{name}", spec.num_v_heads) for name in "ba"]
            rows = [mixed, *(_stacked_rows((size,), k_heads, num_heads)[0] for size in (sizes[3], each, each))]
        joined, half = [join_rows(runs) for runs in rows], len(parts) // 2
        self.in_proj = ColumnParallelLinear(context, hidden, parts[:half], rows=joined[:half])
        self.in_proj_heads = ColumnParallelLinear(context, hidden, parts[half:], rows=joined[half:])
        self.conv1d = ConvWeight(context, spec.num_taps, spec.conv_channels, join_rows(mixed), has_bias=False)
        self.A_log = HeadParameter(context, spec.num_v_heads, heads, "zeros")
        self.dt_bias = HeadParameter(context, spec.num_v_heads, heads, "ones")
        self.norm = RMSNorm(context, spec.head_v_dim, config.rms_norm_eps)
        values = even_span(v_size, group.rank, group.size)
        self.out_proj = RowParallelLinear(context, "out_proj", v_size, hidden, False, values)
        self._sizes = tuple(size * (k_heads.stop - k_heads.start) for size in sizes)
        """Sizes of q, k, v and the gate on this rank."""
        normed = self._sizes[0] + self._sizes[1]
        self._taps = CausalConv(self.conv1d.weight, None, True, norm_size=spec.head_k_dim, num_normed=normed)
        self._decay = Recurrence(self.A_log.values, self.dt_bias.values)
        self._dims = spec.head_k_dim, spec.head_v_dim

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the layer's states."""
        matrices, inputs, batch = self.states(ctx)
        (q_size, k_size, v_size, gate_size), (k_dim, v_dim) = self._sizes, self._dims
        mixed, gate = self.in_proj(x).split((q_size + k_size + v_size, gate_size), dim=1)
        rate, decay = self.in_proj_heads(x).chunk(2, dim=1)  # [num_tokens, heads] each
        mixed = self._conv(mixed, inputs, self._taps, batch)
        q, k, v = mixed.split((q_size, k_size, v_size), dim=1)
        tokens = RecurrenceInputs(
            q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim)), v.unflatten(1, (-1, v_dim)), decay, rate
        )
        norm = GatedNorm(gate, self.norm.weight, self.norm.eps, v_dim, is_gate_last=True)
        return self.out_proj(self._recurrence(tokens, matrices, self._decay, batch, norm))


def _stacked_rows(sizes: Sequence[int], heads: slice, num_heads: int) -> list[list[slice]]:
    """The rows of ``heads``, by the index of the size, where those of all heads of one size follow one another."""
    firsts = accumulate((0, *(num_heads * size for size in sizes[:-1])))
    return [
        [slice(first + heads.start * size, first + heads.stop * size)]
        for first, size in zip(firsts, sizes, strict=True)
    ]


def _grouped_rows(sizes: Sequence[int], heads: slice) -> list[list[slice]]:
    """The same where those of one head follow one another."""
    starts = range(heads.start * sum(sizes), heads.stop * sum(sizes), sum(sizes))
    firsts = accumulate((0, *sizes[:-1]))
    return [
        [slice(start + first, start + first + size) for start in starts]
        for first, size in zip(firsts, sizes, strict=True)
    ]


def _shifted(rows: slice, distance: int) -> slice:
    return slice(rows.start + distance, rows.stop + distance)


class Mamba2(StateMixer):
    """A Mamba-2 mixer (Dao and Gu 2024): the output is gated and then has an RMSNorm for each group."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int, kv_index: int) -> None:
        spec, group, hidden = config.layers[layer].mixer, context.groups.tensor, config.hidden_size
        assert isinstance(spec, Mamba2Spec)
        super().__init__(config, context, layer, kv_index)
        part, size, channels = spec.part(group.size), spec.value_size, spec.conv_channels
        values, heads = (even_span(total, group.rank, group.size) for total in (size, spec.num_heads))
        # the groups of B and C; the only one is on every rank
        place, places = (0, 1) if spec.num_groups == 1 else (group.rank, group.size)
        of_groups = even_span(spec.num_groups * spec.state_size, place, places)
        firsts = size, size + spec.num_groups * spec.state_size  # after x
        mixed = [values, *(_shifted(of_groups, first) for first in firsts)]
        rows = [values, *(_shifted(run, size) for run in mixed), _shifted(heads, size + channels)]
        parts = (("in_proj", size + channels + spec.num_heads),)
        self.in_proj = ColumnParallelLinear(context, hidden, parts, spec.has_bias, rows=(join_rows(rows),))
        self.conv1d = ConvWeight(context, spec.num_taps, channels, join_rows(mixed), has_bias=spec.has_conv_bias)
        self.A_log = HeadParameter(context, spec.num_heads, heads, "zeros")
        self.dt_bias = HeadParameter(context, spec.num_heads, heads, "ones")
        self.D = HeadParameter(context, spec.num_heads, heads, "ones")
        self.norm = RMSNorm(context, size, config.rms_norm_eps, rows=values)
        self.out_proj = RowParallelLinear(context, "out_proj", size, hidden, spec.has_bias, values)
        self._group, self._size = group, size
        self._taps = CausalConv(self.conv1d.weight, self.conv1d.bias, has_silu=True)
        self._decay = Recurrence(self.A_log.values, self.dt_bias.values, self.D.values)
        self._spec = part
        self._is_norm_shared = group.size > 1 and spec.num_groups == 1

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the layer's states."""
        spec, (matrices, inputs, batch) = self._spec, self.states(ctx)
        gate, mixed, step = self.in_proj(x).split((spec.value_size, spec.conv_channels, spec.num_heads), dim=1)
        groups = spec.num_groups, spec.state_size
        group_size = spec.num_groups * spec.state_size
        mixed = self._conv(mixed, inputs, self._taps, batch)
        v, k, q = mixed.split((spec.value_size, group_size, group_size), dim=1)
        v = v.unflatten(1, (spec.num_heads, spec.head_dim))
        tokens = RecurrenceInputs(q.unflatten(1, groups), k.unflatten(1, groups), v, step)
        if self._is_norm_shared:
            return self.out_proj(self._norm(self._recurrence(tokens, matrices, self._decay, batch, None), gate))
        norm = GatedNorm(gate, self.norm.weight, self.norm.eps, spec.value_size // spec.num_groups, is_gate_last=False)
        return self.out_proj(self._recurrence(tokens, matrices, self._decay, batch, norm))

    def _norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`GatedNorm` of rows ``[num_tokens, size of this rank]`` that the ranks share."""
        value = x.float() * torch.nn.functional.silu(gate.float())
        if self._group.bitwise_reproducible:
            mean = self._group.all_gather(value, self._size).square().mean(dim=-1, keepdim=True)
        else:
            mean = self._group.all_reduce(value.square().sum(dim=-1, keepdim=True)) / self._size
        return (value * torch.rsqrt(mean + self.norm.eps) * self.norm.weight.float()).to(x.dtype)


class ShortConv(StateMixer):
    """LFM2's mixer (Liquid AI 2025): ``out(c * conv(b * x))``, with b, c and x projections of the input."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int, kv_index: int) -> None:
        spec, group, hidden = config.layers[layer].mixer, context.groups.tensor, config.hidden_size
        assert isinstance(spec, ShortConvSpec)
        super().__init__(config, context, layer, kv_index)
        channels = even_span(spec.channels, group.rank, group.size)
        starts = range(0, 3 * spec.channels, spec.channels)
        rows = join_rows(slice(start + channels.start, start + channels.stop) for start in starts)
        parts = (("in_proj", 3 * spec.channels),)
        self.in_proj = ColumnParallelLinear(context, hidden, parts, spec.has_bias, rows=(rows,))
        self.conv = ConvWeight(context, spec.num_taps, spec.channels, channels, has_bias=spec.has_bias)
        self.out_proj = RowParallelLinear(context, "out_proj", spec.channels, hidden, spec.has_bias, channels)
        self._taps = CausalConv(self.conv.weight, self.conv.bias, is_gated=True)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the layer's states."""
        _, inputs, batch = self.states(ctx)
        return self.out_proj(self._conv(self.in_proj(x), inputs, self._taps, batch))


class HybridLayer(DecoderLayer):
    """A decoder layer with attention or a recurrent mixer."""

    recurrent: ClassVar[tuple[str, type[StateMixer]]]
    """The name of the recurrent mixer in the checkpoint, and its class."""

    def mixer_name(self, spec: LayerSpec) -> str:
        return self.recurrent[0] if spec.attention is None else "self_attn"

    def make_mixer(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> nn.Module:
        if self.spec.attention is None:
            return self.recurrent[1](config, context, layer, kv_index)
        return super().make_mixer(config, context, cos_sin, layer, kv_index)
