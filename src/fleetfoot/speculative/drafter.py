"""The interface between runners and drafters, the settings of speculative decoding, and the steps of drafting models.

Draft steps have one or two tokens per request after a batch. Their inputs are made on the device without synchronizing
with it, and all shapes follow from the number of requests, so that a graph can capture them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import ClassVar

import torch

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.speculative import DRAFT_METHODS
from fleetfoot.distributed.groups import SINGLE_RANK
from fleetfoot.fusion import LayerFusion
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.interface import Sample
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderStack
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import AttentionMetadata
from fleetfoot.records.kv_layout import kv_cache_specs
from fleetfoot.speculative.find import DrafterModel
from fleetfoot.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A step that has just been sampled, on the device. Its first ``n`` requests have sampled.

    A request with its first query token at position ``p`` and ``m >= 1`` new tokens in this step has its last valid
    query token at position ``p + m - 1`` and its newest token at position ``p + m``. Proposals for a request that
    had already reached its length are ignored.
    """

    input_ids: torch.Tensor
    """``[T]`` int64: the input tokens of the step, in batch order."""
    metadata: AttentionMetadata
    """Metadata of the whole step. Tokens beyond a request's length have slot -1."""
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


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is made from."""

    context: ModelContext
    """The target's, for a single rank."""
    model: DrafterModel | None
    """The checkpoint to load; None: the method has no model."""
    fusion: Sequence[LayerFusion]
    """Which decoder layers of that model are fused, from the plan."""
    load_format: str = "auto"
    seed: int = 0
    """The seed of dummy weights."""


class Drafter(ABC):
    """Proposes drafts, with a model that has its own KV cache, addressed by the target's block tables, or without.

    A draft for position ``i`` is drawn with the same random numbers as the target's token for position ``i``
    (`kernels.sampling.gumbel`: seed, position, vocabulary index), so a draft is accepted wherever both
    distributions agree, also when sampling. Drafts never change a token, only how many tokens a step yields.
    """

    method: ClassVar[str]
    """Its name in DRAFT_METHODS."""
    reads_hidden: ClassVar[bool] = False
    """Whether it reads ``DraftBatch.hidden``."""
    fused_layers: tuple[int, ...] = ()
    """Numbers of its decoder layers that run fused, set by `load_model`."""

    def __init__(self, context: DrafterContext) -> None:
        self._context = context
        dtype = str(context.context.dtype).removeprefix("torch.")
        self.kv_specs = () if context.model is None else kv_cache_specs(context.model.config, dtype)
        """Its layers in the KV cache, which follow the target's."""
        self._kv_caches: Sequence[torch.Tensor] = ()

    @abstractmethod
    def load_model(self, target: CausalLM) -> None:
        """Load its weights to the device. It may share matrices of ``target``, the model that it drafts for."""

    def add_weights(self, store: WeightStore) -> None:  # noqa: B027
        """Add the tensors that it holds to ``store``, with `DRAFTER` before their names."""

    def reload_weights(self) -> None:  # noqa: B027  (a drafter may have none)
        """Load its own weights again, in place."""

    def bind_kv_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Set the tensors of its layers."""
        self._kv_caches = kv_caches

    @abstractmethod
    def propose(self, batch: DraftBatch, num_drafts: int) -> torch.Tensor | None:
        """Fill its KV cache for the step, then propose ``num_drafts`` drafts: k, or 0 to only fill the cache.

        Returns ``[n, k]`` int32, or None if ``num_drafts`` is 0. Never synchronizes with the device, so that graphs can
        capture it if ``batch.is_decode``.
        """

    def _fuse(self, layers: DecoderStack) -> None:
        fuse(layers, self._context.context, [layer.is_fused for layer in self._context.fusion])
        self.fused_layers = layers.fused_layers

    def _steps(self, batch: DraftBatch) -> DraftSteps:
        return DraftSteps(batch, self._kv_caches[0].shape[3], self._context.context.ops.sample)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How drafts are proposed: by n-gram lookup, by a model, or not at all."""

    num_drafts: int = 0
    """``k``, of each step that drafts; 0: no speculative decoding."""
    ngram: tuple[int, int] | None = None
    """Tokens of the longest and of the shortest n-gram; see `fleetfoot.kernels.prepare.ngram`."""
    drafter: Drafter | None = None


NO_DRAFTING = DraftSettings()


