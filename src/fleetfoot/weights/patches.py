"""Sparse updates: new values of single elements of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fleetfoot.records.weights import WeightError, WeightSpec, slices_of
from fleetfoot.utils.validation import FieldTypeError, shown, unknown_keyword
from fleetfoot.weights.checksums import finite_problem, row_numbers


def _tensor(place: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise FieldTypeError(place, f"is {shown(given)}; it must be a list of numbers", given) from None


@dataclass(frozen=True, slots=True)
class SparseWeightPatch:
    """New values of some elements of a tensor."""

    name: str
    """The name of the tensor in the checkpoint."""
    indices: Any
    """``[n]`` integers: positions in the flat tensor of the checkpoint, each once."""
    values: Any
    """``[n]``"""
    shape: tuple[int, ...] | None = None
    """The shape of the checkpoint's tensor, to be compared."""

    @classmethod
    def parse(cls, given: Any, index: int) -> SparseWeightPatch:
        """A patch, or a dictionary with its fields. Raises WeightError or TypeError, with its ``index`` in a list."""
        place, names = f"patches[{index}]", [item.name for item in fields(cls)]
        if isinstance(given, Mapping):
            if missing := [name for name in names[:3] if name not in given]:
                raise WeightError(f"{place} has no {' and no '.join(missing)}; a patch has {', '.join(names)}")
            for name in given:
                if name not in names:
                    raise unknown_keyword(place, name, names)
            given = cls(**given)
        if not isinstance(given, cls):
            raise FieldTypeError(place, f"is {shown(given)}; it must be a dictionary with {', '.join(names)}", given)
        if not isinstance(given.name, str):
            raise FieldTypeError(f"{place}.name", f"is {shown(given.name)}; it must be a string", given.name)
        indices = _tensor(f"{place}.indices", given.indices)
        values = _tensor(f"{place}.values", given.values).detach()
        if given.shape is not None and not isinstance(given.shape, Sequence):
            raise FieldTypeError(f"{place}.shape", f"is {shown(given.shape)}; it must be a list of sizes", given.shape)
        place = f"{place} ({given.name})"
        if not indices.numel():
            indices = indices.long()
        if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
            raise WeightError(f"{place}: indices have dtype {indices.dtype}, expected integers")
        if indices.dim() != 1 or values.shape != indices.shape:
            shapes = f"{list(indices.shape)} and values {list(values.shape)}"
            raise WeightError(f"{place}: indices have shape {shapes}, expected one dimension, the same for both")
        return cls(given.name, indices, values, None if given.shape is None else tuple(given.shape))

    def on(self, device: torch.device) -> SparseWeightPatch:
        """The same, with its tensors on a device."""
        return replace(self, indices=self.indices.to(device), values=self.values.to(device))


def merged(name: str, patches: Sequence[SparseWeightPatch]) -> SparseWeightPatch:
    """One patch, on the host, with the effect of several of a tensor, one after the other."""
    indices = torch.cat([patch.indices.to("cpu", torch.int64) for patch in patches])
    dtype = patches[0].values.dtype
    for patch in patches[1:]:
        dtype = torch.promote_types(dtype, patch.values.dtype)
    values = torch.cat([patch.values.to("cpu", dtype) for patch in patches])
    indices, order = indices.sort(stable=True)
    is_last = torch.ones_like(indices, dtype=torch.bool)
    is_last[:-1] = indices[1:] != indices[:-1]
    return SparseWeightPatch(name, indices[is_last], values[order][is_last])


class PatchFacts:
    """Checks patches; values on a device are read once for all of them."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._patches: list[tuple[SparseWeightPatch, WeightSpec]] = []
        self._facts: list[torch.Tensor] = []

    def add(self, patch: SparseWeightPatch, spec: WeightSpec, *, check_finite: bool) -> None:
        """Check a patch of a tensor."""
        indices, values = patch.indices, patch.values
        is_float = values.is_floating_point()
        is_requantized = _is_requantized(spec, values)
        if patch.shape is not None and patch.shape != spec.shape:
            self._problems.append(f"{patch.name} has shape {list(spec.shape)}, and the patch is of {list(patch.shape)}")
        elif values.numel() and (
            (is_float == (spec.kind == "integer") and not is_requantized)
            or ((spec.kind == "fp8") != (values.dtype is torch.float8_e4m3fn) and not is_requantized)
            or values.is_complex()
            or values.dtype is torch.bool
        ):
            self._problems.append(f"{patch.name} has values of dtype {values.dtype}, expected {spec.kind}")
        elif values.numel():
            is_sorted = (indices[1:] > indices[:-1]).all()
            is_checked = check_finite and is_float
            is_finite = torch.ones_like(is_sorted)
            if is_checked:
                is_finite = values.to(torch.float32 if is_requantized else spec.stored_dtype).float().isfinite().all()
            self._facts.append(torch.stack([*indices.long().aminmax(), is_sorted.long(), is_finite.long()]))
            self._patches.append((patch, spec))

    def problems(self) -> list[str]:
        """Why the patches cannot be applied."""
        facts: Sequence[list[int]] = torch.stack(self._facts).tolist() if self._facts else []
        for (patch, spec), (smallest, largest, is_sorted, is_finite) in zip(self._patches, facts, strict=True):
            size = torch.Size(spec.shape).numel()
            if smallest < 0 or largest >= size:
                wrong = smallest if smallest < 0 else largest
                self._problems.append(f"{patch.name}: index {wrong} is out of range; the tensor has {size} elements")
            elif not is_sorted:
                ordered = patch.indices.sort().values
                if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
                    self._problems.append(f"{patch.name}: index {int(twice[0])} occurs more than once")
            elif spec.patch_problem is not None and (why := spec.patch_problem(patch.indices.long(), patch.values)):
                self._problems.append(f"{patch.name} {why}")
            if not is_finite:
                self._problems.append(f"{patch.name} {finite_problem(patch.values, spec.stored_dtype)}")
        return self._problems


def _is_requantized(spec: WeightSpec, values: torch.Tensor) -> bool:
    is_plain = values.is_floating_point() and values.dtype is not torch.float8_e4m3fn
    return is_plain and spec.kind != "float" and spec.patch is not None


def apply_patch(spec: WeightSpec, patch: SparseWeightPatch) -> None:
    """Write the patch's elements that the place of ``spec`` holds."""
    if _is_requantized(spec, patch.values):
        assert spec.patch is not None
        spec.patch(patch.indices.long(), patch.values)
        return
    destination = spec.destination()
    indices, values = patch.indices.long(), patch.values.to(destination.dtype)
    places = list(torch.unravel_index(indices, spec.shape))
    if spec.part:
        stored = row_numbers(spec.shape, spec.part, indices.device)
        stored_at = torch.full(
            (spec.shape[0],), -1, device=indices.device
        )  # row of the whole tensor -> row stored here
        stored_at[stored] = torch.arange(len(stored), device=indices.device)
        places[0] = stored_at[places[0]]
        held = places[0] >= 0
        for dim, span in enumerate(spec.part[1:], start=1):
            (run,) = slices_of(span)
            held &= (places[dim] >= run.start) & (places[dim] < run.stop)
            places[dim] = places[dim] - run.start
        places, values = [place[held] for place in places], values[held]
    destination[tuple(places)] = values
