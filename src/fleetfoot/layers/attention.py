"""Self-attention of one decoder layer over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import check_tensor_parallel_size, even_span, kv_head_span, num_kv_heads
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP, TensorGroup
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.norm import NormedLinear, RMSNorm
from fleetfoot.layers.residual_linear import ResidualLinear
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.records.attention import AttentionMetadata, RotaryInputs, WantedTokens


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads that this rank computes, the one place that counts them; ``head_dim`` is in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, group: TensorGroup = SINGLE_TENSOR_GROUP) -> AttentionHeads:
        """Raises:
        ValueError: the group's ranks cannot share them; the message names group sizes that can.
        """
        check_tensor_parallel_size(config, group.size)
        return cls(config.num_heads // group.size, num_kv_heads(config, group.size), config.head_dim)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Attention:
    """Grouped-query attention with rotary positions, and an RMSNorm on each head of q and k where the model has it."""

    __slots__ = (
        "_attend",
        "_attend_fused",
        "_num_heads",
        "_rope_and_cache",
        "_rotary",
        "_scale",
        "_window",
        "k_norm",
        "o",
        "q_norm",
        "qkv",
    )

    def __init__(
        self, config: ModelConfig, context: ModelContext, heads: AttentionHeads, cos_sin: torch.Tensor, layer: int
    ) -> None:
        """``cos_sin``: the table of `rotary_table`, shared by all layers."""
        group, head_dim = context.tensor_group, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        q = even_span(q_size, group.rank, group.size)
        kv_heads = kv_head_span(config, group.rank, group.size)
        kv = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv = Linear(context, config.hidden_size, parts, config.qkv_bias, rows=(q, kv, kv))
        self.o = ResidualLinear(context, "o_proj", q_size, config.hidden_size, config.o_bias, q)
        self.q_norm = RMSNorm(context, heads.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(context, heads.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self._rotary = RotaryInputs(
            cos_sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            config.rms_norm_eps,
        )
        self._num_heads = heads.num_heads
        self._scale = heads.head_dim**-0.5
        self._window = config.layer_windows[layer]
        self._rope_and_cache = context.ops.rope_and_cache
        self._attend = context.attention.forward
        self._attend_fused = context.attention.forward_fused

    def __call__(
        self,
        hidden: torch.Tensor | PendingNorm,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        residual: torch.Tensor | None = None,
        wanted: WantedTokens | None = None,
        then: NormedLinear | None = None,
    ) -> torch.Tensor | PendingNorm:
        """``hidden [num_tokens, hidden_size]`` -> the same shape, or what else `ResidualLinear` gives, for the norm
        that follows, which also adds up what the ranks of a tensor group have.

        Writes the tokens' K and V to ``kv_cache``.

        Args:
            residual, then: see `ResidualLinear`.
            wanted: the tokens to attend with, whose ``residual`` it is; the result has no others. None: all.
        """
        qkv = self.qkv(hidden)  # [num_tokens, q_size + 2 * kv_size]
        rotary = self._rotary
        attended = None  # [num_tokens, num_heads, head_dim]
        if wanted is None:
            attended = self._attend_fused(
                qkv, kv_cache, metadata, self._num_heads, rotary, self._scale, self._window, self.o.streamed
            )
        if attended is None:
            query = self._rope_and_cache(
                qkv,
                kv_cache,
                metadata.slot_mapping,
                positions,
                rotary.cos_sin,
                self._num_heads,
                rotary.q_norm,
                rotary.k_norm,
                rotary.eps,
            )
            if wanted is not None:
                query, metadata = wanted.of(query), wanted.metadata
                if residual is not None and not len(query):
                    return residual
            attended = self._attend(query, kv_cache, metadata, self._scale, self._window)
        return self.o(attended.flatten(1), residual, then)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv.weight_slots(prefix)
        yield from self.o.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}q_norm.")
            yield from self.k_norm.weight_slots(f"{prefix}k_norm.")

    def finish_loading(self) -> None:
        self.qkv.finish_loading()
        self.o.finish_loading()
