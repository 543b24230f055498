"""OLMo 2 (Ai2 2024): norms after attention and MLP instead of before, and norms of q and k over all of their heads."""

from __future__ import annotations

from typing import ClassVar

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.attention import Attention, AttentionParts
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.models.llama import LlamaForCausalLM


class Olmo2Attention(Attention):
    """The ranks of a tensor group gather q and k for the norms, each of which is over the heads of all ranks."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__(config, context, cos_sin, layer, kv_index)
        spec = config.layers[layer].mixer
        self.q_norm = RMSNorm(context, spec.num_heads * spec.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(context, spec.num_kv_heads * spec.head_dim, config.rms_norm_eps)
        self._group = context.groups.tensor
        self._copies = max(1, self._group.size // spec.num_kv_heads)
        """Consecutive ranks with the same KV head."""
        self._sizes = self.paged.num_heads * spec.head_dim, self.num_kv_heads * spec.head_dim

    def offer(self) -> AttentionParts:
        return AttentionParts(self.project, None, self.paged, self.o_proj)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v of ``x [num_tokens, hidden_size]``, in one tensor, after the norms of q and k."""
        q_size, kv_size = self._sizes
        qk, value = self.qkv_proj(x).split((q_size + kv_size, kv_size), dim=1)
        by_rank = self._group.all_gather(qk).view(len(x), self._group.size, q_size + kv_size)
        q, k = by_rank[..., :q_size].flatten(1), by_rank[:, :: self._copies, q_size:].flatten(1)  # of all heads
        q_begin, k_begin = self._group.rank * q_size, self._group.rank // self._copies * kv_size
        query = self.q_norm(q.contiguous())[:, q_begin : q_begin + q_size]
        key = self.k_norm(k.contiguous())[:, k_begin : k_begin + kv_size]
        return torch.cat((query, key, value), dim=1)


class Olmo2DecoderLayer(DecoderLayer):
    """A layer with the norms of `Olmo2Attention`; those after attention and MLP follow the config."""

    attention_class: ClassVar[type[Attention]] = Olmo2Attention


class Olmo2ForCausalLM(LlamaForCausalLM):
    """The model of the OLMo-2 checkpoints."""

    layer_class: ClassVar[type[DecoderLayer]] = Olmo2DecoderLayer
