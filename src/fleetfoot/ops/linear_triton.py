"""Linear layers on a GPU: Triton kernels for the few rows of a decode step, the vendor's library for more.

With few rows a linear layer reads its weight once and does next to nothing with it, and the library's kernels, made for
many rows, leave much of the memory's bandwidth unused: on an H100, one row, 1.4 of 3.0 TB/s on a 4096 x 4096 weight.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import torch.nn.functional as F

from fleetfoot.ops.linear import PreparedLinear, check_replacement
from fleetfoot.ops.linear_staged_triton import StagedTiling, linear_staged
from fleetfoot.ops.linear_streamed_triton import StreamedTiling, linear_streamed
from fleetfoot.ops.linear_tiled_triton import TiledTiling, linear_tiled
from fleetfoot.ops.silu_and_mul_triton import silu_and_mul_triton
from fleetfoot.ops.triton_support import cdiv, next_power_of_2

MAX_ROWS = 64
"""With more rows than this the library is as fast."""
_STAGED_BYTES = 100 * 1024
"""Most bytes of the weight for a program that stages them: two such programs fit a multiprocessor of a Hopper GPU."""
_STAGED_CHUNKS = 8

Tiling = StagedTiling | StreamedTiling | TiledTiling


@lru_cache(maxsize=4096)
def choose_tiling(
    num_rows: int, num_outputs: int, num_inputs: int, *, gated: bool, may_split: bool, num_sms: int
) -> Tiling | None:
    """Which kernel serves this product, and how; None: the library's.

    Args:
        num_outputs: of the result: half the rows of the weight if it is gated.
        may_split: partial sums will do.
        num_sms: multiprocessors of the device.
    """
    if not 0 < num_rows <= MAX_ROWS or num_outputs < 16 or num_inputs % 8:
        return None
    if num_rows <= 8:
        return _few_rows(num_rows, num_outputs, num_inputs, gated, num_sms)
    return _some_rows(num_rows, num_outputs, num_inputs, gated, may_split, num_sms)


def _few_rows(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, num_sms: int) -> Tiling:
    row_tile = 1 if num_rows == 1 else 8
    staged_bytes = 16 * num_inputs * 2 * (2 if gated else 1)
    total_bytes = num_outputs * num_inputs * 2 * (2 if gated else 1)
    chunk = _power_of_2_divisor(num_inputs, 1024)
    # Beyond a few programs for each multiprocessor, programs come and go, and a stream is better than stages.
    few_programs = total_bytes <= num_sms * 2 * _STAGED_BYTES
    if staged_bytes <= _STAGED_BYTES and few_programs and chunk >= 64 and num_inputs // chunk <= _STAGED_CHUNKS:
        warps = 8 if chunk == 1024 and num_inputs >= 2048 and row_tile == 1 else 4
        return StagedTiling(chunk // warps, num_inputs // chunk, row_tile, num_warps=warps)
    if row_tile == 1:
        return StreamedTiling(outputs=16, num_stages=5 if gated else 6, row_tile=row_tile)
    if not gated and cdiv(num_outputs, 32) <= num_sms:  # each program has a multiprocessor to itself
        return StreamedTiling(outputs=32, num_stages=4, row_tile=row_tile)
    return StreamedTiling(outputs=16, num_stages=3 if gated else 4, row_tile=row_tile)


def _some_rows(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool, may_split: bool, num_sms: int
) -> Tiling | None:
    row_tile = max(16, next_power_of_2(num_rows))
    num_tiles = cdiv(num_outputs, 32 if gated else 64)
    splits = 1
    if may_split and num_tiles <= num_sms // 2:
        splits = 2 if num_tiles >= 32 else min(8, next_power_of_2(cdiv(num_inputs, 512)))
    if num_tiles * splits < num_sms // 3:
        return None
    # One program on a multiprocessor wants deep stages; where there are several for each, two should fit.
    one_each = num_tiles * splits <= num_sms
    stages = {16: (6, 4), 32: (6, 4), 64: (4, 3)}[row_tile]
    return TiledTiling(row_tile, stages[0] if one_each else stages[1], splits)


def _power_of_2_divisor(number: int, most: int) -> int:
    divisor = 1
    while divisor < most and number % (divisor * 2) == 0:
        divisor *= 2
    return divisor


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class TritonLinear:
    """The weight as it came, read by the kernel that suits the number of rows, which the host knows."""

    __slots__ = ("_bias", "_gated", "_may_split", "_num_sms", "_weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False, may_split: bool = False
    ) -> None:
        """Args:
        gated: the result is ``silu`` of the first half of the outputs times the second.
        may_split: the result may be partial sums ``[splits, n, out]`` float32.
        """
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._gated = gated
        self._may_split = may_split
        self._num_sms = _num_sms(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        num_outputs, num_inputs = self._weight.shape
        if self._gated:
            num_outputs //= 2
        if self._weight.dtype not in (torch.bfloat16, torch.float16):
            return self._by_library(x)
        tiling = choose_tiling(
            num_rows,
            num_outputs,
            num_inputs,
            gated=self._gated,
            may_split=self._may_split,
            num_sms=self._num_sms,
        )
        if tiling is None:
            return self._by_library(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        return self.launch(x, tiling)

    def launch(self, x: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """What `__call__` does, with a tiling of the caller's: for measurements."""
        num_outputs = self._weight.shape[0] // (2 if self._gated else 1)
        shape: tuple[int, ...] = (x.shape[0], num_outputs)
        dtype = x.dtype
        if isinstance(tiling, TiledTiling) and tiling.splits > 1:
            shape, dtype = (tiling.splits, *shape), torch.float32
        output = torch.empty(shape, dtype=dtype, device=x.device)
        arguments = (output, x, self._weight, self._bias, self._gated)
        if isinstance(tiling, StagedTiling):
            linear_staged(*arguments, tiling)
        elif isinstance(tiling, StreamedTiling):
            linear_streamed(*arguments, tiling)
        else:
            linear_tiled(*arguments, tiling)
        return output

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        output = F.linear(x, self._weight, self._bias)
        return silu_and_mul_triton(output) if self._gated else output

    def weight(self) -> torch.Tensor:
        return self._weight

    def replace(self, weight: torch.Tensor) -> None:
        """Take another weight, in the place of this one: captured graphs read it there."""
        check_replacement(weight, self._weight.shape, self._weight.dtype)
        if weight.data_ptr() != self._weight.data_ptr() or weight.device != self._weight.device:
            self._weight.copy_(weight)


def prepare_linear_triton(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
    """See `OpSet.prepare_linear`."""
    return TritonLinear(weight, bias)


def prepare_gate_up_triton(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
    """See `OpSet.prepare_gate_up`."""
    return TritonLinear(weight, bias, gated=True)


def prepare_residual_linear_triton(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
    """See `OpSet.prepare_residual_linear`."""
    return TritonLinear(weight, bias, may_split=True)
