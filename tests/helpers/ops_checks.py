"""Checks of the operations against float64 and their torch references: in C, in Triton's interpreter or on a GPU.

The interpreter cuts float32 off where it makes bfloat16 of it, so one bit more is allowed there than rounding takes.
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fleetfoot.kernels.elementwise import DeferredSum
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.quantized.packed import PackedMatrix, pack_words, unpack_words
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs
from tests.helpers.kernels import reference_kernels, triton_kernels

REFERENCE = reference_kernels()
EPS = 1e-6


def cases(check: Callable[..., None], *choices: Iterable[Any]) -> list[Any]:
    """`pytest.param` of ``check`` with every combination of arguments after the first; tuples are several."""
    parameters = []
    for combination in product(*choices):
        arguments = [each for choice in combination for each in (choice if isinstance(choice, tuple) else (choice,))]
        name = "-".join([check.__name__, *map(str, arguments)])
        parameters.append(pytest.param(lambda ops, arguments=arguments: check(ops, *arguments), id=name))
    return parameters


def is_triton(ops: Kernels) -> bool:
    return ops.plan["rms_norm"] == "triton"


def assert_near(actual: torch.Tensor, expected: torch.Tensor, ops: Kernels = REFERENCE) -> None:
    """``actual`` is ``expected`` (float64) up to one rounding, and finite where that is."""
    assert actual.shape == expected.shape
    rounding = torch.finfo(actual.dtype).eps
    rtol, atol = (1e-5, rounding / 8) if is_triton(ops) else (3e-6, rounding / 64)
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=max(rounding, rtol), atol=max(atol, 1.2e-6), equal_nan=True
    )


def rms_norm_64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rms_norm(ops: Kernels, dtype: torch.dtype, num_rows: int, size: int, device: str = "cpu") -> None:
    shape = (num_rows, size)
    x, residual = torch.randn(shape, device=device).to(dtype), 20 * torch.randn(shape, device=device).to(dtype)
    weight = torch.rand(shape[1], device=device).to(dtype)
    normed = ops.rms_norm(x, weight, EPS)
    assert normed.dtype == dtype
    assert_near(normed, rms_norm_64(x, weight), ops)
    assert_near(ops.rms_norm(x, weight, EPS, 1.0), rms_norm_64(x, weight.double() + 1), ops)
    normed, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert_near(total, x.double() + residual.double(), ops)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert_near(normed, rms_norm_64(total, weight), ops)


def norms_around_a_sum(ops: Kernels, dtype: torch.dtype, num_rows: int, size: int, device: str = "cpu") -> None:
    """A norm of the output, with or without one of the sum, with the roundings of separate operations."""
    shape = (num_rows, size)
    x, residual = torch.randn(shape, device=device).to(dtype), 20 * torch.randn(shape, device=device).to(dtype)
    weight, output_weight = (torch.rand(size, device=device).to(dtype) - 0.5 for _ in range(2))
    for offset in (0.0, 1.0):
        normed = rms_norm_64(x, output_weight.double() + offset)
        output, total = ops.add_rms_norm(x, residual, weight, EPS, offset, output_weight)
        near = torch.finfo(dtype).eps * (normed.abs() + (normed + residual.double()).abs()) + 1e-5
        assert bool(((total.double() - normed - residual.double()).abs() <= 2 * near).all())
        assert torch.equal(total, residual + ops.rms_norm(x, output_weight, EPS, offset))
        assert_near(output, rms_norm_64(total, weight.double() + offset), ops)
        for each in (x, torch.stack((x.float(), torch.zeros_like(x).float()))):  # whole, and partial sums
            again, same = ops.add_rms_norm(each, residual, None, EPS, offset, output_weight)
            assert torch.equal(again, total) and torch.equal(same, total)
        output, total = ops.add_rms_norm(x, residual, weight, EPS, offset)
        assert torch.equal(total, ops.add_rms_norm(x, residual, None, 0.0)[1])
        assert_near(output, rms_norm_64(total, weight.double() + offset), ops)
    if size > 1:
        with pytest.raises((ValueError, RuntimeError)):
            ops.add_rms_norm(x, torch.cat((residual, residual), dim=1), None, EPS, 0.0, weight)


def sum_of_parts(ops: Kernels, dtype: torch.dtype, num_rows: int, size: int, device: str = "cpu") -> None:
    """The residual sum and norm of partial sums in float32."""
    shape = (num_rows, size)
    parts, residual = torch.randn(3, *shape, device=device), 20 * torch.randn(shape, device=device).to(dtype)
    weight = torch.rand(shape[1], device=device).to(dtype)
    normed, total = ops.add_rms_norm(parts, residual, weight, EPS)
    near = max(torch.finfo(dtype).eps, 1e-5) * residual.double().abs().max()
    assert float((total.double() - parts.double().sum(0) - residual.double()).abs().max()) <= near
    assert_near(normed, rms_norm_64(total, weight), ops)


def activations(ops: Kernels, dtype: torch.dtype, num_rows: int, width: int, device: str = "cpu") -> None:
    gate_up = torch.cat((torch.linspace(-40, 40, width).repeat(num_rows, 1), torch.randn(num_rows, width)), dim=1)
    gate_up = gate_up.to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(ops.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up, ops)
    assert_near(ops.gelu_and_mul(gate_up), F.gelu(gate, approximate="tanh") * up, ops)


def at_slots(slots: torch.Tensor, positions: torch.Tensor) -> AttentionMetadata:
    """What `Kernels.rope_and_cache` reads of a batch."""
    return AttentionMetadata(slots, slots, slots, slots, positions, 0, 0, 0)


def rope_and_cache(
    ops: Kernels,
    dtype: torch.dtype,
    num_tokens: int,
    head_dim: int,
    offset: float | None,
    device: str = "cpu",
    num_heads: int = 6,
    num_kv_heads: int = 2,
) -> None:
    """``offset``: of the norms' weights; None: there are no norms."""
    block_size, num_blocks = 16, num_tokens // 8 + 2
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 16, device=device).to(dtype)[:, :width]  # rows lie further apart
    if num_tokens:
        qkv[0, -4:] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2 :: 5] = -1
    positions = torch.randint(0, 512, (num_tokens,), device=device)
    angles = torch.outer(torch.arange(512.0, device=device), 1 / (1.5 ** torch.arange(head_dim // 2, device=device)))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = [None if offset is None else torch.rand(head_dim, device=device).to(dtype) for _ in range(2)]
    cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype, device=device)
    expected_cache = cache.double().cpu()
    on_host = RotaryInputs(
        cos_sin.cpu(), *(None if weight is None else weight.cpu() for weight in norms), EPS, offset or 0.0
    )
    places = at_slots(slots.cpu(), positions.cpu())
    expected = REFERENCE.rope_and_cache(qkv.double().cpu(), expected_cache, places, num_heads, on_host)
    rotary = RotaryInputs(cos_sin, *norms, EPS, offset or 0.0)
    query = ops.rope_and_cache(qkv, cache, at_slots(slots, positions), num_heads, rotary)
    assert_near(query, expected, ops)
    assert_near(cache, expected_cache, ops)
    written = slots >= 0
    bits, values = torch.int32 if dtype == torch.float32 else torch.int16, qkv[written].unflatten(1, (-1, head_dim))
    cached = cache[slots[written] // block_size, 1, :, slots[written] % block_size]
    values = values[:, num_heads + num_kv_heads :].contiguous()
    assert torch.equal(cached.view(bits), values.view(bits))  # values are copied unchanged


def _layer(
    kind: type[ChainedLinear],
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
    bias: bool,
    device: str,
    scale: float = 1.0,
    activation: str = "silu",
):
    """A layer with random weights, and its product in float64, times ``scale``."""
    num_outputs *= 2 if kind is ChainedGateUp else 1
    weight = (torch.randn(num_outputs, num_inputs, device=device) * num_inputs**-0.5).to(dtype)
    offset = torch.randn(num_outputs, device=device).to(dtype) if bias else None

    def multiply(x: torch.Tensor) -> torch.Tensor:
        product = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        if kind is not ChainedGateUp:
            return product
        gate, up = product.to(dtype).double().chunk(2, dim=1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    if kind is ChainedGateUp:
        return ChainedGateUp(weight, offset, activation=activation), multiply
    if scale != 1.0:
        assert kind is ChainedResidual
        return ChainedResidual(weight, offset, scale=scale), lambda x: scale * multiply(x)
    return kind(weight, offset), multiply


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def linear_error(
    kind: type[ChainedLinear],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    bias: bool,
    device: str = "cpu",
    tiling: Tiling | None = None,
    scale: float = 1.0,
    activation: str = "silu",
) -> float:
    """The relative error, in norm, of a layer of ``shape`` (rows, outputs, inputs) with random weights.

    Args:
        tiling: None: what the layer chooses by itself.
    """
    num_rows, num_outputs, num_inputs = shape
    layer, multiply = _layer(kind, dtype, num_outputs, num_inputs, bias, device, scale, activation)
    x = torch.randn(num_rows, num_inputs + 16, device=device).to(dtype)[:, :num_inputs]
    actual = layer(x) if tiling is None else layer.launch(x, tiling)
    if actual.ndim == 3:
        assert kind is ChainedResidual or tiling is not None
        actual = actual.double().sum(0)
    assert actual.shape == (num_rows, num_outputs)
    return _error(actual, multiply(x))


def deferred_norm(
    kind: type[ChainedLinear], shape: tuple[int, int, int, int], *, bias: bool, device: str = "cpu", scale: float = 1.0
) -> None:
    """A layer that adds to the residual and defers the norm of the sum, and the layer that reads it.

    Args:
        shape: rows, the first layer's inputs and outputs, and the second's outputs.
    """
    num_rows, num_inputs, hidden, num_outputs = shape
    dtype, ops = torch.bfloat16, triton_kernels()
    adding, multiply_added = _layer(ChainedResidual, dtype, hidden, num_inputs, True, device, scale)
    reading, multiply = _layer(kind, dtype, num_outputs, hidden, bias, device)
    x, residual = (torch.randn(num_rows, size, device=device).to(dtype) for size in (num_inputs, hidden))
    residual, norm = 20 * residual, torch.randn(hidden, device=device).to(dtype)
    deferred = adding.add_and_norm(x, residual, norm, EPS)
    assert deferred is not None
    assert reading.reads_deferred_norm(num_rows)
    assert _error(deferred.total, multiply_added(x) + residual.double()) < torch.finfo(dtype).eps
    total = ops.add_rms_norm(adding(x), residual, norm, EPS)[1]
    assert torch.equal(deferred.total, total)  # the same sums, rounded at the same places as in separate steps
    normed = rms_norm_64(total, norm)
    assert_near(deferred.finished(), normed, ops)
    assert _error(reading(deferred), multiply(normed)) < (3 if kind is ChainedGateUp else 1) * torch.finfo(dtype).eps


def deferred_sum(
    kind: type[ChainedLinear], shape: tuple[int, int, int, int], *, bias: bool, device: str = "cpu"
) -> None:
    """A layer with a norm of its output, and the layer that reads the sum of that with the residual, after a norm.
    ``shape``: as in `deferred_norm`."""
    num_rows, num_inputs, hidden, num_outputs = shape
    dtype, ops, offset = torch.bfloat16, triton_kernels(), 1.0 if bias else 0.0
    squaring, multiply_squared = _layer(ChainedResidual, dtype, hidden, num_inputs, bias, device)
    reading, multiply = _layer(kind, dtype, num_outputs, hidden, bias, device)
    x, residual = (torch.randn(num_rows, size, device=device).to(dtype) for size in (num_inputs, hidden))
    residual, norms = 20 * residual, [torch.randn(hidden, device=device).to(dtype) for _ in range(2)]
    found = squaring.with_squares(x)
    assert found is not None and reading.reads_deferred_sum(num_rows)
    output, squares = found
    assert _error(output, multiply_squared(x)) < torch.finfo(dtype).eps
    torch.testing.assert_close(squares.sum(0), output.float().square().sum(1), rtol=1e-4, atol=1e-4)
    total = torch.full_like(residual, float("nan"))
    actual = reading(DeferredSum(output, squares, residual, *norms, EPS, offset, total))
    normed, expected = ops.add_rms_norm(output, residual, norms[1], EPS, offset, norms[0])
    assert _error(total, expected.double()) < 0.1 * torch.finfo(dtype).eps  # few differ in their last bit
    assert _error(actual, multiply(normed.double())) < (3 if kind is ChainedGateUp else 1) * torch.finfo(dtype).eps


def logits_without_a_maximum(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN, infinities and ties."""
    logits = torch.randn(6, vocab_size).to(dtype)
    logits[0, vocab_size - 500], logits[0, 10] = torch.nan, torch.inf
    logits[1, [7, vocab_size - 100]] = torch.inf
    logits[[2, 3, 5]] = -torch.inf
    logits[3, vocab_size - 1] = -5.0
    logits[4] = torch.where(torch.arange(vocab_size) % 2 == 1, 0.0, -0.0)
    return logits


def random_samples(
    ops: Kernels, dtype: torch.dtype, num_rows: int, vocab_size: int, spread: float, device: str = "cpu"
) -> None:
    logits = (torch.randn(num_rows, vocab_size) * spread).to(dtype)
    logits[1:2] = logits[1:2].round()  # ties
    samples(ops, logits, device)


def samples(ops: Kernels, logits: torch.Tensor, device: str = "cpu") -> None:
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


def packed_matrix(
    num_outputs: int, num_inputs: int, group: int, kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> PackedMatrix:
    """A random weight of 4 bits. ``group``: 0 for one with all inputs. ``kind``: what it has, of ``zeros``, ``bias``,
    ``mxfp4`` and ``order``."""
    generator = torch.Generator().manual_seed(num_inputs)
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8, generator=generator)
    shape = num_outputs, -(-num_inputs // (group or num_inputs))
    scales = ((torch.rand(shape, generator=generator) + 0.5) * 0.01).to(dtype)
    if kind == "mxfp4":
        shape = num_outputs, -(-num_inputs // 128) * 128 // group
        scales = torch.randint(118, 122, shape, dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if kind == "zeros" else None
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if kind == "bias" else None
    words, order = pack_words(codes), torch.randperm(num_inputs) if kind == "order" else None
    assert torch.equal(unpack_words(words)[:, :num_inputs], codes)
    tensors = (None if each is None else each.to(device) for each in (words, scales, zeros, order, bias))
    words, scales, zeros, order, bias = tensors  # type: ignore[assignment]
    return PackedMatrix(words, scales, zeros, group or num_inputs, num_inputs, kind == "mxfp4", order, bias)
