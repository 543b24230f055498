"""Linear layers of 17 to 256 rows with the RMSNorms on their two sides, for Hopper GPUs: ``decode_product.cu``.

Without them, a norm of some dozens of rows is a kernel that does little but wait. See `DeferredRMSNorm`. Weights are
contiguous bfloat16 ``[outputs, inputs]``.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.runtime.cuda_source import CudaKernel, LoadedKernel, load
from fleetfoot.kernels.runtime.row_padding import empty_rows, padded_rows, readable_rows
from fleetfoot.kernels_hopper.linear.product_tilings import CHUNK, ProductKind, ProductTiling
from fleetfoot.kernels_hopper.linear.tensor_maps import TensorMap, argument_bytes, tensor_map

if TYPE_CHECKING:
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

SOURCE_PATH = Path(__file__).with_suffix(".cu")
_FUNCTION = SOURCE_PATH.stem
_EPILOGUES: dict[ProductKind, int] = {"gated": 1, "residual": 2, "qkv": 3}


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of ``decode_product.cu``."""

    _fields_ = (
        ("x", TensorMap),
        ("weight", TensorMap),
        *((name, ctypes.c_void_p) for name in ("squares", "residual", "norm", "out", "total", "squares_out")),
        *((name, ctypes.c_int) for name in ("rows", "num_outputs", "row_tiles", "num_parts", "padded_rows")),
        ("eps", ctypes.c_float),
        ("kv_cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_stride", "kind_stride", "head_stride", "offset_stride")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "cos_sin", "q_norm", "k_norm", "bias")),
        ("head_eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads")),
    )


