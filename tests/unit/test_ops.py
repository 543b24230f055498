"""The torch twins against plain float64 arithmetic."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.helpers.kernels import reference_kernels

from fleetfoot.kernels.linear.linear import PackedLinear, PlainLinear, can_pack, prepare_linear_torch

OPS = reference_kernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of the result to ``dtype`` and some of float32 before it."""
    step = torch.finfo(dtype).eps
    return {"rtol": max(step, 1e-5), "atol": max(step / 8, 1e-6)}


def assert_rounded(actual: torch.Tensor, expected64: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected64, **tolerance(actual.dtype))


def rms_norm_64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (7, 50)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[1]).to(dtype)
    actual = OPS.rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert_rounded(actual, rms_norm_64(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 64).to(dtype), 50 * torch.randn(5, 64).to(dtype), torch.rand(64).to(dtype)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert_rounded(normed, rms_norm_64(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = torch.cat((torch.linspace(-40, 40, 96).repeat(3, 1), torch.randn(3, 96)), dim=1).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_rounded(OPS.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_cache(dtype: torch.dtype, norm: bool) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 6, 4, 2, 16, 4
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    kv_cache = torch.full((5, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype)
    slots = torch.tensor([0, 19, -1, 5, 6, 7])
    positions = torch.tensor([0, 3, 4, 100, 101, 102])
    angles = torch.outer(torch.arange(128.0), 10.0 ** -torch.arange(0.0, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    q_norm, k_norm = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if norm else (None, None)

    query = OPS.rope_and_cache(qkv, kv_cache, slots, positions, cos_sin, num_heads, q_norm, k_norm, 1e-6)

    written = set()
    for token in range(num_tokens):
        heads = qkv[token].view(-1, head_dim)
        cos, sin = cos_sin[positions[token]].double().chunk(2)

        def rotated(x: torch.Tensor, weight: torch.Tensor | None, cos=cos, sin=sin) -> torch.Tensor:
            x = x.double() if weight is None else rms_norm_64(x, weight, 1e-6)
            low, high = x.chunk(2)
            return torch.cat((low * cos - high * sin, high * cos + low * sin))

        for head in range(num_heads):
            assert_rounded(query[token, head], rotated(heads[head], q_norm))
        slot = int(slots[token])
        if slot < 0:
            continue
        written.add(slot)
        for head in range(num_kv_heads):
            key, value = kv_cache[slot // block_size, :, head, slot % block_size]
            assert_rounded(key, rotated(heads[num_heads + head], k_norm))
            assert torch.equal(value, heads[num_heads + num_kv_heads + head])
    for slot in set(range(5 * block_size)) - written:
        assert bool((kv_cache[slot // block_size, :, :, slot % block_size] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_prepared_linear(dtype: torch.dtype, num_tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(50, 72).to(dtype), torch.randn(num_tokens, 72).to(dtype)
    offset = torch.randn(50, 2).to(dtype)[:, 1] if bias else None  # not contiguous
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0.0)
    actual = prepare_linear_torch(weight, offset)(x)
    assert actual.shape == (num_tokens, 50)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (64, 64), (576, 1536)])
def test_prepared_linear_gives_the_weight_back(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, other = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    linear = prepare_linear_torch(weight)
    assert torch.equal(linear.weight(), weight)
    linear.replace(other)
    assert torch.equal(linear.weight(), other)
    x = torch.randn(2, shape[1]).to(dtype)
    assert torch.equal(linear(x), prepare_linear_torch(other)(x))


@pytest.mark.parametrize("wrong", [torch.zeros(8, 4), torch.zeros(4, 8, dtype=torch.float64)])
@pytest.mark.parametrize("make", [PlainLinear, PackedLinear])
def test_replace_refuses_another_shape_or_dtype(make: type, wrong: torch.Tensor) -> None:
    if make is PackedLinear and not can_pack(torch.float32):
        pytest.skip("oneDNN is not there")
    with pytest.raises(ValueError, match=r"cannot replace \[4, 8\] torch.float32"):
        make(torch.zeros(4, 8), None).replace(wrong)


def test_packing_releases_the_plain_weight() -> None:
    if not can_pack(torch.float32):
        pytest.skip("oneDNN is not there")
    weight = torch.randn(64, 64)
    alive = weakref.ref(weight)
    linear = prepare_linear_torch(weight)
    del weight
    gc.collect()
    assert isinstance(linear, PackedLinear)
    assert alive() is None
