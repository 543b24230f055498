"""Selects the kernel in Gluon (`tiled_hopper`) for a linear layer and a number of rows, or a Triton kernel."""

from __future__ import annotations

import math

from fleetfoot.kernels.linear.tilings import MAX_BYTES, MAX_GATED_BYTES, Tiling, fastest_tiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.row_buckets import chosen_by_rows
from fleetfoot.kernels.runtime.triton_support import cdiv

_HOPPER_BYTES = 226 * 1024
"""Shared memory of a program on a Hopper GPU, without barriers."""
_MIN_ROUNDS = 2
"""Least rounds of tiles for which the Hopper kernel multiplies 33 to 64 rows: heads. It copies ahead across tiles. On
an H200, us for 64 rows of Qwen3-0.6B 86.7 and 77.7, of Qwen3-4B 195.4 and 185.7, of Llama-3.1-8B 258.8 and 250.6."""

_LEAST_USED, _MOST_USED, _MOST_USED_OF_SPLITS = 0.45, 1.0, 0.75
"""Tiles for each multiprocessor. The kernel that adds partial sums starts late if no multiprocessor is left for it."""
_LEAST_USED_OF_ROUNDS, _LEAST_USED_OF_LONG = 0.84, 0.9
"""The same for more than 224 rows: of the rounds of tiles of 256 rows, and of two ranges of 8,192 inputs and more."""


@chosen_by_rows
def choose_hopper_tiling(
    num_rows: int, num_outputs: int, num_inputs: int, *, gated: bool, may_split: bool, limits: GPULimits
) -> Tiling | None:
    """See `fastest_tiling`. The layer has no bias and no scale, and an activation of SiLU if it is gated."""
    if num_outputs % 8 == num_inputs % 8 == 0:
        tiling = _hopper_tiling(num_rows, num_outputs, num_inputs, gated, may_split, limits.num_sms)
        if tiling is not None:
            return tiling
    return fastest_tiling(num_rows, num_outputs, num_inputs, gated=gated, may_split=may_split, limits=limits)


def _hopper_tiling(
    num_rows: int, num_outputs: int, num_inputs: int, gated: bool, may_split: bool, num_sms: int
) -> Tiling | None:
    """The tiling of `fleetfoot.kernels_hopper.linear.tiled_hopper`; None: other kernels are as fast.

    The rules are those of measurements on an H200, where a program has a multiprocessor for itself. Narrow tiles of few
    rows occupy more of them, and read the weight and the inputs more often from L2.
    """
    if num_inputs < 512:
        return None
    if 32 < num_rows <= 64 and not gated and not may_split and num_outputs >= _MIN_ROUNDS * 128 * num_sms:
        return _hopper(64, 128, 1, gated)
    if not 64 < num_rows <= 256:
        return None
    few, many = num_rows <= 128, num_rows > 224
    kind = "gated" if gated else "residual" if may_split else "plain"
    # [row tile, outputs, splits]
    candidates = {
        ("plain", True): [(64, 64, 1), (64, 128, 1)],
        ("plain", False): [(128, 64, 1)],
        ("gated", True): [(64, 128, 1), (128, 128, 1)],
        ("gated", False): [(128, 128, 1)],
        ("residual", True): [(64, 64, 3), (128, 64, 3)] if num_inputs >= 3072 else [(64, 64, 2), (128, 64, 2)],
        ("residual", False): [(128, 64, 2), (128, 64, 1)],
    }[kind, few]

    def used(rows: int, outputs: int, splits: int) -> float:
        """Tiles for each multiprocessor."""
        return cdiv(num_rows, rows) * cdiv(num_outputs, outputs // (2 if gated else 1)) * splits / num_sms

    weight_bytes = num_outputs * num_inputs * 2 * (2 if gated else 1)
    if few or weight_bytes <= (MAX_GATED_BYTES if gated else MAX_BYTES)[256]:
        for candidate in candidates:
            if _LEAST_USED <= used(*candidate) <= (_MOST_USED if candidate[2] == 1 else _MOST_USED_OF_SPLITS):
                return _hopper(*candidate, gated)
    if many and gated and used(256, 128, 1) >= _LEAST_USED_OF_ROUNDS * math.ceil(used(256, 128, 1)):
        return _hopper(256, 128, 1, gated)
    if many and may_split and num_inputs >= 8192 and _LEAST_USED_OF_LONG <= used(128, 128, 2) <= _MOST_USED:
        return _hopper(128, 128, 2, gated)
    return None


def _hopper(rows: int, outputs: int, splits: int, gated: bool) -> Tiling:
    result_bytes = rows * outputs * (1 if gated else 2) if splits == 1 else 0  # partial sums are not staged
    stages = (_HOPPER_BYTES - result_bytes) // ((rows + outputs) * 64 * 2)
    return Tiling("hopper", outputs, 64, rows, min(stages, 8), splits=splits)
