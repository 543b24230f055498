"""Weights in the blocks of GGUF files: the reference in torch. Layouts: the ggml project's ``ggml-common.h``.

A code stands for ``scale * (code - offset) - minimum``. A product reads the blocks where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_MAX_ELEMENTS = 1 << 22
"""Values of the weight that the reference has in float32 at once."""
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the values of MXFP4's codes without the sign."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Consecutive outputs that are stored in the same way."""

    type: int
    """Its number in GGUF files."""
    data: torch.Tensor
    """``[outputs, bytes of a row]`` uint8, contiguous."""


def _floats(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.contiguous().view(dtype).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` -> ``[..., 2 * n]``: all lower halves come first."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` -> ``[..., 8 * n]``, the lowest bit of a byte first."""
    return ((data[..., None] >> torch.arange(8, device=data.device)) & 1).flatten(-2)


def _q4_0(data: torch.Tensor) -> torch.Tensor:
    return _floats(data[..., :2], torch.float16) * (_nibbles(data[..., 2:]).float() - 8)


def _q4_1(data: torch.Tensor) -> torch.Tensor:
    return _floats(data[..., :2], torch.float16) * _nibbles(data[..., 4:]) + _floats(data[..., 2:4], torch.float16)


def _q5_0(data: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(data[..., 6:]) | (_bits(data[..., 2:6]) << 4)
    return _floats(data[..., :2], torch.float16) * (codes.float() - 16)


def _q5_1(data: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(data[..., 8:]) | (_bits(data[..., 4:8]) << 4)
    return _floats(data[..., :2], torch.float16) * codes + _floats(data[..., 2:4], torch.float16)


def _q8_0(data: torch.Tensor) -> torch.Tensor:
    return _floats(data[..., :2], torch.float16) * data[..., 2:].contiguous().view(torch.int8)


def _mxfp4(data: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(data[..., 1:]).long()
    magnitudes = torch.tensor(_E2M1, device=data.device)[codes & 7]
    scales = (data[..., :1].float() - 128).exp2()
    return torch.where(codes > 7, -magnitudes, magnitudes) * scales


def _super_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima ``[..., 8]`` of 6 bits from 12 bytes."""
    low, middle, high = data.split(4, dim=-1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=-1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=-1)
    return scales.float(), minima.float()


def _group_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima ``[..., 8]`` of a block of Q4_K or Q5_K, which begins with them."""
    scales, minima = _super_scales(data[..., 4:16])
    return _floats(data[..., :2], torch.float16) * scales, _floats(data[..., 2:4], torch.float16) * minima


def _affine(data: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``codes [..., 8, 32]`` of a block of Q4_K or Q5_K."""
    scales, minima = _group_scales(data)
    return (scales[..., None] * codes - minima[..., None]).flatten(-2)


def _q4_k_codes(data: torch.Tensor) -> torch.Tensor:
    """``[..., 8, 32]``"""
    return _nibbles(data[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)


def _q4_k(data: torch.Tensor) -> torch.Tensor:
    return _affine(data, _q4_k_codes(data))


def _q5_k(data: torch.Tensor) -> torch.Tensor:
    low = _nibbles(data[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = _bits(data[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2)
    return _affine(data, low | (fifth << 4))


def _q6_k(data: torch.Tensor) -> torch.Tensor:
    low = _nibbles(data[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [..., 2, 4, 32]
    high = data[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], device=data.device)[:, None]
    codes = (low | ((high & 3) << 4)).flatten(-3).float() - 32
    scales = data[..., 192:208].contiguous().view(torch.int8).float() * _floats(data[..., 208:], torch.float16)
    return codes * scales.repeat_interleave(16, dim=-1)


_BLOCKS: Mapping[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    2: (18, _q4_0), 3: (20, _q4_1), 6: (22, _q5_0), 7: (24, _q5_1), 8: (34, _q8_0), 12: (144, _q4_k),
    13: (176, _q5_k), 14: (210, _q6_k), 39: (17, _mxfp4),
}  # fmt: skip
"""By numbers of types: bytes of a block, and its values."""
_Q4_0, _Q4_K, _MXFP4 = 2, 12, 39
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


def dequantize(number: int, data: torch.Tensor) -> torch.Tensor:
    """``[..., bytes]`` uint8, whole blocks of a type -> their values ``[..., n]`` in float32."""
    if number in _FLOATS:
        return _floats(data, _FLOATS[number])
    size, values = _BLOCKS[number]
    return values(data.unflatten(-1, (-1, size))).flatten(-2)


def codes_of_4_bits(number: int, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``[n, bytes]`` of Q4_0, Q4_1, Q4_K or MXFP4 -> codes ``[n, groups, 32]`` uint8, scales ``[n, groups]``, of MXFP4
    as exponents, and minima ``[n, groups]`` or None."""
    blocks = data.unflatten(-1, (-1, _BLOCKS[number][0]))
    if number == _Q4_K:
        scales, minima = _group_scales(blocks)
        return _q4_k_codes(blocks).flatten(1, 2), scales.flatten(1), minima.flatten(1)
    if number == _MXFP4:
        return _nibbles(blocks[..., 1:]), blocks[..., 0], None
    scale = _floats(blocks[..., :2], torch.float16)[..., 0]
    if number == _Q4_0:
        return _nibbles(blocks[..., 2:]), scale, None
    return _nibbles(blocks[..., 4:]), scale, -_floats(blocks[..., 2:4], torch.float16)[..., 0]


class BlockLinear:
    """``x [n, in]`` -> ``[n, out]`` with a weight in blocks, by products in float32. See `PreparedLinear`."""

    is_dense = False
    has_rows = True

    def __init__(
        self, parts: Sequence[BlockRows], num_inputs: int, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self._parts, self._dtype, self._bias = tuple(parts), dtype, bias
        self._shape = sum(len(part.data) for part in parts), num_inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        inputs, step = x.float(), max(1, _MAX_ELEMENTS // max(1, self._shape[1]))
        outputs = [
            F.linear(inputs, dequantize(part.type, rows)) for part in self._parts for rows in part.data.split(step)
        ]
        output = torch.cat(outputs, dim=1)
        return (output if self._bias is None else output + self._bias.float()).to(dtype)

    def weight(self) -> torch.Tensor:
        """``[out, in]``, dequantized."""
        return torch.cat([dequantize(part.type, part.data) for part in self._parts]).to(self._dtype)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, in]`` of a weight with one part."""
        (part,) = self._parts
        return dequantize(part.type, part.data[index]).to(self._dtype)

    def stored(self) -> tuple[int, int]:
        """Nothing: the blocks are the file's."""
        return 0, 0

    def replace(self, weight: torch.Tensor) -> None:
        """Raises ValueError: blocks are not written to."""
        raise ValueError("a weight in the blocks of a GGUF file cannot be replaced")


def block_linear_torch(
    parts: Sequence[BlockRows], num_inputs: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> BlockLinear:
    """See `BlockLinear`."""
    return BlockLinear(parts, num_inputs, dtype, bias)
