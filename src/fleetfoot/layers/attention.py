"""Self-attention of one decoder layer over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import even_span, kv_head_span
from fleetfoot.kernels.attention import AttentionBackend
from fleetfoot.kernels.attention.sdpa_backend import BidirectionalBackend
from fleetfoot.kernels.interface import RopeAndCache
from fleetfoot.layers.branch import Offering
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.rotary import stored_rows
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, RotaryInputs
from fleetfoot.records.weights import WeightSpec, join_rows, slices_of


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one layer over its KV cache, between the projections. It has no weights of its own."""

    num_heads: int
    """Query heads of this rank."""
    kv_index: int
    """The index of the layer's KV cache in `ForwardContext.kv_caches`."""
    rotary: RotaryInputs
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    """``[num_heads]`` float32, scores without a value."""
    rope_and_cache: RopeAndCache
    backend: AttentionBackend

    def rotate_and_cache(self, qkv: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Split ``qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, norm and rotate q and k, and write K
        and V. Returns ``query [num_tokens, num_heads, head_dim]``."""
        metadata = ctx.attention_of(self.kv_index)
        return self.rope_and_cache(qkv, ctx.kv_caches[self.kv_index], metadata, self.num_heads, self.rotary)

    def attend(self, query: torch.Tensor, ctx: ForwardContext, metadata: AttentionMetadata) -> torch.Tensor:
        """``query [n, num_heads, head_dim]`` of the tokens of ``metadata`` -> the same shape."""
        kv_cache, shape = ctx.kv_caches[self.kv_index], (self.scale, self.window, self.soft_cap, self.sinks)
        return self.backend.forward(query, kv_cache, metadata, *shape, self.rotary.kv_scales)


class Sinks(WeightModule):
    """A learned score of each head that joins the softmax of attention without a value (Xiao et al. 2024)."""

    def __init__(self, context: ModelContext, num_heads: int, heads: slice) -> None:
        super().__init__()
        self.values = torch.empty(heads.stop - heads.start, dtype=torch.float32, device=context.device)
        """``[heads of this rank]``"""
        self._num_heads, self._heads = num_heads, heads

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        part = () if len(self.values) == self._num_heads else (self._heads,)
        yield WeightSpec(f"{prefix}{name}", (self._num_heads,), lambda: self.values, part=part)


class KVScales(WeightModule):
    """What K and V in a cache in FP8 are multiples of: those of the checkpoint, or 1. ``num_heads``: the checkpoint has
    one for each KV head, of which the largest counts on all ranks; 0: it has one for all."""

    def __init__(self, context: ModelContext, num_heads: int = 0) -> None:
        super().__init__()
        self.values = torch.ones(2, dtype=torch.float32, device=context.device)
        self._of_heads = torch.ones(2, num_heads, dtype=torch.float32, device=context.device) if num_heads else None

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        for index, kind in enumerate("kv"):
            names = f"{prefix}{kind}_proj.{kind}_scale", f"{prefix}attn.{kind}_scale", f"{prefix}kv_scale"
            spec = WeightSpec(
                f"{prefix}{kind}_scale", (1,), partial(self.values.narrow, 0, index, 1), 1.0, aliases=names
            )
            if (of_heads := self._of_heads) is not None:
                own = partial(of_heads.__getitem__, index)
                spec = replace(spec, shape=(of_heads.shape[1],), destination=own, filled=partial(self._join, index))
            yield replace(spec, default=1.0)

    def _join(self, index: int) -> None:
        assert self._of_heads is not None
        self.values[index] = self._of_heads[index].max()


class AttentionParts(NamedTuple):
    """Attention as fusion computes it."""

    project: Callable[[torch.Tensor], torch.Tensor]
    """``x [num_tokens, hidden_size]`` -> q, k and v in one tensor."""
    qkv_proj: ColumnParallelLinear | None
    """The linear layer that is ``project``; None: more is computed there."""
    paged: PagedAttention
    o_proj: RowParallelLinear


class Attention(Offering):
    """Grouped-query attention with rotary positions, and an RMSNorm on each head of q and k where the model has it.

    ``cos_sin``: of `rotary_table`, shared by the layers with equal ropes; ``layer``: its number in the model;
    ``kv_index``: of its KV cache in `ForwardContext.kv_caches`.
    """

    computes = ("forward", "project")

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__()
        spec, group = config.layers[layer].mixer, context.groups.tensor
        rope, head_dim = spec.rope, spec.head_dim
        q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        q = even_span(q_size, group.rank, group.size)
        heads = even_span(spec.num_heads, group.rank, group.size)
        kv_heads = kv_head_span(spec, group.rank, group.size)
        v = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        num_gates = int(spec.has_output_gate)  # after each head's query, and stored before all queries
        q_rows = stored_rows(rope, head_dim, heads, 1 + num_gates)
        if num_gates:
            gates = range((2 * heads.start + 1) * head_dim, 2 * heads.stop * head_dim, 2 * head_dim)
            q_rows = join_rows((*(slice(gate, gate + head_dim) for gate in gates), *slices_of(q_rows)))
        rows = (q_rows, stored_rows(rope, head_dim, kv_heads), v)
        parts = (("q_proj", (1 + num_gates) * q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        merged = "qkv_proj" if config.has_merged_projections else None
        self.qkv_proj = ColumnParallelLinear(
            context, config.hidden_size, parts, spec.qkv_bias, rows=rows, merged=merged
        )
        self.o_proj = RowParallelLinear(context, "o_proj", q_size, config.hidden_size, spec.o_bias, q)
        of_a_head = stored_rows(rope, head_dim, slice(0, 1))
        norm = head_dim, config.rms_norm_eps, config.norm_offset
        self.q_norm = RMSNorm(context, *norm, rows=of_a_head) if spec.qk_norm else None
        self.k_norm = RMSNorm(context, *norm, rows=of_a_head) if spec.qk_norm else None
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        self.sinks = Sinks(context, spec.num_heads, heads) if spec.has_sinks else None
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        has_scales = context.has_fp8_kv or config.quantization.has_kv_scales
        num_scales = spec.num_kv_heads if config.quantization.has_scales_of_heads else 0
        self.kv_scales = KVScales(context, num_scales) if has_scales else None
        scales = self.kv_scales.values if self.kv_scales is not None and context.has_fp8_kv else None
        self.paged = PagedAttention(
            spec.num_heads // group.size,
            kv_index,
            RotaryInputs(cos_sin, q_norm, k_norm, *norm[1:], scales),
            head_dim**-0.5 if spec.scale is None else spec.scale,
            spec.window,
            spec.soft_cap,
            None if self.sinks is None else self.sinks.values,
            context.ops.rope_and_cache,
            context.attention if spec.is_causal else BidirectionalBackend(),
        )

    def offer(self) -> AttentionParts | None:
        return AttentionParts(self.project, self.qkv_proj, self.paged, self.o_proj)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v of ``x [num_tokens, hidden_size]``, in one tensor, after the gates where there are any."""
        return self.qkv_proj(x)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the tokens' K and V to the layer's KV cache."""
        qkv = self.project(x)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        query = self.paged.rotate_and_cache(qkv, ctx)  # [num_tokens, num_heads, head_dim]
        attended = self.paged.attend(query, ctx, ctx.attention_of(self.paged.kv_index))
        return self.o_proj(attended.flatten(1))
