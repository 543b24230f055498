"""Gate and up with large weights, in wide tiles, for Hopper GPUs: ``gated_product.cu``."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.runtime.cuda_source import CudaKernel, load
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.row_padding import empty_rows, padded_rows, readable_rows
from fleetfoot.kernels.runtime.triton_support import cdiv
from fleetfoot.kernels_hopper.linear.product_tilings import CHUNK, GatedTiling
from fleetfoot.kernels_hopper.linear.tensor_maps import TensorMap, argument_bytes, tensor_map

SOURCE_PATH = Path(__file__).with_suffix(".cu")


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of ``gated_product.cu``."""

    _fields_ = (
        ("x", TensorMap),
        ("weight", TensorMap),
        ("squares", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "num_outputs", "num_parts", "padded_rows")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("row_tiles", "num_tiles")),
    )


@lru_cache(maxsize=1024)
def kernel_of(tiling: GatedTiling, num_inputs: int, *, deferred: bool = False, activation: str = "silu") -> CudaKernel:
    """The kernel of a tiling. ``deferred``: for a deferred norm."""
    macros = {
        "ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": num_inputs, "GROUPS": tiling.groups,
        "PEERS": tiling.peers, "STAGES": tiling.stages, "SHARED_BYTES": tiling.shared_bytes,
        "PARTS": num_inputs // 64 if deferred else 0,  # of tiles of 64 outputs or more
    }  # fmt: skip
    if activation == "gelu_tanh":
        macros["GELU"] = 1
    source = f"kernels_hopper/linear/{SOURCE_PATH.name}"
    threads = tiling.groups * 128
    return CudaKernel(source, SOURCE_PATH.stem, tuple(macros.items()), tiling.peers, threads, tiling.shared_bytes)


def multiply_gated_wide(
    x: torch.Tensor | DeferredRMSNorm, weight: torch.Tensor, tiling: GatedTiling, activation: str = "silu"
) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` ``[n, outputs / 2]``, with the rows of gate first in the weight; or with GELU.

    Args:
        x: ``[n, inputs]`` bfloat16; rows begin at multiples of 16 bytes. A deferred norm has the rows of one tile at
            most. weight: ``[outputs, inputs]``, contiguous.
    """
    deferred, x = (x, x.weighted) if isinstance(x, DeferredRMSNorm) else (None, x)
    num_rows, num_inputs = x.shape
    num_outputs = len(weight) // 2
    kernel = load(kernel_of(tiling, num_inputs, deferred=deferred is not None, activation=activation), weight.device)
    output = empty_rows(num_rows, num_outputs, like=x)
    if kernel.is_dry:
        return output
    row_tiles = cdiv(num_rows, tiling.rows)
    num_tiles = row_tiles * cdiv(num_outputs, tiling.outputs // 2 * tiling.peers)
    # several tiles of rows end with the last row
    readable = readable_rows(x, tiling.rows) if row_tiles == 1 else num_rows
    arguments = _Arguments(
        x=tensor_map(x.data_ptr(), (num_inputs, readable), (x.stride(0) * 2,), (CHUNK, tiling.rows // tiling.peers)),
        weight=_weight_map(weight.data_ptr(), num_outputs, num_inputs, tiling.outputs // 16),
        squares=None if deferred is None else deferred.squares.data_ptr(),
        num_parts=0 if deferred is None else len(deferred.squares), eps=0.0 if deferred is None else deferred.eps,
        out=output.data_ptr(), rows=num_rows, padded_rows=padded_rows(num_rows), num_outputs=num_outputs,
        row_tiles=row_tiles, num_tiles=num_tiles,
    )  # fmt: skip
    num_clusters = min(num_tiles, gpu_limits(weight.device).num_sms // tiling.peers)
    kernel.launch(num_clusters * tiling.peers, argument_bytes(arguments), dependent=True)
    return output


@lru_cache(maxsize=4096)
def _weight_map(pointer: int, num_outputs: int, num_inputs: int, pairs: int) -> ctypes.Array[ctypes.c_uint64]:
    """Rows of gate and up in turn, 8 of each, and ``pairs`` of them in a box."""
    row = num_inputs * 2
    sizes = num_inputs, 8, 2, num_outputs // 8
    return tensor_map(pointer, sizes, (row, num_outputs * row, 8 * row), (CHUNK, 8, 2, pairs))
