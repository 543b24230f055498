"""Selects the Triton kernel and the tiling of a linear layer for a number of rows.

With few rows a linear layer is bound by reading its weight, and the library's kernels, made for many rows, do not reach
the memory bandwidth: on an H100, one row, 1.4 of 3.0 TB/s for a 4096 x 4096 weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.row_buckets import chosen_by_rows
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, options_text

MAX_BYTES = {64: 1 << 62, 128: 256 << 20, 256: 8 << 20}
"""Number of rows -> the largest weight for which the library is not used. Its kernels break the chain of dependent
launches: in whole steps on an H100, at 128 rows and 50 to 235 MB, they are 1 to 2% of a step slower."""
MAX_GATED_BYTES = MAX_BYTES | {256: 16 << 20}
"""The same for gated layers, for which the library needs one more kernel."""
_HALVED_BYTES = 16 << 20
"""Largest weight that is read once per half of the rows."""
_STAGED_BYTES = 100 * 1024
"""Maximum staged bytes of the weight per program: two such programs fit on a multiprocessor of a Hopper GPU."""
_STAGED_CHUNKS = 8
_SHORT_TILE_BYTES, _SHORT_SHARE, _SHARE = 256 << 10, 8, 3
"""Bytes of the weight in a tile, up to which a program for 8 multiprocessors is enough; else for 3. The library
breaks the chain: on an H200, a layer of Qwen2.5-1.5B took 7 us more with 32 rows, when the library multiplied its q, k
and v, than with 48, where they are tiled."""
_LONG_RANGE = 1024
"""Inputs of a range for which adding up one more partial sum takes less time than it saves."""
MOST_SUMMED_ROWS = 2
"""Rows up to which each program of a product makes the sum of a `DeferredSum` for itself: of more rows, reading output
and residual again takes longer than a kernel that makes the sum once. By estimate: 864 programs that read 2 rows of
Gemma-3-1B read 8 MB, which takes 1.5 us out of L2; a kernel between two products takes 2.2 us."""
MOST_REGISTERS = 128
"""The kernel for few rows takes no more registers a thread."""
_SM_REGISTERS, _RESERVED_BYTES = 65536, 1024
"""Registers of a multiprocessor, and its shared memory that a program occupies besides its own."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel of `fleetfoot.kernels.linear.triton_kernels`, or that in Gluon for Hopper GPUs (hopper), with its
    compile and launch options."""

    kernel: Literal["staged", "streamed", "tiled", "hopper"]
    outputs: int
    """Rows of the weight in a tile; tiled or hopper, and gated: gates and ups, half and half."""
    inputs: int
    """Inputs that are multiplied at a time, by a warp unless tiled; those of all warps are a chunk."""
    row_tile: int
    """Rows of the input, rounded up: 1 or 8; tiled: in a tile, 16, 32, 64 or 128; hopper: 64, 128 or 256."""
    stages: int
    """Stages of the pipeline; staged: chunks."""
    num_warps: int = 4
    splits: int = 1
    """Ranges of the inputs, in each of which a tile of outputs is multiplied; 1 unless tiled or hopper."""

    def text(self, num_inputs: int, head_dim: int = 0) -> str:
        """The kernel and its options, with the size of a tile: rows of the weight, inputs, rows of the input.
        ``num_inputs``: of the weight; ``head_dim``: of the heads that the kernel rotates."""
        is_hopper = self.kernel == "hopper"
        options = {"stages": self.stages, "warps": 1 if is_hopper else self.num_warps, "splits": self.splits}
        name = "tiled_hopper" if is_hopper else self.kernel
        return f"{name} {self.outputs}x{self.inputs}x{self.row_tile}{options_text(options)}"

    @property
    def supports_norms(self) -> bool:
        """Whether deferred norms before and after the product are part of the kernel."""
        return self.kernel not in ("tiled", "hopper")

    def shared_bytes(self, gated: bool) -> int:
        """Estimated shared memory of a program."""
        if not self.supports_norms:
            return (self.outputs + self.row_tile) * self.inputs * self.stages * 2
        return (self.outputs * (2 if gated else 1) + self.row_tile) * self.inputs * self.num_warps * self.stages * 2

    def fits_at_once(self, num_outputs: int, limits: GPULimits) -> bool:
        """Whether all programs for few rows of ``num_outputs`` run at the same time, by estimate."""
        by_memory = limits.shared_bytes // (self.shared_bytes(False) + _RESERVED_BYTES)
        by_registers = _SM_REGISTERS // (self.num_warps * 32 * MOST_REGISTERS)
        return cdiv(num_outputs, self.outputs) <= limits.num_sms * min(by_memory, by_registers)


def fastest_tiling(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    gated: bool,
    may_split: bool,
    limits: GPULimits,
) -> Tiling | None:
    """The tiling of this product; None: the library's kernel is faster.

    Args:
        num_outputs: outputs of the result: half the rows of a gated weight.
        may_split: the result may be partial sums.
    """
    table = MAX_GATED_BYTES if gated else MAX_BYTES
    max_bytes = next((size for rows, size in table.items() if num_rows <= rows), 0)
    weight_bytes = num_outputs * num_inputs * 2 * (2 if gated else 1)
    if num_rows == 0 or weight_bytes > max_bytes or num_outputs < 16 or num_inputs < 16 or num_inputs % 8:
        return None
    tiling: Tiling | None
    if num_rows <= 8:
        tiling = _few_rows(num_rows, num_outputs, num_inputs, gated, weight_bytes, limits)
    else:
        tiling = _some_rows(num_rows, num_outputs, num_inputs, gated, may_split, weight_bytes, limits.num_sms)
    while tiling is not None and tiling.shared_bytes(gated) > limits.shared_bytes:
        tiling = replace(tiling, stages=tiling.stages - 1) if tiling.stages > 2 else None
    return tiling


choose_tiling = chosen_by_rows(fastest_tiling)


def _few_rows(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool, weight_bytes: int, limits: GPULimits
) -> Tiling:
    row_tile = 1 if num_rows == 1 else 8
    chunk = min(1024, num_inputs & -num_inputs)  # the largest power of two that divides the inputs
    staged_bytes = 16 * num_inputs * 2 * (2 if gated else 1)
    # With more than a few programs per multiprocessor, streaming is faster than staging.
    few_programs = weight_bytes <= limits.num_sms * 2 * _STAGED_BYTES
    if staged_bytes <= _STAGED_BYTES and few_programs and chunk >= 64 and num_inputs // chunk <= _STAGED_CHUNKS:
        warps = 8 if chunk == 1024 and num_inputs >= 2048 and row_tile == 1 else 4
        staged = Tiling("staged", 16, chunk // warps, row_tile, num_inputs // chunk, warps)
        return staged if staged.shared_bytes(gated) <= limits.shared_bytes else _streamed(16, row_tile, 4)
    programs = cdiv(num_outputs, 16)
    if row_tile == 1:
        return _streamed_one_row(programs, num_inputs, gated, limits.num_sms)
    if gated:
        return _streamed(16, row_tile, 3)
    if cdiv(num_outputs, 32) <= limits.num_sms:
        return _streamed(32, row_tile, 4)
    if num_inputs <= 1536:
        return _streamed(32, row_tile, 2)
    return _streamed(16, row_tile, 3 if num_inputs <= 2048 else 4)


def _streamed_one_row(programs: int, num_inputs: int, gated: bool, num_sms: int) -> Tiling:
    """The tiling for one row. ``programs``: with 16 outputs each.

    A program that has a multiprocessor for itself needs deep stages. With several rounds of programs, more resident
    ones are better, above all if a program has few chunks: their loads begin and end at different times. On an H200, us
    for the heads of Qwen3-0.6B, Qwen2.5-1.5B, Llama-3.2-3B and Llama-3.1-8B (1024, 1536, 3072 and 4096 inputs) with 6
    stages: 109, 130, 184 and 250; with 3 or 4: 76, 111, 182 and 254.
    """
    if gated:
        return _streamed(16, 1, 3) if num_inputs <= 2048 else _streamed(8, 1, 6)  # 2 to 11% and 1% of a layer
    if programs <= num_sms:
        return _streamed(16, 1, 8)
    if programs <= 2 * num_sms:
        return _streamed(16, 1, 6)
    if num_inputs <= 2048:
        return _streamed(16, 1, 3)
    if programs <= 3 * num_sms and 3072 <= num_inputs < 4096:
        return _streamed(16, 1, 5)  # q, k and v of Llama-3.2-3B: 1.7% of a layer
    # A third resident program instead of a second round.
    is_one_round = programs <= 3 * num_sms and num_inputs > 4096
    return _streamed(16, 1, 4 if num_inputs < 4096 or is_one_round else 6)


def _streamed(outputs: int, row_tile: int, stages: int) -> Tiling:
    return Tiling("streamed", outputs, 128, row_tile, stages)


def _some_rows(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool, may_split: bool, weight_bytes: int, num_sms: int
) -> Tiling | None:
    row_tile = max(16, min(128, next_power_of_2(num_rows)))
    if gated and row_tile == 128 and (num_rows > 128 or cdiv(num_outputs, 64) >= num_sms):
        return Tiling("tiled", 128, 64, row_tile, 6 if num_rows <= 128 else 4, num_warps=8)
    column_tiles = cdiv(num_outputs, 32 if gated else 64)
    splits, halved_splits = (
        _splits(num_rows, column_tiles * cdiv(num_rows, rows), num_inputs, num_sms) if may_split else 1
        for rows in (row_tile, row_tile // 2)
    )
    # Two tiles of half the rows read the weight twice, the second time from L2 if it fits. This is faster if it uses
    # more multiprocessors, and better than splitting the inputs, which leaves partial sums to be added.
    is_halved = (
        num_rows > 32 and weight_bytes <= _HALVED_BYTES and column_tiles * cdiv(num_rows, row_tile // 2) <= num_sms
    )
    if is_halved and 2 * halved_splits > splits:
        row_tile, splits = row_tile // 2, halved_splits
    num_tiles = column_tiles * cdiv(num_rows, row_tile)
    programs = num_tiles * splits
    if programs < num_sms // (_SHORT_SHARE if 64 * num_inputs * 2 // splits <= _SHORT_TILE_BYTES else _SHARE):
        return None
    # One program per multiprocessor needs deep stages; with several, two should fit.
    one_each = programs <= num_sms
    stages = {16: (6, 4), 32: (5 if gated or num_rows > 32 else 4, 4), 64: (4, 3), 128: (4, 4)}[row_tile]
    return Tiling("tiled", 64, 128, row_tile, stages[0] if one_each else stages[1], splits=splits)


def _splits(num_rows: int, num_tiles: int, num_inputs: int, num_sms: int) -> int:
    """Ranges of inputs, so that as many tiles run at once as fit. The next kernel reads all partial sums: there are
    more than 4 ranges only of few rows, or of long ranges. On an H100, us for the down projection of Gemma-3-1B (6,912
    inputs): 16 rows 8.0 with 4 ranges, 6.7 with 6; 64 rows 10.6 with 2 of tiles of half the rows, 7.7 with 6."""
    most = 8 if num_rows <= 16 else 4
    counts = [
        count
        for count in (1, 2, 3, 4, 6, 8)
        if num_tiles * count <= num_sms
        and (count <= most or num_inputs >= count * _LONG_RANGE)
        and (count == 1 or num_inputs >= count * 256)
        and (count in (1, 2, 4, 8) or num_inputs % (count * 128) == 0)
    ]
    return max(counts, default=1)
