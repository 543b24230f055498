"""Operations of sampling: logits processors, sampling, logprobs. No torch here: the memory plan uses the limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of logits to process at once: on a CPU they fit the cache, elsewhere they are 64 MiB of float32."""
CHUNK_BYTES_PER_ELEMENT = 48
"""Temporaries of a chunk: sorted values, their indices, sums and masks, or the integers of the noise."""


def rows_per_chunk(vocab_size: int, device: torch.device) -> int:
    """Number of rows of logits to process at once, so that temporaries are bounded for every batch size."""
    return max(1, MAX_ELEMENTS.get(device.type, MAX_ELEMENTS["cuda"]) // vocab_size)
