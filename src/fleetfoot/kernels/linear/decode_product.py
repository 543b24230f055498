"""Linear layers of 65 to 256 rows with the RMSNorms on their two sides, for Hopper GPUs: ``decode_product.cu``.

Without them, a norm of some dozens of rows is a kernel that does little but wait. See `DeferredRMSNorm`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.runtime.cuda_source import CudaKernel, LoadedKernel, driver_call
from fleetfoot.kernels.runtime.triton_support import cdiv

if TYPE_CHECKING:
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

Kind = Literal["plain", "gated", "residual", "qkv"]
_KINDS: tuple[Kind, ...] = ("plain", "gated", "residual", "qkv")
_CHUNK = 64
_MAX_PARTS = 32
_SHARED_BYTES = 232448
_BARRIER_BYTES = 1024 + 512  # with what aligns the ring
_BFLOAT16, _SWIZZLE_128, _PROMOTION_256 = 9, 3, 3


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Tiles of ``decode_product.cu``."""

    rows: int
    """Rows of the input in a tile: 64 or 128."""
    outputs: int
    """Rows of the weight in a tile: 64 or 128; gated: gates and ups, half and half."""
    splits: int = 1
    """Ranges of the inputs: thread blocks of a cluster. 1 unless the product is added to the residual."""
    peers: int = 1
    """Tiles of rows that share the copies of a weight: thread blocks of a cluster. 1 with splits."""
    resident: int = 1
    """Thread blocks that fit on a multiprocessor, those of the next kernel included: 1 or 2."""

    def stages(self, num_inputs: int, head_dim: int = 0) -> int:
        """Stages of the pipeline. ``head_dim``: for kind ``qkv``."""
        room = _SHARED_BYTES // self.resident - (1024 if self.resident > 1 else 0) - self._fixed_bytes(head_dim)
        return min(room // ((self.rows + self.outputs) * _CHUNK * 2), num_inputs // _CHUNK // self.splits, 16)

    def shared_bytes(self, num_inputs: int, head_dim: int = 0) -> int:
        """Shared memory of a thread block."""
        stages = self.stages(num_inputs, head_dim)
        return self._fixed_bytes(head_dim) + stages * (self.rows + self.outputs) * _CHUNK * 2

    def _fixed_bytes(self, head_dim: int) -> int:
        """Other than stages: sums of other thread blocks, or angles of rotations."""
        angles = self.rows * (head_dim * 4 + 16) if head_dim else 0
        return _BARRIER_BYTES + angles + (self.rows * self.outputs * 4 if self.splits > 1 else 0)

    @property
    def registers(self) -> int:
        """Registers of a thread. Each quarter of a multiprocessor has 16,384 of them for its warps."""
        return {4: 128, 8: 96, 16: 96}[self.rows // 16] if self.resident > 1 or self.rows == 256 else 168

    @property
    def run(self) -> int:
        """Contiguous pairs of outputs of a thread."""
        return 2 if self.outputs // 8 // self.splits % 4 else 4


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of ``decode_product.cu``."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("weight", ctypes.c_uint64 * 16),
        *((name, ctypes.c_void_p) for name in ("squares", "residual", "norm", "out", "total", "squares_out")),
        *((name, ctypes.c_int) for name in ("rows", "num_outputs", "row_tiles", "num_parts")),
        ("eps", ctypes.c_float),
        ("kv_cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_stride", "kind_stride", "head_stride", "offset_stride")),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "cos_sin", "q_norm", "k_norm")),
        ("head_eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads")),
    )


def kernel_of(
    kind: Kind, tiling: ProductTiling, num_inputs: int, head_dim: int = 0, block_size: int = 0, max_parts: int = _MAX_PARTS
) -> CudaKernel:
    """The kernel of a tiling. ``head_dim``, ``block_size``: with kind ``qkv``."""
    warps, shared = tiling.rows // 16, tiling.shared_bytes(num_inputs, head_dim)
    macros = {
        "EPILOGUE": _KINDS.index(kind), "ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": num_inputs,
        "SPLITS": tiling.splits, "PEERS": tiling.peers, "STAGES": tiling.stages(num_inputs, head_dim), "PARTS": 0 if kind == "residual" else max_parts,
        "SHARED_BYTES": shared, "REGISTERS": tiling.registers,
    }  # fmt: skip
    if kind == "qkv":
        macros |= {"HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    return CudaKernel(
        "linear/decode_product.cu", "decode_product", tuple(macros.items()), tiling.splits * tiling.peers, (warps + 1) * 32, shared
    )


def tensor_map(pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """A ``CUtensorMap`` of bfloat16 in the 128-byte swizzle. All innermost first; ``strides``: bytes, without the
    innermost dimension."""
    buffer = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(buffer) + 63) // 64 * 64
    rank = len(sizes)
    driver_call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(address), _BFLOAT16, rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, _SWIZZLE_128, _PROMOTION_256, 0,
    )  # fmt: skip
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(address, 128))


