"""Fused decoder layers: the arithmetic of the plain ones as a chain of dependent kernels.

A run is a list of branches, each a mixer or an MLP with its norms (`Branch`). The input and output of a run is the
plain residual stream; what travels between branches is a `Value`, so that the residual sum, over a tensor group too, is
one kernel with the norms around it, or part of the product before it.

A branch takes what its body offers (`Offering.offer`), and each linear layer has its own kernels
(`LinearWeight.chain`). Where a body offers nothing (a mixture of experts), or a linear layer has no kernels (a
quantized one), the branch calls it as it is. A run owns no tensor: it reads the weights of the layers that it replaces,
which live updates write in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import nn

from fleetfoot.kernels.elementwise import DeferredRMSNorm, DeferredSum
from fleetfoot.kernels.interface import LayerParts
from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole
from fleetfoot.layers.attention import AttentionParts
from fleetfoot.layers.branch import Branch
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer, DecoderStack, representatives
from fleetfoot.layers.linear import RowParallelLinear
from fleetfoot.layers.mlp import GatedParts
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.records.forward_context import ForwardContext, LogitsMetadata


@dataclass(frozen=True, slots=True)
class Plain:
    """The residual stream ``x [num_tokens, hidden_size]``, complete."""

    x: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """A branch's output that is still to be added to the residual stream."""

    output: torch.Tensor
    """``[num_tokens, hidden_size]``, or partial sums ``[splits, num_tokens, hidden_size]`` float32."""
    residual: torch.Tensor
    """``[num_tokens, hidden_size]``"""
    is_partial: bool = False
    """Whether the output is one rank's part of a sum over the tensor group."""
    norm: RMSNorm | None = None
    """Norm of the output before it is added."""


Deferred = DeferredRMSNorm | DeferredSum
Value = Plain | Sum | Deferred
"""Between two branches: the residual stream, or what it will be the sum of, or the next norm of it up to a factor."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm at the beginning of the next branch, or at the end of a run, whose norm is not read."""

    norm: RMSNorm
    reads_deferred_norm: Callable[[int], bool]
    """Whether the branch reads a deferred norm of so many rows; ``reads_deferred_sum``: a deferred sum."""
    reads_deferred_sum: Callable[[int], bool] = lambda num_rows: False


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
    ``ctx.logits``.

    Raises:
        TypeError: a layer offers no branches.
    """

    def __init__(self, layers: Sequence[nn.Module], context: ModelContext, *, is_last: bool = False) -> None:
        self.layers, self._context, self.selects_logits = layers, context, is_last
        self._by_layer: list[list[_FusedBranch]] = []
        for layer in layers:
            offered = layer.offer() if isinstance(layer, DecoderLayer) else None
            if offered is None:
                raise TypeError(
                    f"the plan fuses a {type(layer).__name__}, which has a forward of its own and does not offer its "
                    "branches; give it an `offer` too, or set LayerSpec.unfusible in `layer` of the traits"
                )
            self._by_layer.append([_fused_branch(branch, context) for branch in offered])
        branches = [branch for each in self._by_layer for branch in each]
        # At the end the last product makes the residual sum of few rows, and with it a deferred norm that is not read.
        norms = [branch.input_norm for branch in branches if branch.input_norm is not None]
        end = NormSpec(norms[-1], lambda num_rows: True) if norms else None
        self._nexts = [*(branch.norm_spec for branch in branches[1:]), end]
        self._branches = branches
        make_chain = context.ops.layer_chain
        parts = [each for each in map(_layer_parts, self._by_layer) if each is not None]
        self._chain = make_chain(parts) if make_chain is not None and len(parts) == len(layers) else None

    def __call__(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape, or ``[num_logits, hidden_size]``; may write to ``x``."""
        logits = ctx.logits if self.selects_logits else None
        value: Value = Plain(x)
        # The last layer may compute fewer rows.
        num_chained, first = len(self._by_layer) - (logits is not None), 0
        if self._chain is not None and num_chained and x.shape[0]:
            chained = self._chain(x, ctx, num_chained)
            if chained is not None:
                output, residual = chained
                value = Plain(residual) if output is residual else Sum(output, residual)
                first = len(self._branches) if logits is None else -len(self._by_layer[-1])
        remaining = [*zip(self._branches, self._nexts, strict=True)][first:]
        selecting = None if logits is None else self._by_layer[-1][0]
        for branch, next_norm in remaining:
            value = branch.run(value, next_norm, ctx, logits if branch is selecting else None)
            if branch is selecting and isinstance(value, Plain) and not len(value.x):
                return value.x
        return self._branches[-1].finish(value)

    def shortened(self) -> FusedDecoder:
        """See `DecoderRun.shortened`: the first layer has no sum before it, and the last may have fewer rows."""
        kept = representatives([layer.spec for layer in self.layers])  # type: ignore[misc]
        return FusedDecoder([self.layers[index] for index in kept], self._context, is_last=self.selects_logits)


