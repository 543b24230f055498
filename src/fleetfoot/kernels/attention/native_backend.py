"""Attention over the paged KV cache in C, for the CPU."""

from __future__ import annotations

import torch

from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.native.library import DTYPES, check_status, load_library
from fleetfoot.records.forward_context import AttentionMetadata

MAX_HEAD_DIM = 256
_NO_WINDOW = 1 << 30  # longer than any sequence; fits in 32 bits with room to add positions


class NativeBackend(SDPABackend):
    """Prefills, chunks and decodes of a step in one call; unsupported shapes fall back to `SDPABackend`.

    The result of a token is bitwise identical for any batch, any chunking of its prompt and any number of threads.

    Raises:
        NativeUnavailableError: the library is missing, or has no such variant for this processor.
    """

    name = "native"

    def __init__(self, variant: str | None = None) -> None:
        self._kernel = load_library(variant).paged_attention

    @staticmethod
    def supports(head_dim: int, dtype: torch.dtype) -> bool:
        """Whether the C kernel supports this shape: float32 or bfloat16, head_dim a multiple of 16 up to 256."""
        return dtype in DTYPES and head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. The output of tokens that belong to no request is zero.

        Raises:
            ValueError: the shapes or dtypes do not match, or the metadata points outside of a tensor.
        """
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, _, num_kv_heads, block_size, kv_head_dim = kv_cache.shape
        if not self.supports(head_dim, query.dtype):
            return super().forward(query, kv_cache, metadata, scale, window)
        block_tables = metadata.block_tables
        query_stride, kv_stride, table_stride = query.stride(), kv_cache.stride(), block_tables.stride()
        if (
            query_stride[1:] != (head_dim, 1)
            or kv_stride[4] != 1
            or table_stride[1] != 1
            or head_dim != kv_head_dim
            or num_heads % num_kv_heads
            or kv_cache.dtype != query.dtype
        ):
            raise ValueError(
                f"query {list(query.shape)} {query.dtype} with strides {query_stride} does not match the KV cache "
                f"{list(kv_cache.shape)} {kv_cache.dtype} with strides {kv_stride}"
            )
        output = torch.empty(query.shape, dtype=query.dtype)
        status = self._kernel(
            output.data_ptr(), query.data_ptr(), query_stride[0], num_tokens, kv_cache.data_ptr(), num_blocks,
            *kv_stride[:4], metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(), block_tables.data_ptr(),
            table_stride[0], block_tables.shape[1], metadata.num_reqs, num_heads, num_kv_heads, block_size, head_dim,
            scale, _NO_WINDOW if window is None else window, DTYPES[query.dtype], torch.get_num_threads(),
        )  # fmt: skip
        if status:
            check_status(status, "paged_attention")
        return output
