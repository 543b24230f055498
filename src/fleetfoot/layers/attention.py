"""Self-attention of one decoder layer over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fleetfoot.attention.metadata import AttentionMetadata
from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.slots import WeightSlot


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads that this rank computes, the one place that counts them; ``head_dim`` is in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> AttentionHeads:
        return cls(config.num_heads, config.num_kv_heads, config.head_dim)

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
        "_cos_sin",
        "_eps",
        "_num_heads",
        "_rope_and_cache",
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
        parts = (("q_proj", heads.q_size), ("k_proj", heads.kv_size), ("v_proj", heads.kv_size))
        self.qkv = Linear(context, config.hidden_size, parts, config.qkv_bias)
        o_part = (("o_proj", config.hidden_size),)
        self.o = Linear(context, heads.q_size, o_part, config.o_bias, context.ops.prepare_residual_linear)
        self.q_norm = RMSNorm(context, heads.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(context, heads.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self._cos_sin = cos_sin
        self._eps = config.rms_norm_eps
        self._num_heads = heads.num_heads
        self._scale = heads.head_dim**-0.5
        self._window = config.layer_windows[layer]
        self._rope_and_cache = context.ops.rope_and_cache
        self._attend = context.attention.forward

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """``hidden [num_tokens, hidden_size]`` -> the same shape, or partial sums of it for the norm that follows.

        Writes the tokens' K and V to ``kv_cache``.
        """
        qkv = self.qkv(hidden)  # [num_tokens, q_size + 2 * kv_size]
        query = self._rope_and_cache(
            qkv,
            kv_cache,
            metadata.slot_mapping,
            positions,
            self._cos_sin,
            self._num_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self._eps,
        )  # [num_tokens, num_heads, head_dim]
        attended = self._attend(query, kv_cache, metadata, self._scale, self._window)
        return self.o(attended.flatten(1))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.qkv.weight_slots(prefix)
        yield from self.o.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_slots(f"{prefix}q_norm.")
            yield from self.k_norm.weight_slots(f"{prefix}k_norm.")

    def finish_loading(self) -> None:
        self.qkv.finish_loading()
        self.o.finish_loading()