def build_speculation(
    config: EngineConfig,
    found: DrafterModel | None,
    max_model_len: int,
    context: ModelContext,
    fusion: Sequence[LayerFusion],
) -> DraftSettings:
    """The drafter of the last rank of a pipeline. Nothing is loaded yet.

    ``found``, ``fusion``: from the plan; ``context``: of the target on this rank. Over a tensor group each rank has the
    whole drafter: a drafter is small, and sharing its layers would put two sums over the ranks into each of its short
    passes.
    """
    speculative = config.speculative_config
    if speculative is None:
        return NO_DRAFTING
    num_drafts = speculative.num_speculative_tokens
    if speculative.method == "ngram":
        longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        assert longest is not None and shortest is not None  # filled in by the config
        return DraftSettings(num_drafts, ngram=(longest, shortest))
    alone = replace(context, groups=SINGLE_RANK, expert_split=None, max_positions=max_model_len + num_drafts)
    module, _, function = DRAFT_METHODS[speculative.method].make.partition(":")
    make = getattr(import_module(module), function)
    drafter = make(DrafterContext(alone, found, fusion, config.load_format, config.seed))
    return DraftSettings(num_drafts, drafter=drafter)


# --- the steps of drafting models -------------------------------------------------------------------------------------


class DraftSteps:
    """The draft steps after one `DraftBatch`.

    Positions from a request's limit on write no KV, and drafts there are ignored. They are clamped to the limit, which
    has rotary angles and block ids. ``block_size``: tokens in a block of the drafter's KV cache; ``sample``: of the
    `Kernels`.
    """

    def __init__(self, batch: DraftBatch, block_size: int, sample: Sample) -> None:
        self._batch = batch
        self._block_size = block_size
        self._sample = sample
        self._limits = batch.limits.unsqueeze(1)  # [n, 1]
        self._is_padding = (batch.rows < 0).unsqueeze(1)  # [n, 1]
        self._iota = torch.arange(len(batch.rows) + 1, dtype=torch.int32, device=batch.rows.device)

    def singles(self, first: int, count: int) -> list[AttentionMetadata]:
        """Metadata of ``count`` steps with one token per request, the first at ``first`` positions after the newest."""
        if count < 1:
            return []
        positions, slots = self._places(first, count)
        seq_lens = (positions + 1).to(torch.int32).t().contiguous()  # [count, n]
        steps = zip(seq_lens, slots.t().contiguous(), positions.t().contiguous(), strict=True)
        return [self._metadata(self._iota, *step, query_len=1) for step in steps]

    def pairs(self) -> AttentionMetadata:
        """Metadata of a step with two tokens per request, the second of which is the newest one."""
        positions, slots = self._places(-1, 2)
        seq_lens = (positions[:, 1] + 1).clamp_(min=2).to(torch.int32)
        return self._metadata(self._iota * 2, seq_lens, slots.view(-1), positions.view(-1), query_len=2)

    def _places(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots, each ``[n, count]`` int64, from ``first`` positions after the newest tokens on."""
        batch, size = self._batch, self._block_size
        offsets = torch.arange(first, first + count, device=self._limits.device)
        unclamped = batch.positions.unsqueeze(1) + offsets  # [n, count]
        positions = torch.minimum(unclamped, self._limits).clamp_(min=0)
        slots = batch.block_tables.gather(1, positions // size).to(torch.int64) * size + positions % size
        return positions, slots.masked_fill_(self._is_padding | (unclamped >= self._limits), -1)

    def _metadata(
        self, starts: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, query_len: int
    ) -> AttentionMetadata:
        num_decodes, batch = len(seq_lens) if query_len == 1 else 0, self._batch
        lengths = query_len, batch.max_seq_len, batch.metadata.is_warm_up
        return AttentionMetadata(starts, seq_lens, batch.block_tables, slots, positions, num_decodes, *lengths)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sample a token for each request, with its temperature and the noise that the target uses at that position.

        With the same noise both sample the same token wherever their distributions agree. The acceptance rate is close
        to that of any method that looks at each distribution separately: Daliri, Musco, Suresh, "Coupling without
        Communication and Drafter-Invariant Speculative Decoding", 2025.

        ``logits``: ``[n, vocab_size]``; ``positions``: ``[n]``, of the sampled tokens. Returns ``[n]`` int64.
        """
        batch = self._batch
        return self._sample(logits, RandomRows(batch.temperatures, batch.seeds, positions, rows=batch.rows))


def as_drafts(tokens: list[torch.Tensor]) -> torch.Tensor:
    """Stack ``k`` drafts, each ``[n]`` int64, to ``[n, k]`` int32."""
    return torch.stack(tokens, dim=1).to(torch.int32)
