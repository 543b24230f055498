"""The shape of the KV cache in memory, for attention, memory plans and connectors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads

if TYPE_CHECKING:
    import torch

BLOCK_CONTIGUOUS_HND = "block-contiguous-hnd"
"""A block of a layer is contiguous, and within it so are the tokens of a head, in the order in which attention reads
them."""
TOKEN_MAJOR_NHD = "token-major-nhd"
"""K of all blocks, then V of all blocks; the heads of a token are contiguous."""
LAYOUT_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    BLOCK_CONTIGUOUS_HND: ("num_blocks", "key_and_value", "num_kv_heads", "block_size", "head_dim"),
    TOKEN_MAJOR_NHD: ("key_and_value", "num_blocks", "block_size", "num_kv_heads", "head_dim"),
}
"""The dimensions of a layer's tensor, outermost first."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV of one layer on one rank."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that attention reads, the current one included; None: all."""


def kv_cache_specs(
    model: ModelConfig, *, tensor_parallel_size: int = 1, layers: range | None = None
) -> tuple[KVCacheSpec, ...]:
    """A spec for each layer of the whole ``model``, or of ``layers`` of this rank of a pipeline, on one rank."""
    heads, windows = num_kv_heads(model, tensor_parallel_size), model.layer_windows
    specs = {window: KVCacheSpec(heads, model.head_dim, window) for window in windows}
    return tuple(specs[windows[layer]] for layer in (range(model.num_layers) if layers is None else layers))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One tensor per layer, with the dimensions of ``LAYOUT_DIMENSIONS[name]``; of ``key_and_value``, index 0 is K, 1
    is V. A block id means the same block in every layer, including those of a drafter.
    """

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVCacheSpec, ...]
    """The model's layers on this rank first, then a drafter's."""
    name: str = BLOCK_CONTIGUOUS_HND

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: str,
        *,
        tensor_parallel_size: int = 1,
        layers: range | None = None,
        name: str = BLOCK_CONTIGUOUS_HND,
    ) -> KVLayout:
        """The layout of a model on one rank; ``layers`` as in `kv_cache_specs`."""
        specs = kv_cache_specs(model, tensor_parallel_size=tensor_parallel_size, layers=layers)
        return cls(num_blocks, block_size, dtype, specs, name)

    def with_layers(self, layers: tuple[KVCacheSpec, ...]) -> KVLayout:
        """This layout with more layers after the present ones."""
        return replace(self, layers=(*self.layers, *layers))

    @property
    def layer_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each layer's tensor."""
        sizes = {"num_blocks": self.num_blocks, "key_and_value": 2, "block_size": self.block_size}
        layers = [sizes | {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim} for spec in self.layers]
        return [tuple(layer[dimension] for dimension in LAYOUT_DIMENSIONS[self.name]) for layer in layers]

    def attention_view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """A layer's tensor as attention reads it: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, with the
        strides of the layout."""
        dimensions = LAYOUT_DIMENSIONS[self.name]
        return kv_cache.permute(*(dimensions.index(name) for name in LAYOUT_DIMENSIONS[BLOCK_CONTIGUOUS_HND]))

    @property
    def layer_block_bytes(self) -> list[int]:
        """Bytes of one block of each layer; in `BLOCK_CONTIGUOUS_HND` contiguous, and the stride between blocks."""
        return [math.prod(shape) // self.num_blocks * DTYPE_BYTES[self.dtype] for shape in self.layer_shapes]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_block_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def fingerprint(self) -> str:
        """16 hex digits. Blocks can be copied between caches with equal fingerprints; ``num_blocks`` may differ."""
        layers = [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in self.layers]
        text = repr((self.name, self.block_size, self.dtype, layers))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
