"""The interface between runners and drafters, and the settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.records.kv_layout import KVCacheSpec
from fleetfoot.speculative.find import DrafterModel


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A step that has just been sampled, on the device. Its first ``n`` requests have sampled.

    A request whose first query token has position ``p`` and that got ``m >= 1`` new tokens in this step has its last
    valid query token at position ``p + m - 1`` and its newest token at position ``p + m``. Proposals for a request that
    had already reached its length are ignored.
    """

    input_ids: torch.Tensor
    """``[T]`` int64: the input tokens of the step, in batch order."""
    metadata: AttentionMetadata
    """Of the whole step. Tokens beyond a request's length have slot -1."""
    hidden: torch.Tensor
    """``[T, hidden_size]``: the target's hidden states after its final norm; only for `Drafter.reads_hidden`."""
    next_ids: torch.Tensor
    """``[T]`` int64: the token after each of ``input_ids`` in its sequence: the next one of the query or prompt, and
    after the last valid token the newest one. Undefined for later tokens."""
    last_index: torch.Tensor
    """``[n]`` int64: index in the T tokens of each request's last valid one."""
    newest: torch.Tensor
    """``[n]`` int64: each request's newest token, at position ``p + m``; it has no KV yet."""
    positions: torch.Tensor
    """``[n]`` int64: the position ``p + m`` of the newest token."""
    limits: torch.Tensor
    """``[n]`` int64: positions from here on are never an input and get no KV (slot -1)."""
    block_tables: torch.Tensor
    """``[n, W]`` int32: with blocks for all positions below ``min(p + m + k, limit)``."""
    rows: torch.Tensor
    """``[n]``: each request's entry in ``temperatures`` and ``seeds``; -1: padding."""
    temperatures: torch.Tensor
    """``[R]`` float32; 0: greedy."""
    seeds: torch.Tensor
    """``[R]`` int64"""
    is_decode: bool
    """Whether every request of the step is a decode; then ``T`` is a multiple of ``n``."""
    max_seq_len: int
    """An upper bound of ``p + m + k``."""


class Drafter(Protocol):
    """Proposes drafts with a model that has its own KV cache, addressed by the target's block tables.

    A draft for position ``i`` is drawn with the same random numbers as the target's token for position ``i``
    (`kernels.sampling.gumbel`: seed, position, vocabulary index), so a draft is accepted wherever both
    distributions agree, also when sampling. Drafts never change a token, only how many tokens a step yields.
    """

    num_drafts: int
    """``k``."""
    kv_specs: tuple[KVCacheSpec, ...]
    """Its layers in the KV cache, which follow the target's."""
    method: str
    """Its name in DRAFT_METHODS."""
    reads_hidden: bool
    """Whether it reads ``DraftBatch.hidden``."""

    def load_model(self, target: CausalLM) -> None:
        """Load its weights to the device. It may share matrices of ``target``, the model that it drafts for."""
        ...

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Set the tensors of its layers."""
        ...

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        """Fill its KV cache for the step, then propose drafts.

        Args:
            batch: the step.
            num_drafts: k, or 0 to only fill the cache.

        Returns ``[n, k]`` int32, or None if ``num_drafts`` is 0. Never synchronizes with the device, so that graphs can
        capture it if ``batch.is_decode``.
        """
        ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is made from."""

    num_drafts: int
    """``k``."""
    context: ModelContext
    """The target's, for a single rank."""
    model: DrafterModel | None
    """The checkpoint to load; None: the method has no model."""
    load_format: str = "auto"
    seed: int = 0
    """Of dummy weights."""
    fuses: bool = True
    """Replace decoder layers by fused ones."""


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """Prompt lookup decoding (Saxena 2023): see `fleetfoot.speculative.ngram`."""

    max_ngram: int
    """Tokens of the longest n-gram, which is looked up first."""
    min_ngram: int
    """Tokens of the shortest n-gram."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How drafts are proposed: by n-gram lookup, by a model, or not at all."""

    num_drafts: int = 0
    """``k``, of each step that drafts; 0: no speculative decoding."""
    ngram: NgramSettings | None = None
    drafter: Drafter | None = None

    @property
    def is_on(self) -> bool:
        return self.num_drafts > 0


NO_DRAFTING = DraftSettings()
