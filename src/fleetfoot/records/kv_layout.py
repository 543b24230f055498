"""The shape of the KV cache in memory, for attention, memory plans and connectors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads

if TYPE_CHECKING:
    import torch

ARENA = "arena"
"""One tensor: a block is contiguous over all layers, the parts of the layers one after the other. Each part has the
dimensions of `BLOCK_CONTIGUOUS_HND`."""
BLOCK_CONTIGUOUS_HND = "block-contiguous-hnd"
"""A tensor for each layer: a block is contiguous, and within it so are the tokens of a head, in the order in which
attention reads them."""
TOKEN_MAJOR_NHD = "token-major-nhd"
"""A tensor for each layer: K of all blocks, then V of all blocks; the heads of a token are contiguous."""
_PART = ("key_and_value", "num_kv_heads", "block_size", "head_dim")
LAYOUT_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    ARENA: ("num_blocks", "num_layers", *_PART),
    BLOCK_CONTIGUOUS_HND: ("num_blocks", *_PART),
    TOKEN_MAJOR_NHD: ("key_and_value", "num_blocks", "block_size", "num_kv_heads", "head_dim"),
}
"""The dimensions of a tensor, outermost first. The layers of an arena may differ in heads and head size."""


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
    mixers = (model.layers[layer].mixer for layer in (range(model.num_layers) if layers is None else layers))
    return tuple(KVCacheSpec(num_kv_heads(each, tensor_parallel_size), each.head_dim, each.window) for each in mixers)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The tensors of a rank's KV cache, by ``LAYOUT_DIMENSIONS[name]``; of ``key_and_value``, index 0 is K, 1 is V. A
    block id means the same block in every layer, including those of a drafter.
    """

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVCacheSpec, ...]
    """The model's layers on this rank first, then a drafter's."""
    name: str = ARENA

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
        name: str = ARENA,
    ) -> KVLayout:
        """The layout of a model on one rank; ``layers`` as in `kv_cache_specs`."""
        specs = kv_cache_specs(model, tensor_parallel_size=tensor_parallel_size, layers=layers)
        return cls(num_blocks, block_size, dtype, specs, name)

    def with_layers(self, layers: tuple[KVCacheSpec, ...]) -> KVLayout:
        """This layout with more layers after the present ones."""
        return replace(self, layers=(*self.layers, *layers))

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the contiguous tensors that hold the cache: of an arena ``[num_blocks, elements of a block]``,
        else one for each layer."""
        if self.name == ARENA:
            return [(self.num_blocks, sum(map(self._part_elements, self.layers)))]
        return [tuple(map(self._sizes(spec).__getitem__, LAYOUT_DIMENSIONS[self.name])) for spec in self.layers]

    @property
    def dimension_sizes(self) -> list[int]:
        """Sizes of the first layer by ``LAYOUT_DIMENSIONS[name]``, for messages."""
        return [self._sizes(self.layers[0])[dimension] for dimension in LAYOUT_DIMENSIONS[self.name]]

    def layer_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each layer's cache as attention reads it, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, with the
        strides of the layout. ``tensors``: with `tensor_shapes`."""
        shapes = [tuple(map(self._sizes(spec).__getitem__, _PART)) for spec in self.layers]
        if self.name == ARENA:
            parts = tensors[0].split([math.prod(shape) for shape in shapes], dim=1)
            return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
        order = [LAYOUT_DIMENSIONS[self.name].index(name) for name in LAYOUT_DIMENSIONS[BLOCK_CONTIGUOUS_HND]]
        return [tensor.permute(order) for tensor in tensors]

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of a block in each tensor. Where blocks come first, this is the stride between them."""
        element, blocks = DTYPE_BYTES[self.dtype], max(1, self.num_blocks)
        return [math.prod(shape) // blocks * element for shape in self.tensor_shapes]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(map(self._part_elements, self.layers)) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def fingerprint(self) -> str:
        """16 hex digits. Blocks can be copied between caches with equal fingerprints; ``num_blocks`` may differ."""
        layers = [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in self.layers]
        text = repr((self.name, self.block_size, self.dtype, layers))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _sizes(self, spec: KVCacheSpec) -> dict[str, int]:
        sizes = {"num_blocks": self.num_blocks, "num_layers": len(self.layers), "key_and_value": 2}
        return sizes | {"block_size": self.block_size} | {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}

    def _part_elements(self, spec: KVCacheSpec) -> int:
        return 2 * spec.num_kv_heads * self.block_size * spec.head_dim
