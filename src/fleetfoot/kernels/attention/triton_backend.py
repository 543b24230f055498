"""Attention over the paged KV cache in Triton, for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from fleetfoot.kernels.attention.decode import paged_attention_decode
from fleetfoot.kernels.attention.decode_tiling import MIN_ROWS, most_rows
from fleetfoot.kernels.attention.prefill import paged_attention_prefill
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.records.attention import AttentionMetadata, RotaryInputs

MAX_HEAD_DIM = 256
MAX_FUSED_QUERY_LEN = 8
"""Most query tokens of a request whose norm, rotation and cache write the decode kernel takes on."""
FUSED_PAIRS_PER_SM = 3.0
"""Most (request, KV head) pairs for which it does, for each multiprocessor: a program that works on several pairs one
after the other waits for each one's query (measured on an H100: 5% slower at 256 requests, 7% faster at 1 and 8)."""
HOPPER_FUSED_PAIRS_PER_SM = 0.5
"""The same where the kernel for Hopper GPUs could do the rest, which is faster from 16 requests with 8 KV heads on."""
_ALIGNMENT = 16  # bytes: the width of a load


class TritonBackend:
    """Decodes, and requests with few query tokens, by one kernel; prompts and their chunks by another.

    Nothing waits for the host, and no launch depends on a length, so that graphs can hold it: the grids follow from
    shapes and from ``num_decodes`` and ``max_query_len``. What the kernels do not serve goes to `SDPABackend`, which
    graphs cannot hold.
    """

    name = "triton"
    is_capturable = True

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, AttentionWorkspace] = {}
        self._fallback = SDPABackend()

    @staticmethod
    def serves(head_dim: int, group: int, dtype: torch.dtype) -> bool:
        """Whether the kernels take this shape; ``group``: query heads of a KV head."""
        is_type = dtype in (torch.bfloat16, torch.float16, torch.float32)
        is_head_dim = head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM
        return is_type and is_head_dim and group <= most_rows(head_dim)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. Query tokens that belong to no request come back as zeros.

        Raises:
            ValueError: tensors that do not fit together or are not aligned, or a scale that is not positive.
            RuntimeError: the first call, which takes memory, within a graph that is being captured.
        """
        num_heads, head_dim = query.shape[1:]
        group = num_heads // kv_cache.shape[2]
        if not self.serves(head_dim, group, query.dtype):
            return self._fallback.forward(query, kv_cache, metadata, scale, window)
        _check(query, kv_cache, scale)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        workspace = self._workspace(query.device)
        # One launch for all where the decodes' tile has rows for everyone: they are computed in any case.
        rows = metadata.max_query_len * group
        num_decodes = 0 if metadata.max_query_len == 1 or rows <= MIN_ROWS else metadata.num_decodes
        if num_decodes:
            decodes = _Inputs(
                query[:num_decodes],
                kv_cache,
                metadata.query_start_loc[: num_decodes + 1],
                metadata.seq_lens[:num_decodes],
                metadata.block_tables[:num_decodes],
                scale,
                window,
            )
            _decode(decodes, 1, workspace, out[:num_decodes])
        if query.shape[0] > num_decodes:
            rest = _Inputs(
                query,
                kv_cache,
                metadata.query_start_loc[num_decodes:],
                metadata.seq_lens[num_decodes:],
                metadata.block_tables[num_decodes:],
                scale,
                window,
            )
            if rows <= most_rows(head_dim):
                _decode(rest, metadata.max_query_len, workspace, out)
            else:
                _prefill(rest, metadata.max_query_len, workspace.counter, out)
        return out

    def forward_fused(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
        scale: float,
        window: int | None,
        prefetch_weight: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """See `AttentionBackend.forward_fused`: for decodes, also with drafts."""
        num_kv_heads, _, head_dim = kv_cache.shape[2:]
        group = num_heads // num_kv_heads
        max_query_len = metadata.max_query_len
        is_served = self.serves(head_dim, group, qkv.dtype) and max_query_len * group <= most_rows(head_dim)
        if not is_served or max_query_len > MAX_FUSED_QUERY_LEN:
            return None
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        hopper = _hopper_kernels(qkv.device)
        is_alone = hopper is None or not hopper.decode.serves(heads[:, :num_heads], kv_cache, max_query_len)
        most_pairs = FUSED_PAIRS_PER_SM if is_alone else HOPPER_FUSED_PAIRS_PER_SM
        if metadata.num_reqs * num_kv_heads > gpu_limits(qkv.device).num_sms * most_pairs:
            return None
        _check(heads[:, :num_heads], kv_cache, scale)
        out = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        paged_attention_decode(
            heads,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            scale,
            window,
            max_query_len,
            workspace=self._workspace(qkv.device),
            out=out,
            rotary=rotary,
            slot_mapping=metadata.slot_mapping,
            prefetch_weight=prefetch_weight,
        )
        return out

    def _workspace(self, device: torch.device) -> AttentionWorkspace:
        workspace = self._workspaces.get(device)
        if workspace is None:
            workspace = self._workspaces[device] = AttentionWorkspace(device)
        return workspace


class _Inputs(NamedTuple):
    """What every attention kernel takes first; see `fleetfoot.kernels.attention.decode.paged_attention_decode`."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    window: int | None


def _decode(inputs: _Inputs, max_query_len: int, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
    hopper = _hopper_kernels(inputs.query.device)
    if hopper is not None and hopper.decode.serves(inputs.query, inputs.kv_cache, max_query_len):
        hopper.decode.paged_attention_decode_hopper(*inputs, max_query_len, workspace=workspace, out=out)
    else:
        paged_attention_decode(*inputs, max_query_len, workspace=workspace, out=out)


def _prefill(inputs: _Inputs, max_query_len: int, counter: torch.Tensor, out: torch.Tensor) -> None:
    hopper = _hopper_kernels(inputs.query.device)
    if hopper is not None and hopper.prefill.serves(inputs.query, inputs.kv_cache, max_query_len):
        hopper.prefill.paged_attention_prefill_hopper(*inputs, counter=counter, out=out)
    else:
        paged_attention_prefill(*inputs, out=out)


@dataclass(frozen=True, slots=True)
class _HopperKernels:
    """The modules of the kernels in Gluon."""

    decode: ModuleType
    prefill: ModuleType


@cache
def _hopper_kernels(device: torch.device) -> _HopperKernels | None:
    if not has_hopper_kernels(device):
        return None
    from fleetfoot.kernels.attention import decode_hopper, prefill_hopper

    return _HopperKernels(decode_hopper, prefill_hopper)


def _check(query: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> None:
    num_heads, head_dim = query.shape[1:]
    _, kinds, num_kv_heads, block_size, kv_head_dim = kv_cache.shape
    element_size = query.element_size()
    addresses = (
        query.data_ptr(),
        kv_cache.data_ptr(),
        query.stride(0) * element_size,
        kv_cache.stride(0) * element_size,
    )
    if (
        kv_cache.dtype != query.dtype
        or kinds != 2
        or head_dim != kv_head_dim
        or num_heads % num_kv_heads
        or query.stride()[1:] != (head_dim, 1)
        or kv_cache.stride()[1:] != (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
        or any(address % _ALIGNMENT for address in addresses)
    ):
        raise ValueError(
            f"query {list(query.shape)} {query.dtype} with strides {query.stride()} does not go with a KV cache "
            f"{list(kv_cache.shape)} {kv_cache.dtype} with strides {kv_cache.stride()}, or one of them is not aligned "
            f"to {_ALIGNMENT} bytes"
        )
    if scale <= 0:
        raise ValueError(f"scale is {scale}: it must be positive")