@lru_cache(maxsize=4096)
def _weight_map(pointer: int, num_outputs: int, num_inputs: int, box_outputs: int, run: int) -> Any:
    """The weight ``[num_outputs, num_inputs]`` with its rows in the order of the kernel's outputs."""
    row = num_inputs * 2
    return tensor_map(
        pointer,
        (num_inputs, 2, 4, run, num_outputs // (8 * run)),
        (row, 2 * run * row, 2 * row, 8 * run * row),
        (_CHUNK, 2, 4, run, box_outputs // (8 * run)),
    )


def arguments_of(
    kind: Kind, tiling: ProductTiling, x: torch.Tensor, weight: torch.Tensor, deferred: DeferredRMSNorm | None
) -> _Arguments:
    """What all kinds have in common. ``x [n, in]``: rows begin at multiples of 16 bytes; ``weight``: contiguous."""
    num_rows, num_inputs = x.shape
    gated = kind == "gated"
    box = tiling.outputs // (2 if gated and tiling.peers == 1 else tiling.peers)
    return _Arguments(
        x=tensor_map(x.data_ptr(), (num_inputs, _readable_rows(x, tiling.rows)), (x.stride(0) * 2,), (_CHUNK, tiling.rows)),
        weight=_weight_map(weight.data_ptr(), len(weight), num_inputs, box, tiling.run),
        squares=None if deferred is None else deferred.squares.data_ptr(),
        num_parts=0 if deferred is None else len(deferred.squares),
        rows=num_rows, num_outputs=len(weight) // (2 if gated else 1), row_tiles=_row_tiles(tiling, num_rows),
        eps=0.0 if deferred is None else deferred.eps,
    )  # fmt: skip


def _row_tiles(tiling: ProductTiling, num_rows: int) -> int:
    return cdiv(num_rows, tiling.rows * tiling.peers) * tiling.peers


READS_PADDING = True


def _readable_rows(x: torch.Tensor, tile: int) -> int:
    """Rows of ``x`` and, up to a multiple of ``tile``, of what follows it in its storage: copies of rows that are there
    are faster than zeros for rows that are not."""
    room = x.untyped_storage().nbytes() // 2 - x.storage_offset() - x.shape[1]
    return min(cdiv(len(x), tile) * tile, room // x.stride(0) + 1) if READS_PADDING else len(x)


def _packed(arguments: _Arguments) -> bytes:
    """The kernel's parameter, which is aligned to 64 bytes."""
    return bytes(arguments) + bytes(-ctypes.sizeof(arguments) % 64)


def num_blocks(kind: Kind, tiling: ProductTiling, num_rows: int, weight_rows: int) -> int:
    """Thread blocks of a launch."""
    return _row_tiles(tiling, num_rows) * (weight_rows // tiling.outputs) * tiling.splits


def launch_product(
    kernel: LoadedKernel, tiling: ProductTiling, kind: Kind, output: torch.Tensor, weight: torch.Tensor, x: DeferredRMSNorm
) -> None:
    """Write the product of a deferred norm to ``output [n, out]``, contiguous."""
    arguments = arguments_of(kind, tiling, x.weighted, weight, x)
    arguments.out = output.data_ptr()
    kernel.launch(num_blocks(kind, tiling, len(output), len(weight)), _packed(arguments), dependent=True)


def launch_add_and_norm(
    kernel: LoadedKernel, tiling: ProductTiling, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor,
    norm: torch.Tensor, result: DeferredRMSNorm,
) -> None:  # fmt: skip
    """``residual [n, out] + x [n, in] @ weight.T`` with its deferred norm to ``result``."""
    arguments = arguments_of("residual", tiling, x, weight, None)
    arguments.residual, arguments.norm = residual.data_ptr(), norm.data_ptr()
    arguments.out, arguments.total = result.weighted.data_ptr(), result.total.data_ptr()
    arguments.squares_out = result.squares.data_ptr()
    kernel.launch(num_blocks("residual", tiling, len(x), len(weight)), _packed(arguments), dependent=True)


def launch_qkv(
    kernel: LoadedKernel, tiling: ProductTiling, x: DeferredRMSNorm, weight: torch.Tensor, kv_cache: torch.Tensor,
    metadata: AttentionMetadata, num_heads: int, rotary: RotaryInputs, query: torch.Tensor,
) -> None:  # fmt: skip
    """q, k and v of a deferred norm; then as `rope_and_cache_torch`. ``query``: ``[n, num_heads, head_dim]``."""
    arguments = arguments_of("qkv", tiling, x.weighted, weight, x)
    strides = kv_cache.stride()
    arguments.out, arguments.kv_cache = query.data_ptr(), kv_cache.data_ptr()
    arguments.block_stride, arguments.kind_stride, arguments.head_stride, arguments.offset_stride = strides[:4]
    arguments.slots, arguments.positions = metadata.slot_mapping.data_ptr(), metadata.positions.data_ptr()
    arguments.cos_sin = rotary.cos_sin.data_ptr()
    arguments.q_norm = None if rotary.q_norm is None else rotary.q_norm.data_ptr()
    arguments.k_norm = None if rotary.k_norm is None else rotary.k_norm.data_ptr()
    arguments.head_eps, arguments.num_heads, arguments.num_kv_heads = rotary.eps, num_heads, kv_cache.shape[2]
    kernel.launch(num_blocks("qkv", tiling, len(query), len(weight)), _packed(arguments), dependent=True)
