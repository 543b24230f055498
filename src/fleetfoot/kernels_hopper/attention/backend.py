"""Attention over the paged KV cache on Hopper GPUs: kernels in Gluon where they are faster than those in Triton."""

from __future__ import annotations

import torch

from fleetfoot.kernels.attention import AttentionInputs, max_rows
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.attention.triton_backend import TritonBackend
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.triton_support import next_power_of_2
from fleetfoot.kernels_hopper.attention import decode_hopper, prefill_hopper

_FUSED_PAIRS_PER_SM, _FUSED_REQUESTS = 0.5, 16
"""`FUSED_PAIRS_PER_SM` if the kernel in Gluon supports the shape, which is faster from 16 requests with 8 KV heads on;
and the most requests. On an H200, ms a token with 16, 24 and 32 requests by Triton's and by that kernel: Qwen2.5-1.5B
(2 KV heads) 1.286 and 1.351, 1.493 and 1.457, 1.505 and 1.457; Qwen2.5-3B 2.240 and 2.241, 2.580 and 2.532, 2.527 and
2.567."""


class HopperBackend(TritonBackend):
    """See `TritonBackend`."""

    name = "hopper"

    def fuses(self, inputs: AttentionInputs, limits: GPULimits) -> bool:
        """See `TritonBackend.fuses`."""
        if decode_hopper.supports(inputs):
            num_reqs, pairs = len(inputs.seq_lens), len(inputs.seq_lens) * inputs.kv_cache.shape[2]
            if num_reqs > _FUSED_REQUESTS or pairs > _FUSED_PAIRS_PER_SM * limits.num_sms:
                return False
        return super().fuses(inputs, limits)

    def text(self, inputs: AttentionInputs, limits: GPULimits) -> str:
        """See `TritonBackend.text`."""
        rows = inputs.max_query_len * inputs.group
        if rows > max_rows(inputs.query.shape[2]):
            return "prefill_hopper" if prefill_hopper.supports(inputs) else super().text(inputs, limits)
        if decode_hopper.supports(inputs):
            return f"decode_hopper rows={max(8, next_power_of_2(rows))}"
        return super().text(inputs, limits)

    def _prefill(self, inputs: AttentionInputs, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
        if prefill_hopper.supports(inputs):
            prefill_hopper.paged_attention_prefill_hopper(inputs, counter=workspace.counter, out=out)
        else:
            super()._prefill(inputs, workspace, out)

    def _decode(self, inputs: AttentionInputs, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
        if decode_hopper.supports(inputs):
            decode_hopper.paged_attention_decode_hopper(inputs, workspace=workspace, out=out)
        else:
            super()._decode(inputs, workspace, out)
