"""Attention over the paged KV cache in Triton, for GPUs."""

from __future__ import annotations

import torch

from fleetfoot.kernels.attention import AttentionInputs, max_rows, triton_supports
from fleetfoot.kernels.attention.decode import MIN_ROWS, choose_decode_tiling, paged_attention_decode
from fleetfoot.kernels.attention.prefill import choose_prefill_tiling, paged_attention_prefill
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.runtime.gpu_limits import GPULimits, gpu_limits
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, options_text
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

MAX_FUSED_QUERY_LEN = 8
"""Maximum query tokens of a request for which the decode kernel applies norm and rotation and writes the cache."""
FUSED_PAIRS_PER_SM = 3.0
"""Maximum (request, KV head) pairs per multiprocessor for the same: a program that processes several pairs one after
the other waits for each query (measured on an H100: 5% slower at 256 requests, 7% faster at 1 and 8)."""
FUSED_HEAD_DIM = 128
"""The largest head for the same: on an H100, Gemma-3-1B (heads of 256) takes 1.30 ms a token with it, and 1.22 without
any fusion, where two kernels more take about 0.1."""
_ALIGNMENT = 16  # bytes: the width of a load


class TritonBackend(SDPABackend):
    """One kernel for decodes and requests with few query tokens, another one for prompts and their chunks.

    No host synchronization, and no launch depends on a length, so that graphs can hold it: the grids follow from
    shapes, ``num_decodes`` and ``max_query_len``. Unsupported shapes fall back to `SDPABackend`, which graphs cannot
    hold.
    """

    name = "triton"
    is_capturable = True

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, AttentionWorkspace] = {}

    @staticmethod
    def supports(head_dim: int, group: int, dtype: torch.dtype) -> bool:
        """Whether the kernels support this shape; ``group``: query heads per KV head."""
        is_type = dtype in (torch.bfloat16, torch.float16, torch.float32)
        return is_type and triton_supports(head_dim, group)

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. The output of tokens that belong to no request is zero.

        Raises:
            ValueError: the shapes or dtypes do not match, a tensor is not aligned, or the scale is not positive.
            RuntimeError: the first call, which allocates memory, within a graph that is being captured.
        """
        shape = scale, window, soft_cap, sinks, kv_scales
        inputs = AttentionInputs.of(query, kv_cache, metadata, *shape)
        if not self.supports(query.shape[2], inputs.group, query.dtype):
            return super().forward(query, kv_cache, metadata, *shape)
        _check(inputs)
        out = empty_rows(*query.shape, like=query)
        self._attend(inputs, metadata, self._workspace(query.device), out)
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
        soft_cap: float | None = None,
        prefetch_weight: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """See `AttentionBackend.forward_fused`: for decodes, also with drafts."""
        num_kv_heads, _, head_dim = kv_cache.shape[2:]
        if metadata.has_prompts or not self.supports(head_dim, num_heads // num_kv_heads, qkv.dtype):
            return None
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        shape = scale, window, soft_cap, sinks, rotary.kv_scales
        inputs = AttentionInputs.of(heads[:, :num_heads], kv_cache, metadata, *shape)
        if not self.fuses(inputs, gpu_limits(qkv.device)):
            return None
        _check(inputs)
        out = empty_rows(qkv.shape[0], num_heads, head_dim, like=qkv)
        inputs, workspace, slots = inputs._replace(query=heads), self._workspace(qkv.device), metadata.slot_mapping
        paged_attention_decode(
            inputs, workspace=workspace, out=out, rotary=rotary, slot_mapping=slots, prefetch_weight=prefetch_weight
        )
        return out

    def fuses(self, inputs: AttentionInputs, limits: GPULimits) -> bool:
        """Whether the kernel of this decode, with queries of one length, applies norm and rotation, and writes the
        cache."""
        num_kv_heads, _, head_dim = inputs.kv_cache.shape[2:]
        return (
            inputs.max_query_len <= MAX_FUSED_QUERY_LEN
            and len(inputs.seq_lens) * num_kv_heads <= FUSED_PAIRS_PER_SM * limits.num_sms
            and head_dim <= FUSED_HEAD_DIM
            and inputs.max_query_len * inputs.group <= max_rows(head_dim)
        )

    def text(self, inputs: AttentionInputs, limits: GPULimits) -> str:
        """The kernel of requests with queries of one length, and its tile: positions and rows."""
        if inputs.max_query_len * inputs.group <= max_rows(inputs.query.shape[2]):
            return self.decode_text(inputs, limits)
        sizes = inputs.group, max(16, next_power_of_2(inputs.query.shape[2])), inputs.query.element_size()
        tiling = choose_prefill_tiling(*sizes, limits.shared_bytes)
        options = {"stages": tiling.num_stages, "warps": tiling.num_warps}
        return f"prefill {tiling.tile}x{tiling.rows}{options_text(options)}"

    @staticmethod
    def decode_text(inputs: AttentionInputs, limits: GPULimits, *, is_fused: bool = False) -> str:
        """The Triton kernel of few query tokens. ``is_fused``: see `fuses`."""
        rows = max(MIN_ROWS, next_power_of_2(inputs.max_query_len * inputs.group))
        sizes = rows, max(16, next_power_of_2(inputs.query.shape[2])), inputs.query.element_size()
        tiling = choose_decode_tiling(*sizes, limits.shared_bytes, is_fused=is_fused)
        options = {"stages": tiling.num_stages, "warps": tiling.num_warps, "programs": tiling.programs_per_sm}
        return f"decode {tiling.tile}x{rows}{options_text(options)}"

    def _prefill(self, inputs: AttentionInputs, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
        paged_attention_prefill(inputs, out=out)

    def _decode(self, inputs: AttentionInputs, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
        paged_attention_decode(inputs, workspace=workspace, out=out)

    def _attend(
        self, inputs: AttentionInputs, metadata: AttentionMetadata, workspace: AttentionWorkspace, out: torch.Tensor
    ) -> None:
        """The fastest kernels of each shape."""
        if metadata.split is not None:
            first, others = metadata.split
            decodes = inputs.of_batch(first)._replace(query=inputs.query[: first.num_reqs])
            # zeros for other requests, which the next kernel overwrites
            self._decode(decodes, workspace, out[: first.num_reqs])
            self._prefill(inputs.of_batch(others), workspace, out)
            return
        inputs = inputs._replace(max_query_len=query_bucket(inputs, metadata))
        # One launch for all requests if their rows fit the minimum tile of the decode kernel, which is computed anyway.
        rows = inputs.max_query_len * inputs.group
        num_decodes = 0 if inputs.max_query_len == 1 or rows <= MIN_ROWS else metadata.num_decodes
        if num_decodes:
            decodes = inputs.requests(0, num_decodes)._replace(query=inputs.query[:num_decodes], max_query_len=1)
            self._decode(decodes, workspace, out[:num_decodes])
        if inputs.query.shape[0] > num_decodes:
            rest = inputs.requests(num_decodes)
            if rows <= max_rows(inputs.query.shape[2]):
                self._decode(rest, workspace, out)
            else:
                self._prefill(rest, workspace, out)

    def _workspace(self, device: torch.device) -> AttentionWorkspace:
        if device not in self._workspaces:
            self._workspaces[device] = AttentionWorkspace(device)
        return self._workspaces[device]


def query_bucket(inputs: AttentionInputs, metadata: AttentionMetadata) -> int:
    """The number of query tokens that a kernel is compiled for, at least the longest query's. Short prompts share that
    of the decode kernel's largest tile."""
    sizes = inputs.max_query_len, inputs.group, inputs.query.shape[2]
    return prompt_bucket(*sizes) if metadata.has_prompts else inputs.max_query_len


