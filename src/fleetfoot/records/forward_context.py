"""What a forward pass reads besides its input, and what it passes to the next pipeline rank. No torch.

The KV cache of a layer is one tensor ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``: index 0 of the second
dimension is K, index 1 is V, so a block of a layer is contiguous. Token ``i`` of a request is in block
``block_tables[row, i // block_size]`` at offset ``i % block_size``. Layers of different groups (`KVGroup`) have tables
and slots of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Tokens of a prompt that recurrent layers compute at once."""
MAX_STEPS = 32
"""Tokens of a request up to which recurrent layers compute them one after the other, which alone can keep several
states. So how a request is computed depends on its own tokens, never on the rest of the batch."""


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """A layer's parameters of `Kernels.rope_and_cache`, which makes its queries, and K and V in the cache."""

    cos_sin: torch.Tensor
    """``[max_positions, head_dim]`` float32, contiguous; cosines in the first half, sines in the second."""
    q_norm: torch.Tensor | None
    """``[head_dim]``; None: no norm. Likewise ``k_norm``."""
    k_norm: torch.Tensor | None
    eps: float
    norm_offset: float = 0.0
    """Added to the weights of both norms."""
    kv_scales: torch.Tensor | None = None
    """``[2]`` float32: what K and V in the cache are multiples of, which is FP8; None: it has the dtype of queries."""


@dataclass(slots=True)
class AttentionMetadata:
    """The batch of a step, for attention. Requests are in batch order, decodes (one query token each) first."""

    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32: where each request's query tokens begin in the flat token dimension."""
    seq_lens: torch.Tensor
    """``[num_reqs]`` int32: tokens in the KV cache once this step has written its own (context + query)."""
    block_tables: torch.Tensor
    """``[num_reqs, max_blocks]`` int32: KV block ids; entries past a request's last block are never read. Those before
    the window of a group are 0, which is a block of zeros."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64: where each token's K and V go: block id * block_size + offset."""
    positions: torch.Tensor
    """``[num_tokens]`` int64: each token's position in its sequence."""
    num_decodes: int
    """Requests at the front of the batch with exactly one query token."""
    max_query_len: int
    max_seq_len: int
    is_warm_up: bool = False
    """Whether the pass is of no request: it compiles, captures a graph, or loads what serving uses."""
    split: tuple[AttentionMetadata, AttentionMetadata] | None = None
    """The decodes and the other requests as two batches, where only the device has the number of decodes. Decodes have
    their tokens in order and length 0 for other requests; those have no tokens for decodes. None: the batch is one."""
    has_prompts: bool = False
    """Whether queries have any length up to ``max_query_len``, so that one kernel is used for all short ones."""

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class LogitsMetadata:
    """The rows with hidden states that are read: the last token of a prompt, and every token of a decode.

    All other rows serve their K and V only. In a model's last layer nothing depends on them but the KV cache.
    """

    indices: torch.Tensor
    """``[num_logits]`` int64: in the step's flat token dimension."""
    attention: AttentionMetadata
    """Metadata of a batch of these rows alone in the model's last layer, with all K and V in the cache already."""

    def select(self, per_token: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, ...]`` -> ``[num_logits, ...]``"""
        return per_token.index_select(0, self.indices)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The requests of a step, in batch order, and the slots of their states.

    A slot is an index into the first dimension of a tensor of states. Slot 0 has the state before the first token,
    zeros, and is never written. A request may read one slot and write another, so a state that is to be kept, such as a
    prefix's, is not copied; it may also write the slot that it reads. No other request may write either.
    """

    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32: where each request's tokens begin in the flat token dimension."""
    read_slots: torch.Tensor
    """``[num_reqs]`` int32: the slot with the state before the request's tokens."""
    write_slots: torch.Tensor
    """``[num_reqs, num_kept]`` int32: where the states after the last ``num_kept`` tokens go, the last token's in the
    last column; a negative slot is not written. A request with drafts keeps the state after each of them, and then
    reads that of the last accepted token: no state is copied. Of a request that is computed in chunks only the last
    column is used."""
    max_query_len: int
    """At least the tokens of the longest request."""
    chunk_starts: torch.Tensor
    """``[num_reqs + 1]`` int32: the number of each request's first chunk; few tokens have none."""
    chunk_slots: torch.Tensor | None = None
    """``[>= chunks]`` int32: where the state after each chunk goes besides, as a snapshot; 0: nowhere. None: all
    of them are 0."""

    @property
    def num_reqs(self) -> int:
        return self.read_slots.shape[0]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step: one argument, from the runner to every layer."""

    attention: AttentionMetadata
    """What is of the first group of layers."""
    kv_caches: Sequence[torch.Tensor]
    """The KV caches of this rank's layers, in order; of a recurrent layer its states, ``[num_slots, words]`` float32:
    see `StateShapes`."""
    logits: LogitsMetadata | None = None
    """The rows that are read; None: all of them (EAGLE, prompt logprobs, pooling, and ranks that are not the last)."""
    attention_of_layers: Sequence[AttentionMetadata] = ()
    """The metadata of the group of each of ``kv_caches``; empty: all layers have ``attention``."""
    states: StateBatch | None = None
    """The slots of recurrent states; None: the model has none."""
    family_inputs: Any = None
    """What the `ModelState` of the model's family has prepared; None: it has none."""
    rows_of_ranks: int = 0
    """Rows that each data-parallel rank has in a layer with experts, with padding; 0: those that the layer gets."""

    def attention_of(self, layer: int) -> AttentionMetadata:
        """The metadata of a layer by its place in ``kv_caches``."""
        return self.attention_of_layers[layer] if self.attention_of_layers else self.attention

    def shared_attention(self, layers: Sequence[int]) -> AttentionMetadata | None:
        """The metadata of layers of one group; None: they are of several."""
        first = self.attention_of(layers[0])
        return first if all(self.attention_of(layer) is first for layer in layers) else None

    @property
    def is_warm_up(self) -> bool:
        """A field for hooks of modules: see `AttentionMetadata.is_warm_up`."""
        return self.attention.is_warm_up


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """The residual stream between two pipeline ranks, complete: summed over the ranks of a tensor group."""

    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]``"""

    def first(self, num_tokens: int) -> IntermediateTensors:
        """Those of the first tokens, as a view."""
        return IntermediateTensors(self.hidden_states[:num_tokens])

    def empty_like(self) -> IntermediateTensors:
        """Memory of the same shape, dtype and device, to receive into."""
        return IntermediateTensors(self.hidden_states.new_empty(self.hidden_states.shape))
