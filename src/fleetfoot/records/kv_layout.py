"""The shape of the KV cache in memory, for attention, memory plans and connectors."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads


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
    """One tensor per layer, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; index 0 of dim 1 is K, 1 is V.

    A block of a layer is contiguous, and within it so are the tokens of a head, in the order in which attention reads
    them. A block id means the same block in every layer, including those of a drafter.
    """

    name: ClassVar[str] = "block-contiguous-hnd"

    num_blocks: int
    block_size: int
    dtype: str
    layers: tuple[KVCacheSpec, ...]
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
        """The layout of a model on one rank; ``layers`` as in `kv_cache_specs`."""
        specs = kv_cache_specs(model, tensor_parallel_size=tensor_parallel_size, layers=layers)
        return cls(num_blocks, block_size, dtype, specs)

    def with_layers(self, layers: tuple[KVCacheSpec, ...]) -> KVLayout:
        """With more layers after the present ones."""
        return replace(self, layers=(*self.layers, *layers))

    @property
    def layer_shapes(self) -> list[tuple[int, int, int, int, int]]:
        """The shape of each layer's tensor."""
        return [(self.num_blocks, 2, spec.num_kv_heads, self.block_size, spec.head_dim) for spec in self.layers]

    @property
    def layer_block_bytes(self) -> list[int]:
        """Bytes of one block of each layer: contiguous, and the stride between blocks."""
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
        """16 hex digits. Blocks can be copied between caches with equal fingerprints; ``num_blocks`` may differ."""
        text = repr((self.block_size, self.dtype, [(s.num_kv_heads, s.head_dim, s.window) for s in self.layers]))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
