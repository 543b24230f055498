"""The shape of the KV cache in memory: what kernels index, what the memory plan counts, what connectors move."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One tensor a layer, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``: K at 0, V at 1 of dimension 1.

    A block of a layer is one contiguous piece, and within it the tokens of a head lie side by side, which is what
    attention reads.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> KVLayout:
        return cls(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, dtype)

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        elements = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return self.num_layers * elements * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors of all layers, zeroed: a slot that nobody wrote must not hold NaN, which masking cannot undo.

        On a CPU the zeros are the operating system's own pages, so memory is taken only as blocks are first written.
        """
        dtype = getattr(torch, self.dtype)
        if device.type != "cpu":
            return [torch.zeros(self.layer_shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        size = math.prod(self.layer_shape) * DTYPE_BYTES[self.dtype]
        return [
            torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(self.layer_shape)
            for _ in range(self.num_layers)
        ]