class _Output:
    """A row-parallel linear layer at the end of a branch, and what follows it up to the residual sum."""

    def __init__(self, linear: RowParallelLinear, branch: Branch) -> None:
        group, self.scale, self.norm = linear.group, branch.scale, branch.output_norm
        self._chained = None if linear.is_gathered else linear.weight.chain(OutputRole(self.scale))
        self._product = linear.partial if linear.is_gathered else linear.weight.product
        self.is_alone = group.size == 1  # else the sum over the ranks comes before the residual sum
        self._is_partial = not (self.is_alone or linear.is_gathered)
        self._rank_sums = None if linear.has_bias else group.rank_sums  # all ranks make the same calls
        self.prefetch_weight = None if self._chained is None else self._chained.weight()
        self.product = linear.weight.product

    def add(self, x: torch.Tensor, residual: torch.Tensor, next_norm: NormSpec | None) -> Value:
        """The product of ``x [n, inputs of this rank]``, and its sum with ``residual [n, hidden_size]``, as far as one
        kernel makes it."""
        if self._chained is None:
            output = self._product(x)
            return self._sum(output if self.scale == 1.0 else output * self.scale, residual)
        can_sum = next_norm is not None and (self.is_alone or self._rank_sums is not None)
        deferred = self._defer(self._chained, x, residual, next_norm) if next_norm is not None and can_sum else None
        if deferred is not None:
            return deferred
        if self.norm is None and self.is_alone and self._chained.add_to(x, residual):
            return Plain(residual)
        return self._sum(self._chained(x), residual)

    def _defer(
        self, chained: ChainedOutput, x: torch.Tensor, residual: torch.Tensor, next_norm: NormSpec
    ) -> Deferred | None:
        """The output with the next norm deferred; None: there is no such kernel."""
        norm, own = next_norm.norm, self.norm
        if own is None and next_norm.reads_deferred_norm(len(x)) and not norm.offset:
            return chained.add_and_norm(x, residual, norm.weight, norm.eps, self._rank_sums)
        if own is None or not next_norm.reads_deferred_sum(len(x)):
            return None
        squared = chained.with_squares(x, self._rank_sums)
        if squared is None:
            return None
        weights, total = (own.weight, norm.weight), torch.empty_like(residual)
        return DeferredSum(*squared, residual, *weights, norm.eps, norm.offset, total)

    def _sum(self, output: torch.Tensor, residual: torch.Tensor) -> Sum:
        return Sum(output, residual, self._is_partial, self.norm)


