"""Fused decoder layers: the arithmetic of the plain ones as a chain of dependent kernels.

The input and output of a run is the plain residual stream. Within it the residual sum, over a tensor group too, is one
kernel with the norm behind it. Where a linear layer of few rows comes before, that layer's kernel makes the sum, over a
tensor group too (`RankSums`), and the norm is deferred (`DeferredRMSNorm`); where the library multiplies, it adds to
the residual itself. Gate and up are one product with SiLU inside. Heads are normed, rotated and cached by attention of
few query tokens, by the product that reads a deferred norm of some dozens of rows, or by a kernel between the two. The
attention of few tokens prefetches the weight of the output projection. The last layer computes no more than K and V for
rows that are not read. A run owns no tensor: it reads the weights of the layers that it replaces, which live
updates write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from fleetfoot.kernels.elementwise import DeferredRMSNorm, sum_parts
from fleetfoot.kernels.interface import LayerParts
from fleetfoot.kernels.linear.linear_triton import ChainedLinear, LinearChain
from fleetfoot.layers.attention import Attention
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer, DecoderStack, GatedMLP, ScaledDecoderLayer, representatives
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.records.forward_context import ForwardContext, LogitsMetadata

Hidden = torch.Tensor | DeferredRMSNorm
"""Between two layers of a run: a branch's output, ``[num_tokens, hidden_size]`` or partial sums of it, that is still to
be added to the residual; the residual itself, where it was added in place; or the norm of the sum, deferred."""
Product = Callable[[Any], torch.Tensor]
"""A linear layer of the run; it takes a deferred norm only where it reads one."""


def fuse(stack: DecoderStack, context: ModelContext, is_fused: Sequence[bool]) -> None:
    """Replace runs of consecutive layers of a stack with loaded weights. ``is_fused``: for each layer of the stack."""
    runs: list[FusedDecoder | nn.Module] = []
    modules = list(stack.values())
    for fused, group in groupby(zip(modules, is_fused, strict=True), key=itemgetter(1)):
        layers = [layer for layer, _ in group]
        runs += [FusedDecoder(layers, context, is_last=layers[-1] is modules[-1])] if fused else layers
    stack.set_runs(runs)


class FusedDecoder:
    """Consecutive decoder layers as one. ``is_last``: the run ends the stack, and returns only the rows of
    ``ctx.logits``."""

    def __init__(self, layers: Sequence[nn.Module], context: ModelContext, *, is_last: bool = False) -> None:
        self._make_chain = context.ops.layer_chain
        self._set_layers([_FusedLayer(layer, context) for layer in layers])
        self._group = context.groups.tensor
        self.selects_logits = is_last

    def _set_layers(self, layers: list[_FusedLayer]) -> None:
        self._layers = layers
        self._next_norms = [layer.input_norm for layer in layers[1:]]
        parts = [layer.parts for layer in layers if layer.parts is not None]
        make_chain = self._make_chain if len(parts) == len(layers) else None
        self._chain = None if make_chain is None else make_chain(parts)
        # For few rows the last product makes the residual sum, and with it a deferred norm, which is not read.
        self._end = copy(layers[-1].mlp_norm)
        self._end.reads_deferred_norm = lambda num_rows: True

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape, or ``[num_logits, hidden_size]``; may write to ``x``."""
        hidden: Hidden
        last, logits = self._layers[-1], ctx.logits if self.selects_logits else None
        # The last layer may compute fewer rows.
        num_chained = len(self._layers) - (logits is not None)
        chained = self._chain(x, ctx, num_chained) if self._chain is not None and num_chained and x.shape[0] else None
        hidden, residual = chained or (x, x)
        if chained is None:
            for layer, next_norm in zip(self._layers, self._next_norms, strict=False):  # the last has none
                hidden, residual = layer(hidden, residual, ctx, next_norm)
        if chained is None or logits is not None:
            hidden, residual = last(hidden, residual, ctx, self._end, logits)
        if isinstance(hidden, DeferredRMSNorm):
            return hidden.total
        if hidden is residual:
            return residual
        hidden = sum_parts(hidden, residual)
        return residual + (hidden if last.is_summed else self._group.all_reduce(hidden))

    def shortened(self) -> FusedDecoder:
        """See `DecoderRun.shortened`: the first layer has no sum before it, and the last may have fewer rows."""
        short = copy(self)
        kept = representatives([layer.spec for layer in self._layers])
        short._set_layers([self._layers[index] for index in kept])
        return short