@lru_cache(maxsize=1024)
def kernel_of(
    kind: ProductKind,
    tiling: ProductTiling,
    num_inputs: int,
    head_dim: int = 0,
    block_size: int = 0,
    *,
    has_bias: bool = False,
) -> CudaKernel:
    """The kernel of a tiling. ``head_dim``, ``block_size`` of the KV cache and ``has_bias``: with kind ``qkv`` only."""
    shared = tiling.shared_bytes(num_inputs, head_dim)
    macros = {
        "EPILOGUE": _EPILOGUES[kind], "ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": num_inputs,
        "SPLITS": tiling.splits, "PEERS": tiling.peers, "STAGES": tiling.stages(num_inputs, head_dim),
        "PARTS": 0 if kind == "residual" else num_inputs // 64,  # of tiles of 64 outputs or more
        "SHARED_BYTES": shared, "REGISTERS": tiling.registers,
    }  # fmt: skip
    if kind == "qkv":
        macros |= {"HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
        if has_bias:
            macros["BIAS"] = 1
    if tiling.beside_attention:
        macros["BESIDE_ATTENTION"] = 1
    cluster, threads = tiling.splits * tiling.peers, tiling.rows * 2 + 32
    return CudaKernel(
        f"kernels_hopper/linear/{SOURCE_PATH.name}",
        _FUNCTION,
        tuple(macros.items()),
        cluster,
        threads,
        shared,
    )


def multiply_gated(x: DeferredRMSNorm, weight: torch.Tensor, tiling: ProductTiling) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, with the rows of gate first in the weight: ``[n, outputs / 2]``."""
    kernel = load(kernel_of("gated", tiling, weight.shape[1]), weight.device)
    output = empty_rows(len(x.weighted), len(weight) // 2, like=x.weighted)
    if not kernel.is_dry:
        arguments = _arguments("gated", tiling, x.weighted, weight, x)
        arguments.out = output.data_ptr()
        _launch(kernel, arguments, tiling, weight)
    return output


def add_and_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: ProductTiling,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
) -> DeferredRMSNorm:
    """``residual + x @ weight.T`` and its norm, deferred, with ``norm [outputs]`` as weight.

    Args:
        x: ``[n, inputs]`` bfloat16; rows begin at multiples of 16 bytes. ``residual``: ``[n, outputs]``, contiguous.
    """
    kernel = load(kernel_of("residual", tiling, weight.shape[1]), weight.device)
    result = DeferredRMSNorm.empty(residual, len(weight) // tiling.outputs, eps)
    if kernel.is_dry:
        return result
    arguments = _arguments("residual", tiling, x, weight, None)
    arguments.residual, arguments.norm = residual.data_ptr(), norm.data_ptr()
    arguments.out, arguments.total = result.weighted.data_ptr(), result.total.data_ptr()
    arguments.squares_out = result.squares.data_ptr()
    _launch(kernel, arguments, tiling, weight)
    return result


def rotate_and_cache(
    x: DeferredRMSNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: ProductTiling,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    rotary: RotaryInputs,
) -> torch.Tensor:
    """`rope_and_cache_torch` of ``x @ weight.T + bias``: query ``[n, num_heads, head_dim]``, and K and V in the cache.
    The norms of q and k have no offset. ``bias [outputs]``: contiguous, at a multiple of 16 bytes."""
    head_dim, strides = kv_cache.shape[4], kv_cache.stride()
    kernel = load(
        kernel_of("qkv", tiling, weight.shape[1], head_dim, kv_cache.shape[3], has_bias=bias is not None), weight.device
    )
    query = x.weighted.new_empty((len(x.weighted), num_heads, head_dim))
    if kernel.is_dry:
        return query
    arguments = _arguments("qkv", tiling, x.weighted, weight, x)
    arguments.out, arguments.kv_cache = query.data_ptr(), kv_cache.data_ptr()
    arguments.block_stride, arguments.kind_stride, arguments.head_stride, arguments.offset_stride = strides[:4]
    arguments.slots, arguments.positions = metadata.slot_mapping.data_ptr(), metadata.positions.data_ptr()
    arguments.cos_sin, arguments.head_eps = rotary.cos_sin.data_ptr(), rotary.eps
    arguments.q_norm, arguments.k_norm = _pointer(rotary.q_norm), _pointer(rotary.k_norm)
    arguments.bias = _pointer(bias)
    arguments.num_heads, arguments.num_kv_heads = num_heads, kv_cache.shape[2]
    _launch(kernel, arguments, tiling, weight)
    return query


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _arguments(
    kind: ProductKind, tiling: ProductTiling, x: torch.Tensor, weight: torch.Tensor, deferred: DeferredRMSNorm | None
) -> _Arguments:
    """What all kinds have in common."""
    num_inputs, gated = x.shape[1], kind == "gated"
    box = tiling.outputs // (2 if gated and tiling.peers == 1 else tiling.peers)
    return _Arguments(
        x=tensor_map(
            x.data_ptr(), (num_inputs, readable_rows(x, tiling.rows)), (x.stride(0) * 2,), (CHUNK, tiling.rows)
        ),
        weight=_weight_map(weight.data_ptr(), len(weight), num_inputs, box, tiling.run),
        squares=None if deferred is None else deferred.squares.data_ptr(),
        num_parts=0 if deferred is None else len(deferred.squares),
        rows=len(x), num_outputs=len(weight) // (2 if gated else 1), row_tiles=tiling.row_tiles(len(x)),
        padded_rows=padded_rows(len(x)),
        eps=0.0 if deferred is None else deferred.eps,
    )  # fmt: skip


def _launch(kernel: LoadedKernel, arguments: _Arguments, tiling: ProductTiling, weight: torch.Tensor) -> None:
    num_blocks = arguments.row_tiles * (len(weight) // tiling.outputs) * tiling.splits
    kernel.launch(num_blocks, argument_bytes(arguments), dependent=True)


@lru_cache(maxsize=4096)
def _weight_map(pointer: int, num_outputs: int, num_inputs: int, box_outputs: int, run: int) -> Any:
    """The weight ``[num_outputs, num_inputs]`` with its rows in the order of the kernel's outputs."""
    row = num_inputs * 2
    return tensor_map(
        pointer,
        (num_inputs, 2, 4, run, num_outputs // (8 * run)),
        (row, 2 * run * row, 2 * row, 8 * run * row),
        (CHUNK, 2, 4, run, box_outputs // (8 * run)),
    )
