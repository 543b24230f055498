"""One layer of a decoder: what a model has many of."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.attention import Attention, AttentionHeads
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.mlp import MLP
from fleetfoot.layers.norm import NormedLinear, RMSNorm
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.records.attention import AttentionMetadata, WantedTokens


class DecoderParts:
    """Attention and MLP, each behind a norm; the first norm may be missing."""

    __slots__ = ("attention", "attention_norm", "before_mlp", "mlp", "mlp_norm")

    attention_norm: RMSNorm | None

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        heads: AttentionHeads,
        cos_sin: torch.Tensor,
        layer: int,
        *,
        has_input_norm: bool = True,
    ) -> None:
        self.attention_norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps) if has_input_norm else None
        self.attention = Attention(config, context, heads, cos_sin, layer)
        self.mlp_norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, context)
        self.before_mlp = NormedLinear(self.mlp_norm, self.mlp.gate_up)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self.attention_norm is not None:
            yield from self.attention_norm.weight_slots(f"{prefix}input_layernorm.")
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp_norm.weight_slots(f"{prefix}post_attention_layernorm.")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")

    def finish_loading(self) -> None:
        self.attention.finish_loading()
        self.mlp.finish_loading()


class DecoderLayer(DecoderParts):
    """With all its norms; sums with the residual stream are left to the norm that follows."""

    __slots__ = ("begins_with",)

    attention_norm: RMSNorm

    def __init__(
        self, config: ModelConfig, context: ModelContext, heads: AttentionHeads, cos_sin: torch.Tensor, layer: int
    ) -> None:
        super().__init__(config, context, heads, cos_sin, layer)
        self.begins_with = NormedLinear(self.attention_norm, self.attention.qkv)

    def __call__(
        self,
        hidden: torch.Tensor | PendingNorm,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        wanted: WantedTokens | None = None,
        then: NormedLinear | None = None,
    ) -> tuple[torch.Tensor | PendingNorm, torch.Tensor]:
        """``(hidden, residual)``, whose sum ``[num_tokens, hidden_size]`` is the layer's output, or twice that output
        itself, or for ``then`` what else `RMSNorm.add` takes. The residual that was given may be written to.

        Args:
            wanted: the tokens whose output is made; of the others K and V alone. None: all.
            then: what the layer that follows begins with, if it is given nothing but this one's result.
        """
        hidden, residual = self.attention_norm.add(hidden, residual)
        if wanted is not None:
            residual = wanted.of(residual)
        hidden = self.attention(hidden, positions, kv_cache, metadata, residual, wanted, self.before_mlp)
        if not len(residual):
            return residual, residual
        hidden, residual = self.mlp_norm.add(hidden, residual)
        return self.mlp(hidden, residual, then), residual