class _Norm:
    """A norm, with the residual sum before it and the linear layer behind it. ``norm``: None: the residual stream is
    read as it is; ``reads_deferred_norm``: of the linear layer."""

    def __init__(self, norm: RMSNorm | None, context: ModelContext, reads_deferred_norm: Callable[[int], bool]) -> None:
        self.weight = None if norm is None else norm.weight
        self.eps = 0.0 if norm is None else norm.eps
        self.reads_deferred_norm = reads_deferred_norm
        self._rms_norm = context.ops.rms_norm
        self._add_rms_norm = context.groups.tensor.reducing(context.ops.add_rms_norm)

    def add(self, hidden: Hidden, residual: torch.Tensor) -> tuple[Hidden, torch.Tensor]:
        """The input of the linear layer, and the residual stream: the sum of both, or ``residual`` if ``hidden`` is the
        same tensor."""
        if isinstance(hidden, DeferredRMSNorm):
            return hidden, hidden.total
        if self.weight is None:
            return hidden, residual
        if hidden is residual:
            return self._rms_norm(residual, self.weight, self.eps), residual
        return self._add_rms_norm(hidden, residual, self.weight, self.eps)


class _Residual:
    """A row-parallel linear layer with an output that is added to the residual stream, times ``scale``."""

    def __init__(self, linear: RowParallelLinear, chain: LinearChain | None, scale: float) -> None:
        dense = linear.weight.dense if chain is not None and not linear.is_gathered else None
        self._chained = None if dense is None or chain is None else chain.residual(*dense, scale)
        product = linear.partial if linear.is_gathered else linear.weight.product
        self._product = self._chained or (product if scale == 1.0 else lambda x: product(x) * scale)
        self._is_alone = linear.group.size == 1  # else the sum over the ranks comes before the residual sum
        self._rank_sums = linear.group.rank_sums
        self.is_summed = self._is_alone or linear.is_gathered
        self.prefetch_weight = None if dense is None else dense[0]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, next_norm: _Norm) -> Hidden:
        if self._chained is None:
            return self._product(x)
        can_sum = self._is_alone or self._rank_sums is not None
        if can_sum and next_norm.weight is not None and next_norm.reads_deferred_norm(x.shape[0]):
            norm = next_norm.weight, next_norm.eps
            deferred = self._chained.add_and_norm(x, residual, *norm, self._rank_sums)
            if deferred is not None:
                return deferred
        if self._is_alone and self._chained.add_to(x, residual):
            return residual
        return self._product(x)

    def makes_product(self, num_rows: int) -> bool:
        """See `ChainedResidual.makes_product`; False over a tensor group: its sums of so many rows are another
        kernel."""
        return self._is_alone and self._chained is not None and self._chained.makes_product(num_rows)


