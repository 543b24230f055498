"""Selects the kernel and the tiling of a linear layer for a number of rows.

With few rows a linear layer is bound by reading its weight, and the library's kernels, made for many rows, do not reach
the memory bandwidth: on an H100, one row, 1.4 of 3.0 TB/s for a 4096 x 4096 weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fleetfoot.kernels.linear.staged import StagedTiling
from fleetfoot.kernels.linear.streamed import StreamedTiling
from fleetfoot.kernels.linear.tiled import TiledTiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2

_MAX_BYTES = {64: 1 << 62, 128: 256 << 20, 256: 8 << 20}
"""Number of rows -> the largest weight for which the library is not used. Its kernels break the chain of dependent
launches: in whole steps on an H100, at 128 rows and 50 to 235 MB, they are 1 to 2% of a step slower."""
_MAX_GATED_BYTES = _MAX_BYTES | {256: 16 << 20}
"""The same for gated layers, for which the library needs one more kernel."""
_HALVED_BYTES = 16 << 20
"""Largest weight that is read once per half of the rows."""
_STAGED_BYTES = 100 * 1024
"""Maximum staged bytes of the weight per program: two such programs fit on a multiprocessor of a Hopper GPU."""
_STAGED_CHUNKS = 8
_GATED_ROWS = 129
"""Rows from which on gated layers without a tiling may use the Hopper kernel."""
_MIN_UTILIZATION = 0.88
"""Minimum utilization of the multiprocessors by tiles: from there on the kernel is as fast as the library and
`silu_and_mul` for 4096 inputs, and faster for fewer."""

FewRowsTiling = StagedTiling | StreamedTiling
Tiling = FewRowsTiling | TiledTiling


@lru_cache(maxsize=4096)
def choose_tiling(
    num_rows: int, num_outputs: int, num_inputs: int, *, gated: bool, may_split: bool, limits: GPULimits
) -> Tiling | None:
    """The tiling of this product; None: the library's kernel is faster.

    Args:
        num_outputs: outputs of the result: half the rows of a gated weight.
        may_split: the result may be partial sums.
    """
    table = _MAX_GATED_BYTES if gated else _MAX_BYTES
    max_bytes = next((size for rows, size in table.items() if num_rows <= rows), 0)
    weight_bytes = _weight_bytes(num_outputs, num_inputs, gated)
    if num_rows == 0 or weight_bytes > max_bytes or num_outputs < 16 or num_inputs < 16 or num_inputs % 8:
        return None
    if num_rows <= 8:
        tiling: Tiling | None = _few_rows(num_rows, num_outputs, num_inputs, gated, limits.num_sms)
    else:
        tiling = _some_rows(num_rows, num_outputs, num_inputs, gated, may_split, limits.num_sms)
    return None if tiling is None else _fitted(tiling, gated, limits.shared_bytes)


def _weight_bytes(num_outputs: int, num_inputs: int, gated: bool) -> int:
    return num_outputs * num_inputs * 2 * (2 if gated else 1)


def shared_bytes(tiling: Tiling, gated: bool) -> int:
    """Estimated shared memory of a program."""
    if isinstance(tiling, TiledTiling):
        return (tiling.outputs + tiling.row_tile) * tiling.inputs * tiling.num_stages * 2
    chunk_bytes = (tiling.outputs * (2 if gated else 1) + tiling.row_tile) * tiling.inputs * tiling.num_warps * 2
    return chunk_bytes * (tiling.num_chunks if isinstance(tiling, StagedTiling) else tiling.num_stages)


def _fitted(tiling: Tiling, gated: bool, available_bytes: int) -> Tiling | None:
    """The tiling with as many stages as fit in shared memory; None: none fits."""
    if isinstance(tiling, StagedTiling):
        if shared_bytes(tiling, gated) <= available_bytes:
            return tiling
        tiling = StreamedTiling(outputs=16, num_stages=4, row_tile=tiling.row_tile)
    while shared_bytes(tiling, gated) > available_bytes and tiling.num_stages > 2:
        tiling = replace(tiling, num_stages=tiling.num_stages - 1)
    return tiling if shared_bytes(tiling, gated) <= available_bytes else None


def _few_rows(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, num_sms: int) -> Tiling:
    row_tile = 1 if num_rows == 1 else 8
    staged_bytes = 16 * num_inputs * 2 * (2 if gated else 1)
    chunk = _power_of_2_divisor(num_inputs, 1024)
    # With more than a few programs per multiprocessor, streaming is faster than staging.
    few_programs = _weight_bytes(num_outputs, num_inputs, gated) <= num_sms * 2 * _STAGED_BYTES
    if staged_bytes <= _STAGED_BYTES and few_programs and chunk >= 64 and num_inputs // chunk <= _STAGED_CHUNKS:
        warps = 8 if chunk == 1024 and num_inputs >= 2048 and row_tile == 1 else 4
        return StagedTiling(chunk // warps, num_inputs // chunk, row_tile, num_warps=warps)
    if row_tile == 1:
        # A program that has a multiprocessor for itself needs deep stages; otherwise two should fit, unless gated.
        has_own = cdiv(num_outputs, 16) <= num_sms and not gated
        return StreamedTiling(outputs=16, num_stages=8 if has_own else 6, row_tile=row_tile)
    if not gated and cdiv(num_outputs, 32) <= num_sms:
        return StreamedTiling(outputs=32, num_stages=4, row_tile=row_tile)
    return StreamedTiling(outputs=16, num_stages=3 if gated else 4, row_tile=row_tile)


def _some_rows(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool, may_split: bool, num_sms: int
) -> Tiling | None:
    row_tile = max(16, min(128, next_power_of_2(num_rows)))
    if gated and row_tile == 128 and (num_rows > 128 or cdiv(num_outputs, 64) >= num_sms):
        return TiledTiling(row_tile, 6 if num_rows <= 128 else 4, outputs=128, inputs=64, num_warps=8)
    column_tiles = cdiv(num_outputs, 32 if gated else 64)
    # Two tiles of half the rows read the weight twice, the second time from L2 if it fits. This is faster if it uses
    # twice as many multiprocessors, and better than splitting the inputs, which leaves partial sums to be added.
    if num_rows > 32 and _weight_bytes(num_outputs, num_inputs, gated) <= _HALVED_BYTES:
        halved = column_tiles * cdiv(num_rows, row_tile // 2)
        if halved <= num_sms:
            row_tile //= 2
    num_tiles = column_tiles * cdiv(num_rows, row_tile)
    max_splits = 8 if num_rows <= 16 else 4  # the next kernel reads all partial sums
    splits = 1
    while may_split and splits < max_splits and num_tiles * splits * 2 <= num_sms and num_inputs >= splits * 512:
        splits *= 2
    if num_tiles * splits < num_sms // 3:
        return None
    # One program per multiprocessor needs deep stages; with several, two should fit.
    one_each = num_tiles * splits <= num_sms
    stages = {16: (6, 4), 32: (5 if gated or num_rows > 32 else 4, 4), 64: (4, 3), 128: (4, 4)}[row_tile]
    return TiledTiling(row_tile, stages[0] if one_each else stages[1], splits)


@lru_cache(maxsize=4096)
def gated_row_groups(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int) -> int | None:
    """Warp groups of 64 rows per tile of `fleetfoot.kernels.linear.gated_hopper`; None: the library is faster."""
    if num_rows < _GATED_ROWS or num_outputs % 8 or num_inputs % 8:
        return None

    def rounds(groups: int) -> float:
        """Estimated time in tiles of 64 rows. Wider tiles read slightly less."""
        tiles = cdiv(num_rows, 64 * groups) * cdiv(num_outputs, 128)
        return cdiv(tiles, num_sms) * groups * (1.0 if groups == 2 else 0.97)

    groups = min((2, 3), key=rounds)
    return groups if num_rows * num_outputs >= _MIN_UTILIZATION * rounds(groups) * num_sms * 64 * 128 else None


def _power_of_2_divisor(number: int, limit: int) -> int:
    divisor = 1
    while divisor < limit and number % (divisor * 2) == 0:
        divisor *= 2
    return divisor
