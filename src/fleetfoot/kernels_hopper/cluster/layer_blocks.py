"""Shapes, tilings and arguments of ``attention_block.cu`` and ``mlp_block.cu``: a decoder layer for a few rows in two
kernels of thread-block clusters (Hopper)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import LayerParts
    from fleetfoot.records.forward_context import AttentionMetadata

FOLDER = Path(__file__).parent
"""Each kernel is a file of its name."""
ATTENTION_BLOCK, MLP_BLOCK = "attention_block", "mlp_block"
_SM_BYTES, _RESERVED_BYTES = 233472, 1024
"""Shared memory of a multiprocessor of Hopper, and what a thread block takes beside its own."""
_MLP_BYTES = 117760
"""Shared memory of a block of the MLP kernel: two of them do not fit on a multiprocessor, but one beside one of
attention."""
_MIN_STAGES, _MAX_STAGES = 2, 32
_MAX_SLOT_BYTES = 16384
_GROUP = 32
"""Inputs that a warp multiplies at once."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The layers that share a kernel."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int
    """Positions of a KV block."""


@dataclass(frozen=True, slots=True)
class LayerTiling:
    """Compile-time constants of the kernels, next to the shape."""

    rows: int
    """Maximum rows of a step: 1, 2, 4 or 8."""
    clusters: int = 16
    """Clusters of the attention kernel."""
    mlp_clusters: int = 14
    """Clusters of the MLP kernel. On an H200, 15 clusters of 8 have multiprocessors of their own. 14 leave 8 free ones
    to two more clusters of attention, so that all blocks of both kernels are resident at once."""
    ctas: int = 8
    """Thread blocks of a cluster."""
    warps: int = 4
    """Warps that compute; one more copies weights."""
    slot_bytes: int = _MAX_SLOT_BYTES
    """Weights in a stage of the ring, at most."""
    attention_bytes: int = _SM_BYTES - _MLP_BYTES - 2 * _RESERVED_BYTES
    """Shared memory of a block."""
    mlp_bytes: int = _MLP_BYTES
    attention_registers: int = 168
    """Registers of a thread: two blocks of 5 warps fit on a multiprocessor, each quarter of which may have 3 of the
    warps."""
    mlp_registers: int = 128

    @property
    def threads(self) -> int:
        return (self.warps + 1) * 32


def misfit(shape: LayerShape, tiling: LayerTiling) -> str | None:
    """Why the kernels cannot compute layers of this shape; None: they can."""
    clusters, ctas = tiling.clusters, tiling.ctas
    group = shape.num_heads // shape.num_kv_heads
    cluster_heads = shape.num_heads // clusters
    checks = {
        f"head_dim {shape.head_dim} is not 64 or 128": shape.head_dim in (64, 128),
        f"{shape.num_heads} heads are not a multiple of {clusters}": shape.num_heads % clusters == 0,
        f"{shape.num_heads} heads with {shape.num_kv_heads} KV heads: a cluster would need several KV heads": (
            shape.num_heads % shape.num_kv_heads == 0 and cluster_heads > 0 and group % cluster_heads == 0
        ),
        f"{(cluster_heads + 2) * shape.head_dim} outputs of a cluster are not a multiple of {16 * ctas}": (
            (cluster_heads + 2) * shape.head_dim % (16 * ctas) == 0
        ),
        f"hidden size {shape.hidden} is not a multiple of {64 * ctas}": shape.hidden % (64 * ctas) == 0,
        f"hidden size {shape.hidden} is not a multiple of {32 * tiling.warps}": shape.hidden % (32 * tiling.warps) == 0,
        f"intermediate size {shape.intermediate} is not a multiple of {_GROUP}": shape.intermediate % _GROUP == 0,
        f"intermediate size {shape.intermediate} is below {_GROUP * tiling.mlp_clusters}": (
            shape.intermediate >= _GROUP * tiling.mlp_clusters
        ),
        f"KV blocks of {shape.block_size} positions are not a multiple of 16": shape.block_size % 16 == 0,
    }
    for reason, fits in checks.items():
        if not fits:
            return reason
    plan = _Plan(shape, tiling)
    if min(plan.stages) < _MIN_STAGES:
        return f"{tiling.rows} rows of {shape.hidden} leave no shared memory for weights"
    return None


