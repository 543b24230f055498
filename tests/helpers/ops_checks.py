"""Checks of the operations against float64 and their torch references: in C, in Triton's interpreter or on a GPU.

The interpreter cuts float32 off where it makes bfloat16 of it, so one bit more is allowed there than rounding takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.sampling.sample import RandomRows
from tests.helpers.kernels import reference_kernels, triton_kernels

REFERENCE = reference_kernels()
EPS = 1e-6


def is_triton(ops: Kernels) -> bool:
    return ops.plan["rms_norm"] == "triton"


def step(ops: Kernels, dtype: torch.dtype, device: str) -> float:
    """The relative error of one rounding."""
    return torch.finfo(dtype).eps * (2 if is_triton(ops) and device == "cpu" else 1)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, ops: Kernels = REFERENCE) -> None:
    """``actual`` is ``expected`` (float64) up to one rounding, and finite where that is."""
    assert actual.shape == expected.shape
    rounding = step(ops, actual.dtype, actual.device.type)
    rtol, atol = (1e-5, rounding / 8) if is_triton(ops) else (3e-6, rounding / 64)
    torch.testing.assert_close(
        actual.double().cpu(),
        expected.double().cpu(),
        rtol=max(rounding, rtol),
        atol=max(atol, 1.2e-6),
        equal_nan=True,
    )


def rms_norm_64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_rms_norm(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int], device: str = "cpu") -> None:
    """``shape``: rows and their size."""
    x, residual = torch.randn(shape, device=device).to(dtype), 20 * torch.randn(shape, device=device).to(dtype)
    weight = torch.rand(shape[1], device=device).to(dtype)
    normed = ops.rms_norm(x, weight, EPS)
    assert normed.dtype == dtype
    assert_near(normed, rms_norm_64(x, weight), ops)
    normed, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert_near(total, x.double() + residual.double(), ops)
    assert is_triton(ops) or torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert_near(normed, rms_norm_64(total, weight), ops)


def check_sum_of_parts(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int], device: str = "cpu") -> None:
    """The residual sum and norm of partial sums in float32."""
    parts, residual = torch.randn(3, *shape, device=device), 20 * torch.randn(shape, device=device).to(dtype)
    weight = torch.rand(shape[1], device=device).to(dtype)
    normed, total = ops.add_rms_norm(parts, residual, weight, EPS)
    near = 2 * max(step(ops, dtype, device), 1e-5) * residual.double().abs().max()
    assert float((total.double() - parts.double().sum(0) - residual.double()).abs().max()) <= near
    assert_near(normed, rms_norm_64(total, weight), ops)


def check_silu_and_mul(ops: Kernels, dtype: torch.dtype, num_rows: int, width: int, device: str = "cpu") -> None:
    gate_up = torch.cat((torch.linspace(-40, 40, width).repeat(num_rows, 1), torch.randn(num_rows, width)), dim=1)
    gate_up = gate_up.to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(ops.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up, ops)


def check_rope_and_cache(
    ops: Kernels, dtype: torch.dtype, num_tokens: int, head_dim: int, norm: bool, device: str = "cpu"
) -> None:
    num_heads, num_kv_heads, block_size, num_blocks = 6, 2, 16, num_tokens // 8 + 2
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 16, device=device).to(dtype)[:, :width]  # rows lie further apart
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2 :: 5] = -1
    positions = torch.randint(0, 512, (num_tokens,), device=device)
    angles = torch.outer(torch.arange(512.0, device=device), 1 / (1.5 ** torch.arange(head_dim // 2, device=device)))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = [torch.rand(head_dim, device=device).to(dtype) if norm else None for _ in range(2)]
    cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype, device=device)
    expected_cache = cache.double().cpu()
    places = (slots.cpu(), positions.cpu(), cos_sin.cpu())
    norms_64 = (None if weight is None else weight.cpu() for weight in norms)
    expected = REFERENCE.rope_and_cache(qkv.double().cpu(), expected_cache, *places, num_heads, *norms_64, EPS)
    query = ops.rope_and_cache(qkv, cache, slots, positions, cos_sin, num_heads, *norms, EPS)
    assert_near(query, expected, ops)
    assert_near(cache, expected_cache, ops)
    assert torch.equal(cache[:, 1].double().cpu(), expected_cache[:, 1])  # values are copied


def linear_error(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    gated: bool,
    bias: bool,
    device: str,
    tiling: Tiling | None = None,
    may_split: bool = False,
) -> float:
    """The relative error, in norm, of a layer of ``shape`` (rows, outputs, inputs) with random weights.

    Args:
        tiling: None: what the layer chooses by itself.
    """
    num_rows, num_outputs, num_inputs = shape
    scale = 2 if gated else 1
    weight = (torch.randn(num_outputs * scale, num_inputs, device=device) * num_inputs**-0.5).to(dtype)
    offset = torch.randn(num_outputs * scale, device=device).to(dtype) if bias else None
    x = torch.randn(num_rows, num_inputs + 16, device=device).to(dtype)[:, :num_inputs]
    assert not (gated and may_split)
    layer = (ChainedGateUp if gated else ChainedResidual if may_split else ChainedLinear)(weight, offset)
    actual = layer(x) if tiling is None else layer.launch(x, tiling)
    if actual.ndim == 3:
        assert may_split or tiling is not None
        actual = actual.double().sum(0)
    assert actual.shape == (num_rows, num_outputs)
    return _error(actual, x.double(), weight, offset, gated)


def _error(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | None, gated: bool
) -> float:
    expected = x @ weight.double().T + (0 if offset is None else offset.double())
    if gated:
        gate, up = expected.to(weight.dtype).double().chunk(2, dim=1)
        expected = F.silu(gate) * up
    return float((actual.double() - expected).norm() / expected.norm())


def check_deferred_norm(shape: tuple[int, int, int, int], *, gated: bool, bias: bool, device: str) -> None:
    """A layer that adds to the residual and defers the norm of the sum, and the layer that reads it.

    Args:
        shape: rows, the first layer's inputs and outputs, and the second's outputs.
    """
    num_rows, num_inputs, hidden, num_outputs = shape
    dtype, ops = torch.bfloat16, triton_kernels()

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    adding = ChainedResidual(random(hidden, num_inputs) * num_inputs**-0.5, random(hidden))
    second = random(num_outputs * (2 if gated else 1), hidden) * hidden**-0.5
    offset = random(len(second)) if bias else None
    reading = (ChainedGateUp if gated else ChainedLinear)(second, offset)
    x, residual, norm = random(num_rows, num_inputs), 20 * random(num_rows, hidden), random(hidden)
    deferred = adding.add_and_norm(x, residual, norm, EPS)
    assert deferred is not None
    assert reading.reads_deferred_norm(num_rows)
    total = ops.add_rms_norm(adding(x), residual, norm, EPS)[1]
    assert torch.equal(deferred.total, total)  # the same sums, rounded at the same places as in separate steps
    assert_near(deferred.finished(), rms_norm_64(total, norm), ops)
    error = _error(reading(deferred), rms_norm_64(total, norm), second, offset, gated)
    assert error < (3 if gated else 1) * torch.finfo(dtype).eps


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, spread: float) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size) * spread).to(dtype)


def logits_without_a_maximum(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN, infinities and ties."""
    logits = random_logits(6, vocab_size, dtype, 1.0)
    logits[0, vocab_size - 500], logits[0, 10] = torch.nan, torch.inf
    logits[1, [7, vocab_size - 100]] = torch.inf
    logits[[2, 3, 5]] = -torch.inf
    logits[3, vocab_size - 1] = -5.0
    logits[4] = torch.where(torch.arange(vocab_size) % 2 == 1, 0.0, -0.0)
    return logits


