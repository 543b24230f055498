"""What a request lists for its logits (biases, bad words, stop tokens), packed for the device's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fleetfoot.kernels.sampling.records import (
    BIASES,
    NUM_PLANES,
    PREFIX_ENDS,
    PREFIX_TOKENS,
    TOKENS,
)
from fleetfoot.records.step import NewRequest

if TYPE_CHECKING:
    pass


MASK_BITS = 32


@dataclass(frozen=True, slots=True)
class RowList:
    """Tokens that a request has listed, as `ListedTokens` wants them: a row's part of each plane, int32."""

    planes: tuple[np.ndarray, ...]
    num_biases: int
    num_words: int
    num_stops: int

    @classmethod
    def of(cls, request: NewRequest, vocab_size: int) -> RowList:
        params, words = request.params, request.bad_words_token_ids
        biases = params.logit_bias or {}
        # a stop token outside the model's vocabulary cannot be generated
        stops = [token for token in sorted(request.stop_token_ids) if token < vocab_size] if params.min_tokens else []
        if not biases and not words and not stops:  # as most requests are
            return _NOTHING_LISTED
        prefixes: list[list[int]] = [[] for _ in biases] + [list(word[:-1]) for word in words] + [[] for _ in stops]
        planes: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * NUM_PLANES
        planes[TOKENS] = np.array([*biases, *(word[-1] for word in words), *stops], dtype=np.int32)
        planes[BIASES] = np.array(list(biases.values()), dtype=np.float32).view(np.int32)
        planes[PREFIX_ENDS] = np.cumsum([len(prefix) for prefix in prefixes], dtype=np.int32)
        planes[PREFIX_TOKENS] = np.array([token for prefix in prefixes for token in prefix], dtype=np.int32)
        return cls(tuple(planes), len(biases), len(words), len(stops))

    @property
    def length(self) -> int:
        """What the longest plane takes."""
        return max(len(plane) for plane in self.planes)


_NOTHING_LISTED = RowList((np.empty(0, dtype=np.int32),) * NUM_PLANES, 0, 0, 0)


def mask_words(token_ids: list[int], num_words: int) -> np.ndarray:
    """``[num_words]`` int32 with a bit for each token of the vocabulary, set for ``token_ids``."""
    bits = np.zeros(num_words * MASK_BITS, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
