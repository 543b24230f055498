"""The operations as Triton kernels, for GPUs. A decode step's kernels overlap: `kernels.runtime.dependent_launch`."""

from __future__ import annotations

from fleetfoot.kernels.attention.rope_and_cache_triton import rope_and_cache_triton
from fleetfoot.kernels.linear.linear_triton import (
    prepare_gate_up_triton,
    prepare_linear_triton,
    prepare_residual_linear_triton,
)
from fleetfoot.kernels.linear.silu_and_mul_triton import silu_and_mul_triton
from fleetfoot.kernels.norm.rms_norm_triton import add_rms_norm_triton, rms_norm_triton
from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.sampling.logits_processors_triton import process_logits_triton
from fleetfoot.kernels.sampling.sample_triton import sample_triton
from fleetfoot.kernels.sampling.token_logprobs_triton import token_logprobs_triton


def triton_ops() -> OpSet:
    """Triton itself is imported when the first kernel is launched."""
    return OpSet(
        name="triton",
        rms_norm=rms_norm_triton,
        add_rms_norm=add_rms_norm_triton,
        silu_and_mul=silu_and_mul_triton,
        rope_and_cache=rope_and_cache_triton,
        prepare_linear=prepare_linear_triton,
        prepare_gate_up=prepare_gate_up_triton,
        prepare_residual_linear=prepare_residual_linear_triton,
        sample=sample_triton,
        process_logits=process_logits_triton,
        token_logprobs=token_logprobs_triton,
    )