def check_samples(ops: Kernels, logits: torch.Tensor, device: str = "cpu") -> None:
    """Greedy and drawn tokens are those of the reference on a CPU."""
    num_rows = len(logits)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 3.0]).repeat(num_rows)[: num_rows + 2]
    seeds = torch.arange(num_rows + 2) * 0x9E3779B97F4A7C15 % 2**63 - 2**62
    positions = torch.arange(num_rows) * 37 + 1
    rows = torch.arange(num_rows, dtype=torch.int32) + 2
    invalid = torch.empty(num_rows, dtype=torch.bool, device=device)
    expected_invalid = torch.empty(num_rows, dtype=torch.bool)
    random = RandomRows(*(t.to(device) for t in (temperatures, seeds, positions)), rows=rows.to(device))
    logits_on_device = logits.to(device)
    assert ops.sample(logits_on_device).tolist() == REFERENCE.sample(logits).tolist()
    of_cpu = RandomRows(temperatures, seeds, positions, rows=rows)
    expected = REFERENCE.sample(logits, of_cpu, invalid=expected_invalid).tolist()
    assert ops.sample(logits_on_device, random, invalid=invalid).tolist() == expected
    assert invalid.tolist() == expected_invalid.tolist()
    together = torch.empty((2, num_rows), dtype=torch.int64, device=device)
    ops.sample(logits_on_device, random, out=together[0], invalid=together[1])
    assert together.tolist() == [expected, [int(flag) for flag in expected_invalid]]
    direct = RandomRows(random.temperatures[2:], random.seeds[2:], random.positions)
    assert ops.sample(logits_on_device, direct).tolist() == expected
