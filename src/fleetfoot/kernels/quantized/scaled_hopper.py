"""Products of up to 8 rows with weights in FP8 for Hopper GPUs: ``scaled_product.cu``; see
`fleetfoot.kernels.quantized.scaled`.

The weights of a decode step are read by kernels of a few microseconds, each of which waits for the one before. Triton's
kernel has some blocks of its weight in flight; here registers hold most of a small weight while the kernel waits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from fleetfoot.kernels.quantized.epilogue import PLAIN_EPILOGUE, Epilogue
from fleetfoot.kernels.quantized.scaled import FP8, ScaledMatrix
from fleetfoot.kernels.runtime.cuda_source import CudaKernel, can_compile, load
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.kernels.runtime.triton_support import cdiv

SOURCE_PATH = Path(__file__).with_name("scaled_product.cu")
ROWS = 8
"""Maximum rows: N of the tensor core instruction."""
SPAN = 128
"""Inputs that are added up before a scale: of a group, where weights have groups."""
_KINDS = {"token": 1, "group": 2, "static": 3}
_MOST_INPUTS, _MOST_INPUTS_OF_ROWS = 16384, 4096
"""Inputs that shared memory holds, of one row and of several."""


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """Compile and launch options of the kernel."""

    tiles: int
    """Tiles of 16 outputs of a block; with a gate the two halves of one."""
    warps: int
    ahead: int
    """Groups of inputs that a warp loads before it multiplies the first one."""
    blocks: int
    """Blocks that a multiprocessor holds at once."""


def has_hopper_form(activations: str, columns: int, num_inputs: int) -> bool:
    """Whether the kernel multiplies weights of such a form in FP8; arguments as of `ScaledMatrix`."""
    has_groups = columns == SPAN or (columns >= num_inputs and activations != "group")
    return activations in _KINDS and has_groups and num_inputs % SPAN == 0 and num_inputs <= _MOST_INPUTS


def has_hopper_kernel(weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies inputs of ``dtype`` with ``weight``."""
    values, device = weight.values, weight.values.device
    has_form = values.dtype is FP8 and has_hopper_form(weight.activations, weight.columns, values.shape[1])
    return has_form and dtype is torch.bfloat16 and has_hopper_kernels(device) and can_compile(device)


def hopper_product(
    num_rows: int, num_outputs: int, num_inputs: int, num_sms: int, *, has_groups: bool, gated: bool = False
) -> ScaledProduct | None:
    """The options for a product, which `docs/experiments/quantization.md` compares; None: another kernel is as fast.

    With few outputs each block has many warps with all of their inputs in flight; with more outputs, more and smaller
    blocks share a multiprocessor.
    """
    if num_rows > 1 and (num_rows > ROWS or not has_groups or num_inputs > _MOST_INPUTS_OF_ROWS or gated):
        return None
    if gated:
        return ScaledProduct(2, 8, 2, 2)
    if num_inputs > 8192:
        return ScaledProduct(1, 8, 4, 2)
    if num_inputs >= 4096:
        return ScaledProduct(2, 8, 4, 1) if num_outputs <= 32 * num_sms else ScaledProduct(2, 8, 2, 2)
    return ScaledProduct(1, 4, 4, 4) if num_outputs <= 48 * num_sms else ScaledProduct(1, 4, 2, 6)


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of ``scaled_product.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "weight", "scales", "bias", "squares_in", "residual")),
        *((name, ctypes.c_void_p) for name in ("norm_weight", "out", "total", "squares")),
        *((name, ctypes.c_int) for name in ("rows", "num_outputs", "num_parts")),
        *((name, ctypes.c_float) for name in ("eps", "factor")),
    )


@lru_cache(maxsize=1024)
def kernel_of(
    tiling: ScaledProduct,
    num_inputs: int,
    kind: str,
    scale_rows: int,
    *,
    has_groups: bool,
    is_one: bool,
    gated: int,
    is_deferred: bool,
    is_sum: bool,
    has_bias: bool,
    is_scaled: bool,
) -> CudaKernel:
    """The kernel of a tiling. ``kind``: `ScaledMatrix.activations`."""
    macros = {
        "TILES": tiling.tiles, "WARPS": tiling.warps, "AHEAD": tiling.ahead, "BLOCKS": tiling.blocks,
        "INPUTS": num_inputs, "KIND": _KINDS[kind], "SCALE_ROWS": scale_rows, "HAS_GROUPS": int(has_groups),
        "IS_ONE": int(is_one), "GATED": gated, "DEFERRED": int(is_deferred), "IS_SUM": int(is_sum),
        "HAS_BIAS": int(has_bias), "SCALED": int(is_scaled),
    }  # fmt: skip
    rows, scales = 1 if is_one else ROWS, num_inputs // SPAN if has_groups else 1
    row_bytes = 2 * num_inputs if is_one else num_inputs + 64
    floats = rows * (scales + 16 * tiling.tiles * tiling.warps + 1) + tiling.warps
    macros["SHARED_BYTES"] = shared_bytes = rows * row_bytes + -(-floats // 4) * 16
    source = f"kernels/quantized/{SOURCE_PATH.name}"
    return CudaKernel(source, SOURCE_PATH.stem, tuple(macros.items()), 1, tiling.warps * 32, shared_bytes)


def launch_scaled_hopper(
    output: torch.Tensor,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: ScaledMatrix,
    tiling: ScaledProduct,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> None:
    """Write the product, and what the epilogue makes of it.

    Args:
        output: ``[n, out]``; with a gate half as many outputs as ``weight`` has.
        x: ``[1, in]`` bfloat16, or ``[n, in]`` e4m3, contiguous.
        x_scales: of e4m3; None: static ones, or there are none yet.
    """
    num_inputs, has_groups = weight.values.shape[1], weight.columns < weight.values.shape[1]
    kernel = load(
        kernel_of(
            tiling, num_inputs, weight.activations, weight.rows, has_groups=has_groups, is_one=x.dtype is not FP8,
            gated=epilogue.gated, is_deferred=epilogue.deferred is not None, is_sum=epilogue.add_norm is not None,
            has_bias=weight.bias is not None, is_scaled=epilogue.scale != 1.0,
        ),
        output.device,
    )  # fmt: skip
    if kernel.is_dry:
        return
    if x.data_ptr() % 16:
        x = x.clone()
    squares_in, residual, norm_weight, total, squares = epilogue.tensors(output)
    scales = x_scales if x_scales is not None else weight.input_scale
    arguments = _Arguments(
        x=x.data_ptr(), x_scales=None if scales is None else scales.data_ptr(),
        weight=weight.values.data_ptr(), scales=weight.scales.data_ptr(),
        bias=None if weight.bias is None else weight.bias.data_ptr(), squares_in=squares_in.data_ptr(),
        residual=residual.data_ptr(), norm_weight=norm_weight.data_ptr(), out=output.data_ptr(),
        total=total.data_ptr(), squares=squares.data_ptr(), rows=len(x),
        num_outputs=output.shape[1], num_parts=epilogue.num_parts, eps=epilogue.eps, factor=epilogue.scale,
    )  # fmt: skip
    outputs = 16 if epilogue.gated else 16 * tiling.tiles
    kernel.launch(cdiv(output.shape[1], outputs), bytes(arguments), dependent=True)
