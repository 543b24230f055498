"""The interface of every model to runners, loading and drafters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext, WeightTree
from fleetfoot.layers.decoder import DecoderStack
from fleetfoot.layers.linear import ColumnParallelLinear, LMHead, TiedLMHead, VocabParallelEmbedding
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.models.model_state import NO_STATE, ModelState, StateSizes
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors


class Decoder(nn.Module):
    """The modules of a decoder-only model under ``model.`` in its checkpoint; what another rank of a pipeline holds is
    None."""

    embed_tokens: VocabParallelEmbedding | None
    layers: DecoderStack
    norm: RMSNorm | None


class CausalLM(WeightTree):
    """A decoder-only language model, or the consecutive ``layers`` of it that one pipeline rank holds (None: all).

    A model's class makes `model` and `lm_head`; the rest is common to all. Raises ValueError if ``layers`` is empty,
    has gaps or reaches beyond the model.
    """

    model: Decoder
    lm_head: LMHead | TiedLMHead | None
    score: nn.Module | None
    """The head of a model for scores, in place of `lm_head`: ``[n, hidden_size]`` -> ``[n, num_labels]``, float32."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        super().__init__()
        whole = range(config.num_layers)
        layers = whole if layers is None else layers
        if not layers or layers.step != 1 or layers[0] not in whole or layers[-1] not in whole:
            raise ValueError(f"layers is {layers}; expected consecutive ones out of {whole}")
        self.config = config
        self.layers = layers
        """The decoder layers of this rank."""
        self.dtype = context.dtype
        self.score = make_score_head(config, context) if self.is_last else None

    @property
    def is_first(self) -> bool:
        """Whether this part embeds the token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this part has the final norm and the logits head."""
        return self.layers.stop == self.config.num_layers

    @property
    def has_tied_head(self) -> bool:
        """Whether the logits head of this part is the embedding's matrix."""
        return self.is_last and self.config.tie_word_embeddings and self.config.head == "logits"

    def make_lm_head(self, context: ModelContext) -> LMHead | TiedLMHead | None:
        """The head of a model with `model.embed_tokens` if `is_first` or `has_tied_head`."""
        if self.has_tied_head and self.model.embed_tokens is not None:
            return TiedLMHead(self.model.embed_tokens, context)
        return LMHead(self.config, context) if self.is_last and self.config.head == "logits" else None

    def forward(
        self, input_ids: torch.Tensor, ctx: ForwardContext, intermediate_tensors: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        """Run a step's tokens, ``input_ids [num_tokens]`` int64, through the layers and write their K and V.

        ``intermediate_tensors``: the output of the part before, which may be written to; None for the first part, which
        alone reads ``input_ids``. Returns the next part's input, or on the last part hidden states ``[num_tokens,
        hidden_size]`` after the final norm, ``[num_logits, hidden_size]`` where ``ctx`` has `LogitsMetadata`.
        """
        if intermediate_tensors is None and not self.is_first:
            raise ValueError(f"layers {self.layers} need the intermediate_tensors of the layers before them")
        x = self.embed(input_ids) if intermediate_tensors is None else intermediate_tensors.hidden_states
        x = self.model.layers(x, ctx)
        return IntermediateTensors(x) if self.model.norm is None else self.model.norm(x)

    @property
    def has_embedding(self) -> bool:
        """Whether this part can embed token ids: the first part, and a part with a tied logits head."""
        return self.model.embed_tokens is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` int64 -> ``[num_tokens, hidden_size]``, where `has_embedding`."""
        if self.model.embed_tokens is None:
            raise ValueError(f"layers {self.layers} have no embedding; it is with the first one")
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]`` (see `LMHead`), on the last part alone."""
        if self.lm_head is None:
            raise ValueError(f"layers {self.layers} have no logits head; it is with the last one")
        return self.lm_head(hidden)

    def make_state(self, sizes: StateSizes) -> ModelState:
        """What this family needs in a step besides its layers."""
        return NO_STATE

    def shortened(self) -> AbstractContextManager[None]:
        """Within this context, as few layers run as launch all the kernels of this part. Results are meaningless."""
        return self.model.layers.shortened()


def make_score_head(config: ModelConfig, context: ModelContext) -> nn.Module | None:
    """The head that `ModelConfig.head` names, complete on every rank of a tensor group; None: there are no scores."""
    context = replace(context, dtype=torch.float32)
    if config.head in ("score", "biased_score"):
        parts = (("score", config.num_labels),)
        return ColumnParallelLinear(context, config.hidden_size, parts, bias=config.head == "biased_score")
    if config.head != "reward":
        return None
    context = context.within("score")
    return nn.Sequential(  # tensors score.0 and score.2
        ColumnParallelLinear(context, config.hidden_size, (("0", config.hidden_size),), bias=True),
        nn.ReLU(),
        ColumnParallelLinear(context, config.hidden_size, (("2", config.num_labels),), bias=True),
    )


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class of a model, imported on first use. Raises ValueError: there is no such architecture, or its class is no
    `CausalLM` or cannot be imported."""
    entry = ARCHITECTURES.get(config.architecture)
    if entry is not None and entry.model_class is not None:
        return _checked(entry.model_class)
    path = config.class_path or (entry.model if entry is not None else "")
    if not path:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture {config.architecture!r} is not supported; supported: {supported}")
    module, _, name = path.partition(":")
    try:
        return _checked(attrgetter(name)(import_module(module)))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the class {path} of {config.architecture} cannot be imported ({error}); put it into a module that worker "
            "processes find too: they do not run the program's main file"
        ) from error


def _checked(found: Any) -> type[CausalLM]:
    if not (isinstance(found, type) and issubclass(found, CausalLM)):
        raise ValueError(f"{found!r} is registered as a model; expected a class derived from {__name__}.CausalLM")
    return found
