"""Attention over the paged KV cache: the protocol of its backends, the inputs of their kernels, and workspace sizes.

Torch is imported for annotations only: the memory plan uses the sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

MAX_GATHERED_ELEMENTS, MAX_MASK_ELEMENTS = 1 << 22, 1 << 21
"""Elements of K that the torch backend gathers at once for decodes, and of the mask of a chunk of a prefill."""

MAX_HEAD_DIM = 256
"""The largest head that the Triton kernels support."""
MAX_ROWS = 64
"""Maximum query heads per KV head times query tokens per request of their decode kernel; see `max_rows`."""


def max_rows(head_dim: int) -> int:
    """Maximum query heads per KV head times query tokens per request: the accumulator must fit in registers."""
    return MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2


def triton_supports(head_dim: int, group: int) -> bool:
    """Whether the Triton kernels support such heads; ``group``: query heads per KV head."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM and group <= max_rows(head_dim)


class AttentionBackend(Protocol):
    """Causal attention of a step's query tokens over the paged KV cache, which already holds the step's own K and V."""

    name: str
    is_capturable: bool
    """Whether `forward` launches only work that depends on the shapes of its arguments, so that a graph can hold it."""

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Softmax attention of each query token over its own sequence up to and including itself.

        Args:
            scale: factor on the dot products, by default 1 / sqrt(head_dim).
            window: how many of the last positions a token attends to, itself included; None: all.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before the softmax (Gemma 2, 2024); None: not.
            sinks: ``[num_heads]`` float32, a score of each head that joins the softmax without a value (GPT-OSS, 2025).
            kv_scales: `RotaryInputs.kv_scales`.
        """
        ...

    def forward_fused(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        prefetch_weight: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # [num_tokens, num_heads, head_dim]
        """`Kernels.rope_and_cache` and `forward` in one kernel; None if the backend has no such kernel for this batch.

        Args:
            prefetch_weight: ``[out, in]`` contiguous, the weight that is read next; the kernel may prefetch it to L2.
        """
        return None


class AttentionInputs(NamedTuple):
    """What every attention kernel reads: the last query tokens of some requests, and the KV cache."""

    query: torch.Tensor
    """``[num_tokens, num_heads, head_dim]``; the stride between tokens is arbitrary."""
    kv_cache: torch.Tensor
    """``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; of any strides but that of the last dimension, 1."""
    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32: where each request's query tokens begin in ``query``."""
    seq_lens: torch.Tensor
    """``[num_reqs]`` int32: context + query; 0 for a request that pads the batch."""
    block_tables: torch.Tensor
    """``[num_reqs, max_blocks]`` int32."""
    scale: float
    """Factor on the dot products, > 0."""
    window: int | None
    """How many of the last positions a token attends to, itself included; None: all."""
    max_query_len: int
    """Upper bound on the query tokens of a request."""
    soft_cap: float | None = None
    """Limit that scores approach; None: they have none."""
    sinks: torch.Tensor | None = None
    """``[num_heads]`` float32, scores without a value; None: there are none."""
    kv_scales: torch.Tensor | None = None
    """``[2]`` float32: factors of K and V of a cache in FP8; None: it has the dtype of queries."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> AttentionInputs:
        """All requests of a batch."""
        tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
        return cls(query, kv_cache, *tensors, scale, window, metadata.max_query_len, soft_cap, sinks, kv_scales)

    def of_batch(self, metadata: AttentionMetadata) -> AttentionInputs:
        """Metadata with the requests of other metadata."""
        shape = self.scale, self.window, self.soft_cap, self.sinks, self.kv_scales
        return self.of(self.query, self.kv_cache, metadata, *shape)

    def requests(self, first: int, last: int | None = None) -> AttentionInputs:
        """Those from ``first`` on, and before ``last``."""
        if first == 0 and last is None:
            return self
        return self._replace(
            query_start_loc=self.query_start_loc[first : None if last is None else last + 1],
            seq_lens=self.seq_lens[first:last],
            block_tables=self.block_tables[first:last],
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.kv_cache.shape[2]

    @property
    def is_block_contiguous(self) -> bool:
        """Whether a block is contiguous, as in ``block-contiguous-hnd``."""
        _, _, num_kv_heads, block_size, head_dim = self.kv_cache.shape
        strides = num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1
        return self.kv_cache.stride()[1:] == strides

    @property
    def kv_strides(self) -> dict[str, int]:
        """Strides within a block, which are compile-time constants of the Triton kernels."""
        return dict(zip(("value_offset", "head_stride", "token_stride"), self.kv_cache.stride()[1:4], strict=True))


def sdpa_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_model_len: int, element_bytes: int
) -> int:
    """Bytes of the torch backend's largest step: K and V of one sequence, gathered and repeated for each query head,
    and the scores of a chunk of a prefill in float32 and as probabilities."""
    gathered = 2 * (num_heads + num_kv_heads) * head_dim * max_model_len * element_bytes
    scores = MAX_MASK_ELEMENTS * num_heads * (4 + element_bytes)
    return max(gathered + scores, 4 * MAX_GATHERED_ELEMENTS * element_bytes)
