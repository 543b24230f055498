"""Parts of a checkpoint's tensors, and checksums of whole tensors that are summed from those of their parts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fleetfoot.records.weights import Rows, slices_of

RowSums = dict[tuple[int, int], dict[int, int]]
"""Bounds of columns -> row of the tensor -> the checksum of these columns, of 64 bits."""
_MASK = (1 << 64) - 1
_FACTORS = (-0x61C8864680B583EB, 0x2545F4914F6CDD1D, -0x4B47D0C5A1A62ECB)  # odd, with bits all over
_MAX_ELEMENTS = {"cpu": 1 << 17}
"""Elements that are processed at once, by devices: on a CPU as many as its caches hold, on a GPU 2**24."""


def part_of(tensor: torch.Tensor, part: tuple[Rows, ...]) -> torch.Tensor:
    """The part of a whole tensor that a `WeightSpec` holds: a view, or a copy if it has several slices of rows."""
    if not part:
        return tensor
    rows, *columns = part
    pieces = [tensor[(run, *columns)] for run in slices_of(rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def finite_problem(values: torch.Tensor, dtype: torch.dtype) -> str | None:
    """The first value that is NaN or infinite once it is stored in ``dtype``, and why; None: there is none."""
    is_bad = values.to(dtype).float().isfinite().logical_not_().flatten()
    if not is_bad.any():
        return None
    value = values.flatten()[is_bad.nonzero()[0]].item()
    where = "" if value != value or abs(value) == math.inf else f", which is infinite in {str(dtype)[6:]}"
    return f"has the value {value}{where}; check_finite refuses that"


def row_numbers(shape: tuple[int, ...], part: tuple[Rows, ...], device: torch.device) -> torch.Tensor:
    """``[rows of the part]`` int64: the number that each has in the whole tensor."""
    runs = slices_of(part[0]) if part else (slice(0, shape[0]),)
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def row_sums(values: torch.Tensor, shape: tuple[int, ...], part: tuple[Rows, ...] = ()) -> RowSums:
    """Checksums of the rows of a part of a tensor of ``shape``, with the elements ``values``.

    Each element contributes a hash of its index in the whole tensor and of its value as float32. So the sum over
    disjoint parts is the checksum of the whole, in any dtype that holds the values.
    """
    row_size = math.prod(shape[1:])
    columns = torch.arange(row_size, device=values.device)
    if len(part) > 1:
        columns = columns.view(shape[1:])[part[1:]].flatten()
    span = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
    rows = row_numbers(shape, part, values.device)
    matrix, sums = values.reshape(len(rows), -1), torch.empty_like(rows)
    step = max(1, _MAX_ELEMENTS.get(values.device.type, 1 << 24) // max(1, len(columns)))
    for begin in range(0, len(rows), step):
        some = slice(begin, begin + step)
        indices = rows[some, None] * row_size + columns  # [rows, columns]
        bits = matrix[some].float().view(torch.int32) if values.is_floating_point() else matrix[some]
        mixed = (bits.long() + _FACTORS[0]) * _FACTORS[1] + indices * _FACTORS[2]
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[0]
        sums[some] = (mixed ^ (mixed >> 32)).sum(dim=1)
    return {span: dict(zip(rows.tolist(), sums.tolist(), strict=True))}


def tensor_checksum(tensor: torch.Tensor) -> str:
    """The checksum of a checkpoint's tensor: 16 hex digits, as of `weight_checksums` of an engine with its values."""
    return join_checksums([{"": row_sums(tensor.detach(), tuple(tensor.shape))}])[""]


def join_checksums(ranks: Iterable[dict[str, RowSums]]) -> dict[str, str]:
    """Checksums of whole tensors, by name. Raises RuntimeError: ranks that hold the same row have different values."""
    joined: dict[str, RowSums] = {}
    for found in ranks:
        for name, spans in found.items():
            for span, sums in spans.items():
                known = joined.setdefault(name, {}).setdefault(span, {})
                if known and any(known.get(row, value) != value for row, value in sums.items()):
                    raise RuntimeError(f"ranks hold different values of {name}")
                known.update(sums)
    totals = {name: sum(sum(sums.values()) for sums in spans.values()) for name, spans in joined.items()}
    return {name: f"{total & _MASK:016x}" for name, total in totals.items()}
