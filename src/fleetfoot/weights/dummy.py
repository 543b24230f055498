"""Random weights, for runs that depend on shapes and speed only."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch

from fleetfoot.records.weights import WeightSpec, slices_of

_STD = 0.02  # the usual initialization of these models
FP8_STD = 32.0
"""Standard deviation of values in FP8, before their scale."""
# A CPU generates some hundred million values per second, and a model has billions, so the values repeat with a period.
# It is prime, so that no two rows of a matrix are equal.
_CPU_PERIOD, _GPU_PERIOD = 1048573, 16777213
_MAX_COPIED = 1 << 24  # values that are generated at once to copy some columns


def fill_dummy(specs: Iterable[WeightSpec], seed: int) -> None:
    """Fill weights with normally distributed values, integers with any ones, and what has an ``init`` of its own, as
    norms and scales have, with that, on their device. The values of a tensor depend on the seed, its name, shape, dtype
    and device type only, so each part of a sharded model holds the same weights as the whole model."""
    for spec in specs:
        destination = spec.destination()
        if callable(spec.init):
            spec.init(destination)
        elif spec.init != "normal":
            destination.fill_({"ones": 1.0, "zeros": 0.0}.get(spec.init, spec.init))  # type: ignore[arg-type]
        elif destination.numel() > 0:
            _fill_part(destination, spec, _drawn(spec, destination, seed))
        spec.filled()


def _drawn(spec: WeightSpec, like: torch.Tensor, seed: int) -> torch.Tensor:
    """One period of the values of the whole tensor, flat."""
    generator = torch.Generator(like.device)
    generator.manual_seed(zlib.crc32(spec.name.encode(), seed & 0xFFFFFFFF))
    period = _CPU_PERIOD if like.device.type == "cpu" else _GPU_PERIOD
    size = min(math.prod(spec.shape), period)
    if spec.kind == "fp8":
        return torch.empty(size, device=like.device).normal_(0.0, FP8_STD, generator=generator).to(like.dtype)
    drawn = torch.empty(size, dtype=like.dtype, device=like.device)
    if spec.kind == "integer":
        info = torch.iinfo(like.dtype)
        return drawn.random_(info.min, info.max, generator=generator)
    return drawn.normal_(0.0, _STD, generator=generator)


def _fill_part(destination: torch.Tensor, spec: WeightSpec, drawn: torch.Tensor) -> None:
    """Write the spec's part of the tensor with the flat values ``drawn``, repeated."""
    begin = 0
    for rows in slices_of(spec.part[0]) if spec.part else (slice(0, spec.shape[0]),):
        end = begin + rows.stop - rows.start
        _fill_rows(destination[begin:end], spec, rows, drawn)
        begin = end


def _fill_rows(destination: torch.Tensor, spec: WeightSpec, rows: slice, drawn: torch.Tensor) -> None:
    row_size = math.prod(spec.shape[1:])
    whole = tuple(slice(0, size) for size in spec.shape[1:])
    has_all_columns = len(spec.part) < 2 or spec.part[1:] == whole
    if has_all_columns and destination.is_contiguous():
        _repeat(destination.view(-1), drawn, rows.start * row_size)
        return
    columns = () if has_all_columns else spec.part[1:]
    step = max(1, _MAX_COPIED // row_size)
    for row in range(rows.start, rows.stop, step):
        some = min(step, rows.stop - row)
        values = torch.empty((some, row_size), dtype=drawn.dtype, device=drawn.device)
        _repeat(values.view(-1), drawn, row * row_size)
        begin = row - rows.start
        destination[begin : begin + some].copy_(values.view(some, *spec.shape[1:])[(slice(None), *columns)])


def _repeat(flat: torch.Tensor, drawn: torch.Tensor, first: int) -> None:
    """Write values ``first``, ``first + 1``, ... of ``drawn``, repeated, to ``flat``."""
    first %= len(drawn)
    begin = drawn[first : first + len(flat)]
    flat[: len(begin)].copy_(begin)
    for part in flat[len(begin) :].split(len(drawn)):
        part.copy_(drawn[: len(part)])
