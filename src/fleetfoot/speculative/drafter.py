"""Who proposes draft tokens, as the runners see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fleetfoot.models.interface import CausalLM
from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.records.kv_layout import KVCacheSpec


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A step that has just been sampled, on the device. ``n`` requests sampled: they are the first of the batch.

    Let ``p`` be the position of a request's first query token, and let it have got ``m`` new tokens in this step
    (``m >= 1``; for a request that had reached its length before, what is proposed means nothing). Its query's last
    valid token is at position ``p + m - 1``, and its newest token at position ``p + m``.
    """

    input_ids: torch.Tensor
    """``[T]`` int64: the tokens that the model was run on, in batch order."""
    metadata: AttentionMetadata
    """Of the whole step: slots of tokens beyond a request's length are -1."""
    hidden: torch.Tensor
    """``[T, hidden_size]``: the target's hidden states after its final norm, as its logits head reads them; only for a
    drafter that `Drafter.reads_hidden`."""
    next_ids: torch.Tensor
    """``[T]`` int64: the token behind each of ``input_ids`` in its sequence as it is known now: the next one of the
    query or prompt, and for a request's last valid token the one that was sampled last. Behind that: anything."""
    last_index: torch.Tensor
    """``[n]`` int64: where in the T tokens each request's last valid one stands."""
    newest: torch.Tensor
    """``[n]`` int64: each request's newest token, at position ``p + m``; its KV is in no cache yet."""
    positions: torch.Tensor
    """``[n]`` int64: the position ``p + m`` of the newest token."""
    limits: torch.Tensor
    """``[n]`` int64: positions from this one on are never an input; KV for them goes nowhere (slot -1)."""
    block_tables: torch.Tensor
    """``[n, W]`` int32; there are blocks for all positions below ``min(p + m + k, limit)``."""
    rows: torch.Tensor
    """``[n]``: each request's entry in ``temperatures`` and ``seeds``; -1: padding."""
    temperatures: torch.Tensor
    """``[R]`` float32; 0: greedy."""
    seeds: torch.Tensor
    """``[R]`` int64"""
    is_decode: bool
    """Whether every request of the step is a decode, and ``T`` is ``n * (T // n)``."""
    max_seq_len: int
    """A bound on ``p + m + k``."""


class Drafter(Protocol):
    """Proposes drafts from a model of its own, with a KV cache that shares the target's block tables.

    A draft for position ``i`` is drawn with the same random numbers as the target's token for position ``i``
    (`kernels.sampling.gumbel`: seed, position, vocabulary index), so where both distributions agree the draft is
    accepted, also when sampling. What is proposed never changes a token, only how many are got in a step.
    """

    num_drafts: int
    """``k``."""
    kv_specs: tuple[KVCacheSpec, ...]
    """Layers that it wants behind the target's in the KV cache."""
    method: str
    """``draft_model`` or ``eagle``."""
    reads_hidden: bool
    """Whether it reads ``DraftBatch.hidden``."""

    def load_model(self, target: CausalLM) -> None:
        """Read its weights to the device. ``target``: the model it drafts for, whose matrices it may share."""
        ...

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Its own layers' tensors."""
        ...

    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        """Fill its KV cache for the step, then propose. ``num_drafts``: k, or 0 to fill the cache alone.

        Returns ``[n, k]`` int32, or None if ``num_drafts`` is 0. Queues work and waits for nothing, so that it can be
        captured in a graph where ``batch.is_decode``.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """Prompt lookup decoding (Saxena 2023): the tokens behind the last occurrence of the sequence's last n-gram."""

    max_ngram: int
    """Tokens of the longest n-gram that is looked for; it is tried first."""
    min_ngram: int
    """Tokens of the shortest."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How drafts are made: by n-gram lookup, by a model, or not at all."""

    num_drafts: int = 0
    """``k``, in each step that drafts; 0: there is no speculative decoding."""
    ngram: NgramSettings | None = None
    drafter: Drafter | None = None

    @property
    def is_on(self) -> bool:
        return self.num_drafts > 0


NO_DRAFTING = DraftSettings()