class _FusedLayer:
    """One decoder layer of a run."""

    def __init__(self, layer: nn.Module, context: ModelContext) -> None:
        if type(layer) not in (DecoderLayer, ScaledDecoderLayer):  # a subclass computes something else
            raise TypeError(
                f"the plan fuses a {type(layer).__name__}, and only DecoderLayer and ScaledDecoderLayer can be fused; "
                "set LayerSpec.unfusible, by layer of the traits of the architecture"
            )
        assert isinstance(layer, DecoderLayer)
        attention, mlp, chain = layer.self_attn, layer.mlp, context.ops.linear_chain
        assert isinstance(attention, Attention) and isinstance(mlp, GatedMLP)
        self._attention = attention.paged
        self._qkv, reads_qkv = _column(attention.qkv_proj, None if chain is None else chain.linear)
        self._chained_qkv = self._qkv if isinstance(self._qkv, ChainedLinear) else None
        if self._chained_qkv is not None and not attention.paged.rotary.norm_offset:
            self._chained_qkv.head_dim = attention.paged.rotary.cos_sin.shape[1]
        self._gate_up, reads_gate_up = _column(mlp.gate_up_proj, None if chain is None else chain.gate_up)
        if chain is None or mlp.gate_up_proj.weight.dense is None:
            gate_up, silu_and_mul = mlp.gate_up_proj.weight.product, context.ops.silu_and_mul
            self._gate_up = lambda x: silu_and_mul(gate_up(x))
        self._o, self._down = (
            _Residual(linear, chain, layer.residual_multiplier) for linear in (attention.o_proj, mlp.down_proj)
        )
        if isinstance(self._gate_up, ChainedLinear):
            self._gate_up.follows_product = self._o.makes_product
        if self._chained_qkv is not None:
            self._chained_qkv.follows_product = self._down.makes_product  # the layer before has the same shape
        norm = layer.input_layernorm if isinstance(layer.input_layernorm, RMSNorm) else None
        self.input_norm = _Norm(norm, context, reads_qkv)
        self.mlp_norm = _Norm(layer.post_attention_layernorm, context, reads_gate_up)
        self.is_summed = self._down.is_summed
        self.spec = layer.spec
        self.parts = None if norm is None else _parts(layer, norm, layer.post_attention_layernorm)

    def __call__(
        self,
        hidden: Hidden,
        residual: torch.Tensor,
        ctx: ForwardContext,
        next_norm: _Norm,
        logits: LogitsMetadata | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """``(hidden, residual)`` of the layers before -> those of this one. ``next_norm``: behind it. ``logits``: the
        rows that are read; None: all."""
        attention = self._attention
        hidden, residual = self.input_norm.add(hidden, residual)
        kv_cache, metadata = ctx.kv_caches[attention.kv_index], ctx.attention
        heads = attention.num_heads, attention.rotary
        query = attended = None  # [num_tokens, num_heads, head_dim]
        if self._chained_qkv is not None:
            query = self._chained_qkv.rotate_and_cache(hidden, kv_cache, metadata, *heads)
        if query is None:
            qkv = self._qkv(hidden)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
            if logits is None:
                shape, weight = (*heads, attention.scale, attention.window), self._o.prefetch_weight
                attended = attention.backend.forward_fused(qkv, kv_cache, metadata, *shape, weight)
            if attended is None:
                query = attention.rotate_and_cache(qkv, ctx)
        if logits is not None:
            assert query is not None
            residual = logits.select(residual)  # [num_logits, hidden_size], like all below
            query, metadata = logits.select(query), logits.attention
            if not query.shape[0]:
                return residual, residual
        if attended is None:
            assert query is not None
            attended = attention.attend(query, ctx, metadata)
        attended_sum = self._o(attended.flatten(1), residual, self.mlp_norm)
        hidden, residual = self.mlp_norm.add(attended_sum, residual)
        return self._down(self._gate_up(hidden), residual, next_norm), residual


def _parts(layer: DecoderLayer, input_norm: RMSNorm, mlp_norm: RMSNorm) -> LayerParts | None:
    """The layer for a chain of layers; None: a chain does not compute it."""
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, GatedMLP)
    if layer.residual_multiplier != 1.0 or mlp.down_proj.group.size > 1 or input_norm.eps != mlp_norm.eps:
        return None
    linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    qkv, o, gate_up, down = (linear.weight.product for linear in linears)
    paged, eps = attention.paged, input_norm.eps
    attends = paged.num_heads, paged.kv_index, paged.rotary, paged.scale, paged.window
    return LayerParts(input_norm.weight, mlp_norm.weight, eps, qkv, o, gate_up, down, *attends)


def _column(linear: ColumnParallelLinear, chained: type[ChainedLinear] | None) -> tuple[Product, Callable[[int], bool]]:
    """The layer within the chain, and whether it reads a deferred norm of so many rows."""
    dense = linear.weight.dense
    if chained is None or dense is None:
        return linear.weight.product, lambda num_rows: False
    layer = chained(*dense)
    return layer, layer.reads_deferred_norm