class _Plan:
    """Sizes that follow from a shape and a tiling. Shared memory is laid out by the kernel's source, which compares its
    size with `fixed_bytes`."""

    def __init__(self, shape: LayerShape, tiling: LayerTiling) -> None:
        rows, ctas, warps = tiling.rows, tiling.ctas, tiling.warps
        heads = shape.num_heads // tiling.clusters
        attended, block_hidden = heads * shape.head_dim, shape.hidden // ctas
        attended_groups, all_groups = attended // _GROUP, shape.intermediate // _GROUP
        groups = cdiv(all_groups, tiling.mlp_clusters)  # of a cluster, at most
        self.in_columns = _in_columns(shape.hidden, _GROUP * warps, tiling.slot_bytes)
        self.o = _out_stage(attended_groups, block_hidden, warps, tiling.slot_bytes)
        fewest = all_groups // tiling.mlp_clusters
        self.down = _out_stage(groups, block_hidden, warps, tiling.slot_bytes, fewest)
        in_bytes = 16 * self.in_columns * 2
        outs = (_out_bytes(*self.o, attended_groups, warps), _out_bytes(*self.down, groups, warps))
        activated = _out_groups(*self.down, groups, warps)[1] * _GROUP
        self.slot_bytes = [cdiv(max(in_bytes, each) + 64, 128) * 128 for each in outs]

        squares = ctas * cdiv(block_hidden, 64)
        splits = warps * heads * (shape.head_dim + 4) * 4
        shared = 1024 + rows * squares * 4 + block_hidden * 2 + max(rows * _pitch(shape.hidden), splits) + 512
        qkv_size = (heads + 2) * shape.head_dim
        tiles = qkv_size // ctas // 16, cdiv(groups * 4, ctas)
        block_rows, row_blocks = max(1, rows // ctas), max(1, ctas // rows)
        attention = tiles[0] * 16 * warps * rows * 4 + block_rows * (qkv_size * 2 + shape.head_dim * 4)
        attention += 4 * shape.head_dim + rows * row_blocks * heads * (shape.head_dim + 2) * 4 + rows * _pitch(attended)
        mlp = tiles[1] * 16 * warps * rows * 4 + rows * _pitch(activated)
        self.fixed_bytes = [cdiv(shared + each, 128) * 128 + 512 for each in (attention, mlp)]
        self.stages = []
        limits = tiling.attention_bytes, tiling.mlp_bytes
        for i, (out_tiles, chunks) in enumerate((self.o, self.down)):
            room = (limits[i] - self.fixed_bytes[i]) // self.slot_bytes[i]
            most = tiles[i] * (shape.hidden // self.in_columns) + block_hidden // (16 * out_tiles) * chunks
            self.stages.append(min(room, most, _MAX_STAGES))


def _pitch(columns: int) -> int:
    return columns * 2 + (0 if columns % 64 else 64)


def _in_columns(hidden: int, unit: int, slot_bytes: int) -> int:
    """Columns of 16 rows in a slot, a multiple of ``unit``."""
    return max(
        size
        for size in range(unit, hidden + 1, unit)
        if hidden % size == 0 and (size * 32 <= slot_bytes or size == unit)
    )


def _out_groups(tiles: int, chunks: int, groups: int, warps: int) -> tuple[int, int]:
    """Groups of a chunk, and of all with those that pad: see ``OutGroups`` of the source."""
    splits = warps // tiles
    per_warp = cdiv(cdiv(groups, chunks), splits)
    return groups if chunks == 1 else per_warp * splits, chunks * per_warp * splits


def _out_bytes(tiles: int, chunks: int, groups: int, warps: int) -> int:
    return tiles * 16 * _out_groups(tiles, chunks, groups, warps)[0] * _GROUP * 2


def _out_stage(groups: int, outputs: int, warps: int, slot_bytes: int, fewest: int | None = None) -> tuple[int, int]:
    """Tiles of 16 rows in a stage of the second product, and chunks in which the groups of its inputs come: as many
    bytes as fit, or a little more, in rows as long as possible. ``fewest``: groups of a cluster, to which zeros may be
    added; None: all have ``groups``, and none may be added."""
    stages = [
        (tiles, chunks)
        for tiles in (1, 2, 4, 8)
        if tiles <= warps and outputs % (16 * tiles) == 0
        for chunks in range(1, groups + 1)
        if (fewest or groups) > (chunks - 1) * _out_groups(tiles, chunks, groups, warps)[0]
        and (fewest is not None or _out_groups(tiles, chunks, groups, warps)[1] == groups)
        and _out_bytes(tiles, chunks, groups, warps) <= slot_bytes * 5 // 4
    ]
    return max(stages, key=lambda stage: _out_bytes(*stage, groups, warps) * (1.0 - 0.15 * (stage[1] - 1)))


def defines(shape: LayerShape, tiling: LayerTiling) -> tuple[tuple[str, int], ...]:
    """The macros of the source."""
    plan = _Plan(shape, tiling)
    return tuple(
        {
            "HIDDEN": shape.hidden, "HEADS": shape.num_heads, "KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim, "INTERMEDIATE": shape.intermediate, "BLOCK_SIZE": shape.block_size,
            "ROWS": tiling.rows, "CLUSTERS": tiling.clusters, "MLP_CLUSTERS": tiling.mlp_clusters,
            "CTAS": tiling.ctas, "WARPS": tiling.warps, "ATTENTION_REGISTERS": tiling.attention_registers,
            "MLP_REGISTERS": tiling.mlp_registers,
            "IN_COLUMNS": plan.in_columns, "O_TILES": plan.o[0], "O_CHUNKS": plan.o[1],
            "DOWN_TILES": plan.down[0], "DOWN_CHUNKS": plan.down[1],
            "ATTENTION_SLOT_BYTES": plan.slot_bytes[0], "MLP_SLOT_BYTES": plan.slot_bytes[1],
            "ATTENTION_STAGES": plan.stages[0], "MLP_STAGES": plan.stages[1],
            "ATTENTION_FIXED_BYTES": plan.fixed_bytes[0], "MLP_FIXED_BYTES": plan.fixed_bytes[1],
        }.items()
    )  # fmt: skip


def shared_bytes(tiling: LayerTiling) -> tuple[int, int]:
    """Shared memory of a block of both kernels: what they may have, also if they need less. The GPU would place two
    small blocks of a kernel on one multiprocessor and leave others empty (80 of 132 were used)."""
    return tiling.attention_bytes, tiling.mlp_bytes


def _struct_fields(text: str) -> list[tuple[str, type]]:
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
    return [(name, kinds[kind]) for kind, name in (word.split(":") for word in text.split())]


class Arguments(ctypes.Structure):
    """``struct Arguments`` of ``layer_block.cuh``."""

    _fields_ = _struct_fields(
        "p:partials p:residual p:residual_out p:partials_out p:norm p:weight_in p:weight_out i:rows d:eps "
        "p:kv_cache i:block_stride i:value_stride i:head_stride p:seq_lens p:block_tables "
        "i:table_stride p:slots p:cos_sin p:q_norm p:k_norm d:head_eps d:scale_log2"
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights ``[outputs, inputs]`` of a layer, contiguous bfloat16."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class StepBuffers:
    """What a step's kernels exchange. A kernel reads one pair of the residual and the partial sums and writes the
    other: all its blocks read what it writes last."""

    def __init__(self, rows: int, hidden: int, tiling: LayerTiling, device: torch.device) -> None:
        import torch

        self.residuals = [torch.empty((rows, hidden), dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.partials = [
            torch.empty((clusters, rows, hidden), dtype=torch.float32, device=device)
            for clusters in (tiling.clusters, tiling.mlp_clusters)
        ]


def layer_arguments(
    parts: LayerParts,
    weights: LayerWeights,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    buffers: StepBuffers,
    first_input: torch.Tensor | None,
) -> tuple[Arguments, Arguments]:
    """Arguments of the two kernels of a layer. ``first_input``: the residual stream ``[rows, hidden]``, contiguous, for
    the first layer of a chain; later ones read the buffers. After the second kernel the residual is
    ``buffers.residuals[1]``, and the sum to be added to it ``buffers.partials[1]``."""
    rotary, (even, odd), (even_sums, odd_sums) = parts.rotary, buffers.residuals, buffers.partials
    rows = len(even)
    block_stride, value_stride, head_stride = kv_cache.stride()[:3]
    attention = Arguments(
        partials=None if first_input is not None else odd_sums.data_ptr(),
        residual=(odd if first_input is None else first_input).data_ptr(),
        residual_out=even.data_ptr(), partials_out=even_sums.data_ptr(),
        norm=parts.input_norm.data_ptr(), weight_in=weights.qkv.data_ptr(), weight_out=weights.o.data_ptr(),
        rows=rows, eps=parts.eps,
        kv_cache=kv_cache.data_ptr(), block_stride=block_stride, value_stride=value_stride, head_stride=head_stride,
        seq_lens=metadata.seq_lens.data_ptr(), block_tables=metadata.block_tables.data_ptr(),
        table_stride=metadata.block_tables.stride(0), slots=metadata.slot_mapping.data_ptr(),
        cos_sin=rotary.cos_sin.data_ptr(), q_norm=_pointer(rotary.q_norm), k_norm=_pointer(rotary.k_norm),
        head_eps=rotary.eps, scale_log2=parts.scale * math.log2(math.e),
    )  # fmt: skip
    mlp = Arguments(
        partials=even_sums.data_ptr(), residual=even.data_ptr(), residual_out=odd.data_ptr(),
        partials_out=odd_sums.data_ptr(), norm=parts.mlp_norm.data_ptr(), weight_in=weights.gate_up.data_ptr(),
        weight_out=weights.down.data_ptr(), rows=rows, eps=parts.eps,
    )  # fmt: skip
    return attention, mlp


def rows_of(num_rows: int) -> int:
    """The number of rows of the kernel for a step of ``num_rows``."""
    return next_power_of_2(num_rows)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
