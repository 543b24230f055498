"""Llama (Touvron et al. 2023): the decoder that the other architectures here are variants of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.kernels.norm.rms_norm import sum_parts
from fleetfoot.layers.attention import AttentionHeads
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.embedding import Embedding, LogitsHead, TiedLogitsHead
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.rotary import rotary_table
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.records.attention import AttentionMetadata, WantedTokens
from fleetfoot.records.intermediate import IntermediateTensors


class LlamaForCausalLM:
    """Implements `CausalLM`; biases, head norms, windows and tying are as the config says."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        whole = range(config.num_layers)
        layers = whole if layers is None else layers
        if not layers or layers.step != 1 or layers[0] not in whole or layers[-1] not in whole:
            raise ValueError(f"layers is {layers}; expected consecutive ones out of {whole}")
        self.config = config
        self.heads = AttentionHeads.of(config, context.tensor_group)
        self.layers = layers
        tied_head = self.is_last and config.tie_word_embeddings
        self._embedding = Embedding(config, context) if self.is_first or tied_head else None
        max_positions = context.max_positions or config.max_position_embeddings
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, context.device)
        self._layers = [DecoderLayer(config, context, self.heads, cos_sin, layer) for layer in layers]
        self._norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps) if self.is_last else None
        self._head: LogitsHead | TiedLogitsHead | None = None
        if tied_head and self._embedding is not None:
            self._head = TiedLogitsHead(self._embedding, context)
        elif self.is_last:
            self._head = LogitsHead(config, context)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        entering, residual = self._enter(input_ids, intermediate_tensors)
        hidden: torch.Tensor | PendingNorm = entering
        for layer, then, kv_cache in zip(self._layers[:-1], self._layers[1:], kv_caches[:-1], strict=True):
            hidden, residual = layer(hidden, residual, positions, kv_cache, metadata, then=then.begins_with)
        hidden, residual = self._layers[-1](hidden, residual, positions, kv_caches[-1], metadata, wanted)
        assert not isinstance(hidden, PendingNorm)  # no layer was named that follows
        if self._norm is None:
            is_summed = hidden is residual
            return IntermediateTensors(torch.zeros_like(hidden) if is_summed else sum_parts(hidden, residual), residual)
        return self._norm.add(hidden, residual)[0]

    def _enter(
        self, input_ids: torch.Tensor, intermediate: IntermediateTensors | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if intermediate is not None:
            return intermediate.hidden_states, intermediate.residual
        if not self.is_first or self._embedding is None:
            raise ValueError(f"layers {self.layers} need the intermediate_tensors of the layers before them")
        return self._embedding(input_ids), None

    def shortened(self) -> tuple[LlamaForCausalLM, list[int]]:
        last = len(self._layers) - 1
        windows = [self.config.layer_windows[layer] for layer in self.layers]
        # The first has no residual yet, and the last may have fewer tokens; in between, windows alone differ.
        kept = sorted({0, last, *(windows.index(window) for window in windows[:last])})
        short = copy(self)
        short._layers = [self._layers[index] for index in kept]
        return short, kept

    @property
    def has_embedding(self) -> bool:
        return self._embedding is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is None:
            raise ValueError(f"layers {self.layers} have no embedding; it is with the first one")
        return self._embedding(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            raise ValueError(f"layers {self.layers} have no logits head; it is with the last one")
        return self._head(hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self._embedding is not None:
            yield from self._embedding.weight_slots("model.embed_tokens.")
        for number, layer in zip(self.layers, self._layers, strict=True):
            yield from layer.weight_slots(f"model.layers.{number}.")
        if self._norm is not None:
            yield from self._norm.weight_slots("model.norm.")
        if self._head is not None:
            yield from self._head.weight_slots()

    def finish_loading(self) -> None:
        for layer in self._layers:
            layer.finish_loading()
        if self._head is not None:
            self._head.finish_loading()
