"""The two ends of a model: from token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.ops.linear import PreparedLinear

_HEAD = "lm_head"


class Embedding:
    """``input_ids [num_tokens]`` -> ``[num_tokens, hidden_size]``."""

    __slots__ = ("_aliases", "weight")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.weight = torch.empty(shape, dtype=context.dtype, device=context.device)
        # A tied checkpoint may hold the matrix under either name, or twice.
        self._aliases = (f"{_HEAD}.weight",) if config.tie_word_embeddings else ()

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        shape = tuple(self.weight.shape)
        yield WeightSlot(f"{prefix}weight", shape, lambda: self.weight, aliases=self._aliases)


class LogitsHead:
    """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]`` in the model's dtype, from a matrix of its own."""

    __slots__ = ("_linear",)

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        self._linear = Linear(context, config.hidden_size, ((_HEAD, config.vocab_size),), bias=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden)

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
        return self._prepared(hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """None: the embedding's slot fills both."""
        return iter(())

    def finish_loading(self) -> None:
        if self._prepared is None:
            self._prepared = self._context.ops.prepare_linear(self._embedding.weight)
        else:
            self._prepared.replace(self._embedding.weight)