def prompt_bucket(num_tokens: int, group: int, head_dim: int) -> int:
    """The same for queries of up to ``num_tokens`` of prompts: those that are longer than a power of two for which the
    decode kernel has room are for the kernel of prompts."""
    room = max_rows(head_dim) // group
    most = 1 << room.bit_length() - 1
    return most if num_tokens <= most else max(num_tokens, room + 1)


def _check(inputs: AttentionInputs) -> None:
    query, kv_cache = inputs.query, inputs.kv_cache
    _, num_heads, head_dim = query.shape
    _, kinds, num_kv_heads, _, kv_head_dim = kv_cache.shape
    (token, *within), (block, kind, head, position, last) = query.stride(), kv_cache.stride()
    strides = token * query.element_size() | (block | kind | head | position) * kv_cache.element_size()
    has_scales = inputs.kv_scales is not None
    if (
        (kv_cache.element_size() != 1 if has_scales else kv_cache.dtype != query.dtype)
        or kinds != 2
        or head_dim != kv_head_dim
        or num_heads % num_kv_heads
        or within != [head_dim, 1]
        or last != 1
        or (query.data_ptr() | kv_cache.data_ptr() | strides) % _ALIGNMENT  # of each: both are powers of 2
    ):
        raise ValueError(
            f"query {list(query.shape)} {query.dtype} with strides {query.stride()} does not match the KV cache "
            f"{list(kv_cache.shape)} {kv_cache.dtype} with strides {kv_cache.stride()}, or one of them is not aligned "
            f"to {_ALIGNMENT} bytes"
        )
    if inputs.scale <= 0:
        raise ValueError(f"scale is {inputs.scale}: it must be positive")
