"""The operations in plain torch: right on every device, and the yardstick of the faster ones."""

from __future__ import annotations

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.linear.gated import gated
from fleetfoot.kernels.linear.linear import prepare_linear_torch
from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul_torch
from fleetfoot.kernels.norm.rms_norm import add_rms_norm_torch, rms_norm_torch
from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.sampling.logits_processors import process_logits_cpu
from fleetfoot.kernels.sampling.sample import sample_torch
from fleetfoot.kernels.sampling.token_logprobs import token_logprobs_torch


def torch_ops() -> OpSet:
    return OpSet(
        name="torch",
        rms_norm=rms_norm_torch,
        add_rms_norm=add_rms_norm_torch,
        silu_and_mul=silu_and_mul_torch,
        rope_and_cache=rope_and_cache_torch,
        prepare_linear=prepare_linear_torch,
        prepare_gate_up=gated(prepare_linear_torch, silu_and_mul_torch),
        prepare_residual_linear=prepare_linear_torch,
        sample=sample_torch,
        process_logits=process_logits_cpu,
        token_logprobs=token_logprobs_torch,
    )
