"""The two ends of a model: from token ids to hidden states, and from hidden states to logits.

Over a tensor group both are split by tokens: each rank holds the rows of some. A lookup is summed over the ranks, all
but one of which add zeros. Logits are computed for a rank's own tokens and gathered. Each of them is computed by one
rank and copied to the others, so every rank has the same logits, bit by bit, and samples the same tokens from them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import vocab_rows, vocab_span
from fleetfoot.kernels.linear.linear import PreparedLinear
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.layers.linear import ColumnParallelLinear
from fleetfoot.records.weights import WeightSpec

_LM_HEAD = "lm_head"


class VocabParallelEmbedding(WeightModule):
    """``input_ids [num_tokens]`` -> ``[num_tokens, hidden_size]``."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        group = self._group = context.tensor_group
        self.vocab_size = config.vocab_size
        self._tokens = vocab_span(config.vocab_size, group.rank, group.size)
        num_rows = vocab_rows(config.vocab_size, group.size)
        self._row_of_token: torch.Tensor | None = None
        if group.size > 1:  # one more row, of zeros, for all tokens that other ranks hold
            self._row_of_token = torch.full((config.vocab_size,), num_rows, device=context.device)
            self._row_of_token[self._tokens] = torch.arange(self._num_tokens, device=context.device)
        shape = (num_rows + (group.size > 1), config.hidden_size)
        self._table = torch.empty(shape, dtype=context.dtype, device=context.device)
        self._table[self._num_tokens :] = 0  # padding too, which a tied head multiplies with
        self.weight = self._table[:num_rows]
        # A tied checkpoint may hold the matrix under either name, or twice.
        self._aliases = (f"{_LM_HEAD}.weight",) if config.tie_word_embeddings else ()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` int64 -> ``[num_tokens, hidden_size]``."""
        if self._row_of_token is None:
            return F.embedding(input_ids, self._table)
        return self._group.all_reduce(F.embedding(self._row_of_token[input_ids], self._table))

    @property
    def _num_tokens(self) -> int:
        return self._tokens.stop - self._tokens.start

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        shape = (self.vocab_size, self.weight.shape[1])
        part = () if self._group.size == 1 else (self._tokens, slice(0, shape[1]))
        yield WeightSpec(f"{prefix}{name}.weight", shape, self._held_rows, aliases=self._aliases, part=part)

    def _held_rows(self) -> torch.Tensor:
        return self.weight[: self._num_tokens]


class LMHead(ColumnParallelLinear):
    """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]`` in the model's dtype."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        group = context.tensor_group
        tokens = vocab_span(config.vocab_size, group.rank, group.size)
        padding = vocab_rows(config.vocab_size, group.size) - (tokens.stop - tokens.start)
        parts = ((_LM_HEAD, config.vocab_size),)
        super().__init__(context, config.hidden_size, parts, rows=(tokens,), padding=padding)
        self._group = group
        self._vocab_size = config.vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden_size]`` -> logits ``[n, vocab_size]``."""
        return self._group.all_gather(super().forward(x), self._vocab_size)


class TiedLMHead(WeightModule):
    """Logits from the embedding's matrix, which is shared unless a CPU packs it: the lookup reads plain rows, and the
    product over the whole vocabulary is the largest of a decode step."""

    def __init__(self, embedding: VocabParallelEmbedding, context: ModelContext) -> None:
        super().__init__()
        self._matrix = embedding.weight
        self._vocab_size = embedding.vocab_size
        self._group = context.tensor_group
        self._prepare = context.ops.prepare_linear
        self._prepared: PreparedLinear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, hidden_size]`` -> logits ``[n, vocab_size]``."""
        if self._prepared is None:
            raise RuntimeError("the logits head was called before process_weights_after_loading")
        return self._group.all_gather(self._prepared(x), self._vocab_size)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        """None: the embedding's spec fills both."""
        return iter(())

    def process_own_weights(self) -> None:
        if self._prepared is None:
            self._prepared = self._prepare(self._matrix)
        else:
            self._prepared.replace(self._matrix)
