"""The two ends of a model: from token ids to hidden states, and from hidden states to logits.

Over a tensor group both are shared by tokens: each rank holds the rows of some. A lookup is summed over the ranks, all
but one of which add zeros. Logits are computed for a rank's own tokens and gathered. Each of them is computed by one
rank and copied to the others, so every rank has the very same logits, and chooses the same tokens from them: that
depends on logits, seed and position alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import vocab_rows, vocab_span
from fleetfoot.distributed.groups import TensorGroup
from fleetfoot.kernels.linear.linear import PreparedLinear
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.slots import WeightSlot

_HEAD = "lm_head"


class Embedding:
    """``input_ids [num_tokens]`` -> ``[num_tokens, hidden_size]``."""

    __slots__ = ("_aliases", "_group", "_row_of_token", "_table", "_tokens", "vocab_size", "weight")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        self._group = context.tensor_group
        self.vocab_size = config.vocab_size
        self._tokens = vocab_span(config.vocab_size, self._group.rank, self._group.size)
        num_rows = vocab_rows(config.vocab_size, self._group.size)
        self._row_of_token: torch.Tensor | None = None
        if self._group.size > 1:  # one more row, of zeros, for all tokens that are elsewhere
            self._row_of_token = torch.full((config.vocab_size,), num_rows, device=context.device)
            self._row_of_token[self._tokens] = torch.arange(self._num_tokens, device=context.device)
        shape = (num_rows + (self._group.size > 1), config.hidden_size)
        self._table = torch.empty(shape, dtype=context.dtype, device=context.device)
        self._table[self._num_tokens :] = 0  # padding too, which a tied head multiplies with
        self.weight = self._table[:num_rows]
        # A tied checkpoint may hold the matrix under either name, or twice.
        self._aliases = (f"{_HEAD}.weight",) if config.tie_word_embeddings else ()

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._row_of_token is None:
            return F.embedding(input_ids, self._table)
        return self._group.all_reduce(F.embedding(self._row_of_token[input_ids], self._table))

    @property
    def _num_tokens(self) -> int:
        return self._tokens.stop - self._tokens.start

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        shape = (self.vocab_size, self.weight.shape[1])
        part = () if self._group.size == 1 else (self._tokens, slice(0, shape[1]))
        yield WeightSlot(f"{prefix}weight", shape, self._held_rows, aliases=self._aliases, part=part)

    def _held_rows(self) -> torch.Tensor:
        return self.weight[: self._num_tokens]


class LogitsHead:
    """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]`` in the model's dtype, from a matrix of its own."""

    __slots__ = ("_group", "_linear", "_vocab_size")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        self._group: TensorGroup = context.tensor_group
        self._vocab_size = config.vocab_size
        rank, size = self._group.rank, self._group.size
        tokens = vocab_span(config.vocab_size, rank, size)
        padding = vocab_rows(config.vocab_size, size) - (tokens.stop - tokens.start)
        parts = ((_HEAD, config.vocab_size),)
        self._linear = Linear(context, config.hidden_size, parts, bias=False, rows=(tokens,), padding=padding)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(self._linear(hidden), self._vocab_size)

    def weight_slots(self) -> Iterator[WeightSlot]:
        return self._linear.weight_slots("")

    def finish_loading(self) -> None:
        self._linear.finish_loading()


class TiedLogitsHead:
    """Logits from the embedding's own matrix.

    Where preparing a linear layer rearranges its weight (on a CPU) that makes a second copy: the lookup needs plain
    rows, and the product over the whole vocabulary is the largest of a decode step.
    """

    __slots__ = ("_context", "_embedding", "_prepared")

    def __init__(self, embedding: Embedding, context: ModelContext) -> None:
        self._embedding = embedding
        self._context = context
        self._prepared: PreparedLinear | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._prepared is None:
            raise RuntimeError("the logits head was called before finish_loading()")
        return self._context.tensor_group.all_gather(self._prepared(hidden), self._embedding.vocab_size)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """None: the embedding's slot fills both."""
        return iter(())

    def finish_loading(self) -> None:
        if self._prepared is None:
            self._prepared = self._context.ops.prepare_linear(self._embedding.weight)
        else:
            self._prepared.replace(self._embedding.weight)