class _FusedBranch(ABC):
    """A branch of a run. ``chained``: the kernels of the linear layer that reads its input norm."""

    def __init__(
        self,
        branch: Branch,
        context: ModelContext,
        chained: ChainedInput | None = None,
        output: RowParallelLinear | None = None,
    ) -> None:
        self.input_norm, self._branch, self._chained = branch.input_norm, branch, chained
        self._add_rms_norm = context.ops.add_rms_norm
        self._reduce_add_rms_norm = context.groups.tensor.reducing(self._add_rms_norm)
        self.output = None if output is None else _Output(output, branch)

    @property
    def norm_spec(self) -> NormSpec | None:
        """Its input norm as the branch before sees it; None: it has none."""
        if self.input_norm is None:
            return None
        if self._chained is None:
            return NormSpec(self.input_norm, lambda num_rows: False)
        return NormSpec(self.input_norm, self._chained.reads_deferred_norm, self._chained.reads_deferred_sum)

    @abstractmethod
    def run(
        self, value: Value, next_norm: NormSpec | None, ctx: ForwardContext, logits: LogitsMetadata | None = None
    ) -> Value:
        """``value``: of the branch before. ``logits``: the rows that are read; None: all."""

    def _read(self, value: Value) -> tuple[torch.Tensor | Deferred, torch.Tensor]:
        """The input of the body, and the residual stream, which a product may write that reads a deferred sum."""
        if isinstance(value, Deferred):
            return value, value.total
        if isinstance(value, Plain):
            return (value.x if self.input_norm is None else self.input_norm(value.x)), value.x
        return self._add(value, self.input_norm)

    def finish(self, value: Value) -> torch.Tensor:
        """The residual stream at the end of a run."""
        if isinstance(value, Deferred):
            return value.total
        return value.x if isinstance(value, Plain) else self._add(value, None)[1]

    def _add(self, value: Sum, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        add = self._reduce_add_rms_norm if value.is_partial else self._add_rms_norm
        given, weight = norm or value.norm, None if norm is None else norm.weight
        if given is None:
            return add(value.output, value.residual, None, 0.0)
        if value.norm is None and not given.offset:
            return add(value.output, value.residual, weight, given.eps)
        output_weight = None if value.norm is None else value.norm.weight
        return add(value.output, value.residual, weight, given.eps, given.offset, output_weight)


class _PlainBranch(_FusedBranch):
    """A body that offers no parts: a mixture of experts, or a class of a user."""

    def run(
        self, value: Value, next_norm: NormSpec | None, ctx: ForwardContext, logits: LogitsMetadata | None = None
    ) -> Value:
        x, residual = self._read(value)
        assert isinstance(x, torch.Tensor)
        output, scale = self._branch.body(x, ctx), self._branch.scale
        if logits is not None:
            output, residual = logits.select(output), logits.select(residual)
            if not len(residual):
                return Plain(residual)
        return Sum(output if scale == 1.0 else output * scale, residual, norm=self._branch.output_norm)


class _AttentionBranch(_FusedBranch):
    """q, k and v, attention and the output projection. Heads are normed, rotated and cached by attention of few query
    tokens, by the product that reads a deferred norm of some dozens of rows, or by a kernel between the two. The
    attention of few tokens prefetches the weight of the output projection."""

    output: _Output

    def __init__(self, branch: Branch, parts: AttentionParts, context: ModelContext) -> None:
        rotary, qkv = parts.paged.rotary, None if parts.qkv_proj is None else parts.qkv_proj.weight
        head_dim = 0 if rotary.norm_offset else rotary.cos_sin.shape[1]
        chained = None if qkv is None else qkv.chain(InputRole("qkv", head_dim))
        super().__init__(branch, context, chained, parts.o_proj)
        self.parts, self.paged = parts, parts.paged
        self._qkv = chained or (parts.project if qkv is None else qkv.product)

    def run(
        self, value: Value, next_norm: NormSpec | None, ctx: ForwardContext, logits: LogitsMetadata | None = None
    ) -> Value:
        """Run the layers. Where there is ``logits``, no more than K and V are computed of the rows that are not
        read."""
        attention = self.paged
        x, residual = self._read(value)
        kv_cache, metadata = ctx.kv_caches[attention.kv_index], ctx.attention_of(attention.kv_index)
        heads = attention.num_heads, attention.rotary
        query = attended = None  # [num_tokens, num_heads, head_dim]
        if self._chained is not None and attention.rotary.kv_scales is None:
            query = self._chained.rotate_and_cache(x, kv_cache, metadata, *heads)
        if query is None:
            qkv = self._qkv(x)  # type: ignore[arg-type]  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
            if logits is None:
                shape = *heads, attention.scale, attention.window, attention.soft_cap
                weight = self.output.prefetch_weight
                attended = attention.backend.forward_fused(qkv, kv_cache, metadata, *shape, weight, attention.sinks)
            if attended is None:
                query = attention.rotate_and_cache(qkv, ctx)
        if logits is not None:
            assert query is not None
            residual = logits.select(residual)  # [num_logits, hidden_size], like all below
            query, metadata = logits.select(query), logits.attention
            if not query.shape[0]:
                return Plain(residual)
        if attended is None:
            assert query is not None
            attended = attention.attend(query, ctx, metadata)
        return self.output.add(attended.flatten(1), residual, next_norm)


class _GatedBranch(_FusedBranch):
    """A gated MLP. Gate and up are one product with the activation inside."""

    output: _Output

    def __init__(self, branch: Branch, parts: GatedParts, context: ModelContext) -> None:
        gate_up, activate = parts.gate_up_proj.weight, parts.activate
        chained = gate_up.chain(InputRole("gated", activation=parts.activation))
        super().__init__(branch, context, chained, parts.down_proj)
        self.parts, product = parts, gate_up.product
        self._gate_up = chained or (lambda x: activate(product(x)))

    def run(
        self, value: Value, next_norm: NormSpec | None, ctx: ForwardContext, logits: LogitsMetadata | None = None
    ) -> Value:
        x, residual = self._read(value)
        return self.output.add(self._gate_up(x), residual, next_norm)


def _fused_branch(branch: Branch, context: ModelContext) -> _FusedBranch:
    match branch.offer():
        case AttentionParts() as attention:
            return _AttentionBranch(branch, attention, context)
        case GatedParts() as gated:
            return _GatedBranch(branch, gated, context)
    return _PlainBranch(branch, context)


def _layer_parts(branches: Sequence[_FusedBranch]) -> LayerParts | None:
    """A layer for a kernel of whole layers; None: these do not compute it."""
    match branches:
        case [_AttentionBranch() as mixer, _GatedBranch() as mlp]:
            pass
        case _:
            return None
    norm, other, outputs = mixer.input_norm, mlp.input_norm, (mixer.output, mlp.output)
    qkv_proj, paged = mixer.parts.qkv_proj, mixer.paged
    if norm is None or other is None or (norm.eps, norm.offset) != (other.eps, 0.0):
        return None
    if qkv_proj is None or paged.soft_cap is not None or paged.sinks is not None or mlp.parts.activation != "silu":
        return None
    if not all(each.is_alone and each.scale == 1.0 and each.norm is None for each in outputs):
        return None
    gate_up = mlp.parts.gate_up_proj.weight.product
    products = qkv_proj.weight.product, mixer.output.product, gate_up, mlp.output.product
    heads = paged.num_heads, paged.kv_index, paged.rotary
    return LayerParts(norm.weight, other.weight, norm.eps, *products, *heads, paged.scale, paged.window)
