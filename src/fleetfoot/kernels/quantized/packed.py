"""Weights of 4 bits, for each group of inputs a scale: how files pack them, how kernels read them, and the reference.

Functions on codes work on the last two dimensions, ``[..., out, in]``, so they serve stacks of matrices too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

SPAN = 16
"""Inputs whose codes have the same place in consecutive words."""
BLOCK = 8 * SPAN
"""Inputs of as many words as a span has."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each code of a word, from the lowest bits on."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MAX_ELEMENTS = 1 << 22
"""Values of the weight that the reference has in float32 at once."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight ``[out, in]``: ``(code - zero) * scale``, or ``e2m1(code) * 2 ** (scale - 127)``, and a bias."""

    words: torch.Tensor
    """``[out, ceil(in / 128) * 16]`` int32. Code ``i`` of word ``j`` of a block of 16 words is that of its input
    ``16 * i + j``: kernels multiply the codes of one place in all words of a block at once, without moving them."""
    scales: torch.Tensor
    """``[out, ceil(in / group)]`` in the dtype of the activations; of e2m1 uint8, with those of whole blocks."""
    zeros: torch.Tensor | None
    """``[out, ceil(in / group)]`` uint8, or float16 with fractions; None: 8, or e2m1."""
    group: int
    """Inputs that share a scale."""
    num_inputs: int
    is_e2m1: bool = False
    """Whether codes are floats of MXFP4 (Open Compute Project 2023)."""
    order: torch.Tensor | None = None
    """``[in]`` int64: the input that each column multiplies; None: that of the same number."""
    bias: torch.Tensor | None = None

    def dequantized(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Outputs ``begin`` to ``end`` of the weight in float32, in the order of the columns."""
        rows = slice(begin, end)
        return self._values(self.words[rows], self.scales[rows], None if self.zeros is None else self.zeros[rows])

    def of_stack(self, count: int, index: Any) -> torch.Tensor:
        """See `ScaledMatrix.of_stack`."""
        tensors = (self.words, self.scales, self.zeros)
        return self._values(*(None if each is None else each.unflatten(0, (count, -1))[index] for each in tensors))

    def _values(self, words: Any, scales: Any, zeros: torch.Tensor | None) -> torch.Tensor:
        codes = unpack_words(words)[..., : self.num_inputs]
        if not self.is_e2m1:
            values = codes.float() - (8.0 if zeros is None else self._expand(zeros.float()))
        else:
            values = torch.tensor(_E2M1, device=codes.device)[codes.long()]
            scales = (scales.int() << 23).view(torch.float32)
        return values * self._expand(scales.float())

    def _expand(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(self.group, dim=-1)[..., : self.num_inputs]


def packed_linear_torch(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    """``x [n, in]`` -> ``x @ weight.T + bias [n, out]``, by products in float32."""
    inputs = (x if weight.order is None else x[:, weight.order]).float()
    num_outputs = len(weight.words)
    output = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    step = max(1, _MAX_ELEMENTS // max(1, weight.num_inputs))
    for begin in range(0, num_outputs, step):
        product = F.linear(inputs, weight.dequantized(begin, begin + step))
        if weight.bias is not None:
            product += weight.bias[begin : begin + step]
        output[:, begin : begin + step] = product
    return output


# --- the layout of kernels --------------------------------------------------------------------------------------------


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """``[..., in]`` uint8 -> ``[..., ceil(in / 128) * 16]`` int32; the rest of the last block is 0."""
    padded = F.pad(codes, (0, -codes.shape[-1] % BLOCK))
    places = padded.unflatten(-1, (-1, 8, SPAN))  # [..., blocks, 8, 16]
    return _join(places.transpose(-1, -2)).flatten(-2)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """`pack_words` backwards: ``[..., blocks * 128]`` uint8."""
    return _split(words.unflatten(-1, (-1, SPAN))).transpose(-1, -2).flatten(-3)


def _join(codes: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` -> ``[...]`` int32 of ``n`` codes, the first in the lowest bits."""
    joined, count = codes[..., 0].to(torch.int32), codes.shape[-1]
    for place in range(1, count):
        joined |= codes[..., place].to(torch.int32) << (32 // count * place)
    return joined


def _split(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[...]`` int32 -> ``[..., 32 / bits]`` uint8, that in the lowest bits first."""
    count = 32 // bits
    codes = torch.empty(*words.shape, count, dtype=torch.uint8, device=words.device)
    for place in range(count):
        codes[..., place] = (words >> (bits * place)) & ((1 << bits) - 1)
    return codes


# --- the layouts of files ---------------------------------------------------------------------------------------------


def unpack_columns(packed: torch.Tensor, is_awq: bool = False, bits: int = 4) -> torch.Tensor:
    """``[..., rows, columns / n]`` int32 of ``n`` codes of 4 or 8 bits -> codes ``[..., rows, columns]``; ``is_awq``:
    in AWQ's order."""
    codes = _split(packed, bits)
    return (codes[..., [_AWQ_ORDER.index(place) for place in range(len(_AWQ_ORDER))]] if is_awq else codes).flatten(-2)


def pack_columns(codes: torch.Tensor, is_awq: bool = False, bits: int = 4) -> torch.Tensor:
    """`unpack_columns` backwards. Columns beyond whole words are 0."""
    words = F.pad(codes, (0, -codes.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    return _join(words[..., list(_AWQ_ORDER)] if is_awq else words)


def unpack_rows(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., rows / n, columns]`` int32 -> codes ``[..., rows, columns]``."""
    return unpack_columns(packed.transpose(-1, -2), bits=bits).transpose(-1, -2)


def pack_rows(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """`unpack_rows` backwards."""
    return pack_columns(codes.transpose(-1, -2), bits=bits).transpose(-1, -2)


def unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
    """``[..., columns / 2]`` uint8 -> codes ``[..., columns]``, that in the lower bits first (MXFP4)."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """`unpack_bytes` backwards."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def quantize_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[out, in]`` around 8 and scales ``[out, ceil(in / group)]`` of a plain weight. The value of the largest
    magnitude is -8 times the scale, which is negative where that value is positive: so all codes are used."""
    num_inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -num_inputs % group)).unflatten(1, (-1, group))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scales = (largest / -8).to(weight.dtype)
    nonzero = torch.where(scales == 0, 1.0, scales.float())
    codes = (groups / nonzero[:, :, None]).round().clamp(-8, 7) + 8
    return codes.flatten(1)[:, :num_inputs].to(torch.uint8), scales
