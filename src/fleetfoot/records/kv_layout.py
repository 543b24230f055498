"""The shape of the KV cache in memory: what kernels index, what is counted and moved. No torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV has the same shape: those of the model, or of a drafter beside it."""

    num_layers: int
    num_kv_heads: int
    """On this rank."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One tensor a layer, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``: K at 0, V at 1 of dimension 1.

    A block of a layer is one contiguous piece, and within it the tokens of a head lie side by side, which is what
    attention reads. A block id means the same block in every layer, a drafter's included.
    """

    name: ClassVar[str] = "block-contiguous-hnd"

    num_blocks: int
    block_size: int
    dtype: str
    groups: tuple[LayerGroup, ...]
    """The model's layers on this rank first, then a drafter's."""

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
    ) -> KVLayout:
        """Of a model on one rank of a tensor group that has ``layers`` of it; None: all."""
        num_layers = model.num_layers if layers is None else len(layers)
        group = LayerGroup(num_layers, num_kv_heads(model, tensor_parallel_size), model.head_dim)
        return cls(num_blocks, block_size, dtype, (group,))

    def with_groups(self, groups: tuple[LayerGroup, ...]) -> KVLayout:
        """With further layers behind those that there are."""
        return replace(self, groups=(*self.groups, *groups))

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def layer_shapes(self) -> list[tuple[int, int, int, int, int]]:
        """Of every layer's tensor, in order."""
        return [
            (self.num_blocks, 2, group.num_kv_heads, self.block_size, group.head_dim)
            for group in self.groups
            for _ in range(group.num_layers)
        ]

    @property
    def layer_block_bytes(self) -> list[int]:
        """Bytes of one block of each layer: the stride from block to block, and a piece that can be moved at once."""
        return [math.prod(shape[1:]) * DTYPE_BYTES[self.dtype] for shape in self.layer_shapes]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_block_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def fingerprint(self) -> str:
        """16 hex digits that are equal where a block of one cache can be copied to another: all but ``num_blocks``."""
        text = repr((self.block_size, self.dtype, [(g.num_layers, g.num_kv_heads, g.head_dim) for g in self.groups]))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
