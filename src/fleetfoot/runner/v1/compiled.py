"""Stock ``torch.compile`` over the plain layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from fleetfoot.layers.attention import Attention, PagedAttention
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, IntermediateTensors
from fleetfoot.runner.v1.padding import run_padding


class _OpaqueAttention(PagedAttention):
    """Attention that is not traced: a call from compiled code, since its kernels and the KV cache are not torch's."""

    @torch.compiler.disable
    def rotate_and_cache(self, qkv: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return PagedAttention.rotate_and_cache(self, qkv, ctx)

    @torch.compiler.disable
    def attend(self, query: torch.Tensor, ctx: ForwardContext, metadata: AttentionMetadata) -> torch.Tensor:
        return PagedAttention.attend(self, query, ctx, metadata)


def compile_layers(model: CausalLM) -> None:
    """Compile each decoder layer. Layers of one kind share the compiled code; `warm_up_layers` makes it."""
    for layer in model.model.layers.values():
        for module in layer.modules():
            if isinstance(module, Attention):
                values = {item.name: getattr(module.paged, item.name) for item in fields(PagedAttention)}
                module.paged = _OpaqueAttention(**values)
        layer.compile()


def warm_up_layers(model: CausalLM, kv_caches: Sequence[torch.Tensor]) -> None:
    """Compile for several tokens, for any number of them, and for one: a forward pass each, which writes no KV."""
    for num_tokens in (2, 3, 1):
        hidden = kv_caches[0].new_zeros(num_tokens, model.config.hidden_size)
        run_padding(model, kv_caches, num_tokens, None if model.is_first else IntermediateTensors(hidden))
