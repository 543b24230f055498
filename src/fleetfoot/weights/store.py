"""Live weights: every tensor of the checkpoint that a rank holds, by its name, and updates of all of them or none.

An update is staged, which validates it against what this rank holds and changes nothing, and then committed. With
several ranks the engine commits only what every rank has staged (`fleetfoot.engine.live_weights`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fleetfoot.layers.context import WeightTree
from fleetfoot.records.weights import Rows, Span, Stack, WeightSpec, count_rows, slices_of
from fleetfoot.weights.checkpoint import DTYPES_OF_KINDS, REDUNDANT_SUFFIX, Checkpoint, same_rows, write_values
from fleetfoot.weights.checksums import RowSums, finite_problem, part_of, row_sums
from fleetfoot.weights.dummy import fill_dummy
from fleetfoot.weights.patches import PatchFacts, SparseWeightPatch, apply_patch
from fleetfoot.weights.transfer import (
    TransferGroup,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    open_handles,
)

DRAFTER = "drafter."
"""Before the names of a drafter's tensors."""
_BASE_PREFIX = "model."
_CHUNK_BYTES = 1 << 28
"""Bytes that a file of `WeightStore.save` has, and a tensor."""


@dataclass(slots=True)
class StageReport:
    """What a rank has found in an update."""

    unknown: set[str] = field(default_factory=set)
    """Names of tensors that it does not hold; other ranks may."""
    staged: dict[str, str] = field(default_factory=dict)
    """Names of tensors that it holds, as they were given, and as those of the model."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be applied; empty: it can be, if each tensor is held by a rank."""


_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Source(Protocol):
    """A tensor of an update."""

    shape: tuple[int, ...]
    kind: str
    """As of `WeightSpec`, or another dtype's name, which cannot be loaded."""

    def read(self, part: tuple[Rows, ...]) -> torch.Tensor: ...


class _Given:
    """A tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape = tuple(tensor.shape)
        is_plain = tensor.dtype in _PLAIN
        is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        self.kind = "float" if is_plain else "integer" if is_integer else str(tensor.dtype)
        if tensor.dtype is torch.float8_e4m3fn:
            self.kind = "fp8"

    def read(self, part: tuple[Rows, ...]) -> torch.Tensor:
        return part_of(self._tensor, part)


class _Stored:
    """A tensor of a file, which is open until the update is committed or discarded."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.read = partial(checkpoint.tensor, name)
        self.shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        self.kind = next((kind for kind, names in DTYPES_OF_KINDS.items() if dtype in names), dtype)


class _Piece:
    """The place of a tensor in a stack."""

    def __init__(self, source: _Source, index: tuple[slice, ...], shape: tuple[int, ...]) -> None:
        self._source, self.index, self.shape, self.kind = source, index, shape, source.kind

    def read(self, part: tuple[Rows, ...]) -> torch.Tensor:
        return part_of(self._source.read(self.index).reshape(self.shape), part)


class WeightStore:
    """The tensors of this rank's models, and the version of their values, which each committed update replaces."""

    def __init__(self, device: torch.device) -> None:
        self.version = 0
        self.num_changes = 0
        """Goes up before and after values change; the same on all ranks."""
        self._device = device
        self._trees: list[WeightTree] = []
        self._sources: list[tuple[WeightTree, str, Mapping[str, str]]] = []  # the arguments of `add`
        self._is_outdated = False
        self._specs: dict[str, list[WeightSpec]] = {}  # name in the checkpoint -> where this rank holds the tensor
        self._owned: set[str] = set()  # of these, names that are not copies of another rank's tensors
        self._names: dict[str, str] = {}  # accepted name -> name
        self._prefixes: dict[str, str] = {}  # name of a model's tensor -> what is before it in other names here
        self._stacks: dict[str, list[tuple[str, Stack]]] = {}  # name of a stack -> names of the tensors in it
        self._other: tuple[str, ...] = ()  # beginnings of names that are ignored
        self._staged: list[Callable[[], object]] = []
        self._group: TransferGroup | None = None
        self._announced: WeightTransferUpdateInfo | None = None
        self._found: dict[str, _Source] = {}  # names of staged tensors
        self._whole: set[str] = set()  # names of tensors of which all values are staged
        self._lost: set[str] = set()  # names of tensors that sleep has dropped, and that no update has replaced since
        self._checkpoint: Checkpoint | None = None

    def add(self, tree: WeightTree, prefix: str = "", copies: Mapping[str, str] | None = None) -> None:
        """Add a model. ``prefix``: before its names; ``copies``: its tensors that are copies of another model's, with
        the name of the original: they follow it."""
        self._sources.append((tree, prefix, copies or {}))
        self._trees.append(tree)
        self._other += tuple(prefix + name for name in tree.other_weights)
        self._read_specs(tree, prefix, copies or {})

    def _read_specs(self, tree: WeightTree, prefix: str, copies: Mapping[str, str]) -> None:
        for spec in tree.weight_specs():
            original = copies.get(spec.name)
            name = original or prefix + spec.name
            self._specs.setdefault(name, []).append(spec)
            self._prefixes.setdefault(spec.name, prefix)
            if original is None:
                self._owned.add(name)
                for stack in spec.stacks:
                    self._stacks.setdefault(prefix + stack.name, []).append((name, stack))
            for alias in [name] if original else [spec.name, *spec.aliases]:
                start = "" if original else prefix
                self._names.setdefault(start + alias, name)
                self._names.setdefault(start + alias.removeprefix(_BASE_PREFIX), name)

    def outdate(self) -> None:
        """Tensors have other places from now on: experts have moved between ranks."""
        self._is_outdated = True

    def _refresh(self) -> None:
        """Before places are used."""
        if self._is_outdated:
            self._is_outdated = False
            for known in (self._specs, self._owned, self._names, self._prefixes, self._stacks):
                known.clear()
            for source in self._sources:
                self._read_specs(*source)

    # --- staging ------------------------------------------------------------------------------------------------------

    def stage_tensors(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, check_finite: bool = False, keeps_parts: bool = False
    ) -> StageReport:
        """Stage whole tensors, by their names in the checkpoint. They must stay unchanged until the commit, unless
        ``keeps_parts``: then what this rank holds of them is copied."""
        self._refresh()
        report = StageReport()
        for name, tensor in tensors:
            self._stage(name, _Given(tensor), report, check_finite=check_finite, keeps_parts=keeps_parts)
        return report

    def stage_checkpoint(self, folder: str, *, check_finite: bool = False, only_lost: bool = False) -> StageReport:
        """Stage the files of a folder, which must have all tensors of the model, but none of a drafter. ``only_lost``:
        stage those of `lost_names` alone. Raises WeightError: they cannot be read."""
        self._refresh()
        report, needed = StageReport(), self._lost if only_lost else self._specs.keys()
        self._checkpoint = checkpoint = Checkpoint(Path(folder))
        for name in checkpoint.names():
            if not only_lost or self._names.get(name) in needed or name in self._stacks:
                self._stage(name, _Stored(checkpoint, name), report, check_finite=check_finite)
        report.problems += [
            f"{name} is missing: expected {list(self._specs[name][0].shape)}"
            for name in needed
            if name not in self._found and not name.startswith(DRAFTER)
        ]
        checkpoint.check()
        return report

    def stage_dummy(self, seed: int, *, only_lost: bool = False) -> StageReport:
        """Stage random weights, as of ``load_format="dummy"``; ``only_lost``: as of `stage_checkpoint`."""
        self._refresh()
        for name in self._lost if only_lost else self._specs:
            self._staged += [partial(fill_dummy, [spec], seed) for spec in self._specs[name]]
            self._whole.add(name)
        return StageReport()

    def stage_patches(self, patches: Sequence[SparseWeightPatch], *, check_finite: bool = False) -> StageReport:
        """Stage new values of single elements. Later patches of a tensor are applied after earlier ones."""
        self._refresh()
        report, facts = StageReport(), PatchFacts()
        for patch in patches:
            name = self._names.get(patch.name)
            if name is None:
                report.unknown.add(patch.name)
                continue
            if name in self._lost:
                report.problems.append(f"{name} was dropped by sleep; give reload_weights the whole tensor first")
            report.staged[patch.name] = name
            patch = patch.on(self._device)
            spec = self._specs[name][0]
            facts.add(patch, spec, check_finite=check_finite)
            self._staged += [partial(apply_patch, spec, patch) for spec in self._specs[name]]
        report.problems += facts.problems()
        return report

    # --- from a trainer -----------------------------------------------------------------------------------------------

    def connect(self, info: WeightTransferInitInfo, rank: int, backend: str) -> None:
        """Join a trainer's group with this ``rank``."""
        self._group = TransferGroup(info, rank, backend, self._device if backend == "nccl" else torch.device("cpu"))

    def stage_handles(self, info: WeightTransferUpdateInfo, *, check_finite: bool = False) -> StageReport:
        """Stage tensors in the memory of another process on the same GPU."""
        return self.stage_tensors(open_handles(info, self._device), check_finite=check_finite)

    def stage_announced(self, info: WeightTransferUpdateInfo) -> StageReport:
        """Stage tensors that the trainer will send: they are received, and written one by one, in the commit, or
        before, in `stage_received`."""
        self._refresh()
        report, self._announced = StageReport(), info
        for given, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            source = _Given(torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta"))
            name, places = self._names.get(given), list[tuple[WeightSpec, tuple[slice, ...]]]()
            named = self._pieces(given, source, report) if name is None else [(name, _Piece(source, (), source.shape))]
            for name, piece in named:
                specs = self._specs[name]
                if problem := self._misfit(given, piece, specs[0]):
                    report.problems.append(problem)
                elif name not in self._found:
                    places += [(spec, piece.index) for spec in specs]
                    self._found[name] = piece
                    self._whole.add(name)
                    report.staged[name if piece.index else given] = name
                    for spec in specs if piece.kind != specs[0].kind else ():
                        self._cover(spec, piece, report)
            self._staged.append(partial(self._receive, shape, getattr(torch, dtype), places))
        return report

    def stage_received(self, *, check_finite: bool = False) -> StageReport:
        """Receive the announced update, and keep what this rank holds of it."""
        info, group = self._announced, self._group
        assert info is not None and group is not None
        self.discard()
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        if info.num_updates_list is None:
            tensors = zip(info.names, map(group.receive, info.shapes, dtypes), strict=True)
            report = self.stage_tensors(tensors, check_finite=check_finite, keeps_parts=True)
        else:
            patches = [
                SparseWeightPatch(name, group.receive([count], torch.int64), group.receive([count], dtype))
                for name, count, dtype in zip(info.names, info.num_updates_list, dtypes, strict=True)
            ]
            report = self.stage_patches(patches, check_finite=check_finite)
        report.unknown.clear()  # they were announced before, and other ranks hold them
        return report

    def answer(self, refusal: str = "") -> None:
        """Tell the trainer whether the announced update is accepted."""
        if self._group is not None:
            self._group.answer(refusal)

    def _receive(
        self, shape: Sequence[int], dtype: torch.dtype, places: Sequence[tuple[WeightSpec, tuple[slice, ...]]]
    ) -> None:
        """Receive a tensor, and write its parts. ``places``: with the place in a stack, or none."""
        assert self._group is not None
        tensor = self._group.receive(shape, dtype)
        for spec, index in places:
            piece = _Piece(_Given(tensor), index, spec.shape if index else tuple(tensor.shape))
            if spec.takes("float") and spec.kind != "float" and tensor.dtype in _PLAIN:
                assert spec.quantize is not None
                spec.quantize(piece.read)
            else:
                write_values(spec, piece.read(spec.part))

    # --- checks -------------------------------------------------------------------------------------------------------

    def _stage(
        self, given: str, source: _Source, report: StageReport, *, check_finite: bool, keeps_parts: bool = False
    ) -> None:
        name = self._names.get(given)
        if name is None:
            for name, piece in self._pieces(given, source, report):
                self._stage(name, piece, report, check_finite=check_finite, keeps_parts=keeps_parts)
            return
        specs = self._specs[name]
        if problem := self._problem(given, source, specs, name, check_finite=check_finite):
            report.problems.append(problem)
        elif name not in self._found:
            self._found[name] = source
            self._whole.add(name)
            report.staged[given] = name
            for spec in specs:
                if source.kind != spec.kind:
                    assert spec.quantize is not None
                    read_part = partial(part_of, source.read(()).clone()) if keeps_parts else source.read
                    self._staged.append(partial(spec.quantize, read_part))
                    self._cover(spec, source, report)
                    continue
                values = source.read(spec.part).clone() if keeps_parts else None
                read = partial(source.read, spec.part) if values is None else partial(_same, values)
                self._staged.append(partial(_copy, spec, read))

    def _cover(self, spec: WeightSpec, source: _Source, report: StageReport) -> None:
        """The scales of a tensor that is quantized are replaced with it."""
        prefix = self._prefixes[spec.name]
        for name in (prefix + scales for scales in spec.scales):
            self._found.setdefault(name, source)
            self._whole.add(name)
            report.staged[name] = name

    def _problem(
        self, given: str, source: _Source, specs: list[WeightSpec], name: str, *, check_finite: bool
    ) -> str | None:
        spec = specs[0]
        if problem := self._misfit(given, source, spec):
            return problem
        if name in self._found and not same_rows(self._found[name].read(spec.part), source.read(spec.part)):
            return f"{given} differs from another tensor of the update that has the same place, {name}"
        if check_finite and spec.kind != "integer":
            for each in specs:
                dtype = each.stored_dtype if source.kind == each.kind else torch.float32
                if problem := finite_problem(source.read(each.part), dtype):
                    return f"{given} {problem}"
        return None

    def _pieces(self, given: str, source: _Source, report: StageReport) -> Iterator[tuple[str, _Piece]]:
        """The tensors in a stack, with their names; none, and a report: there is no such stack, or it does not fit."""
        stacks = self._stacks.get(given, ())
        if not stacks:
            self._report_unknown(given, report)
        elif source.shape != stacks[0][1].shape:
            report.problems.append(f"{given} has shape {list(source.shape)}, expected {list(stacks[0][1].shape)}")
        else:
            report.staged[given] = stacks[0][0]
            for name, stack in stacks:
                yield name, _Piece(source, stack.index, self._specs[name][0].shape)

    def _report_unknown(self, given: str, report: StageReport) -> None:
        if not given.endswith(REDUNDANT_SUFFIX) and not given.startswith(self._other):
            report.unknown.add(given)

    @staticmethod
    def _misfit(given: str, source: _Source, spec: WeightSpec) -> str | None:
        if not spec.has_shape(source.shape):
            return f"{given} has shape {list(source.shape)}, expected {list(spec.shape)}"
        if not spec.takes(source.kind):
            return f"{given} has values of dtype {source.kind}, expected {spec.kind}"
        return None

    # --- committing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """Write everything that is staged, in place: addresses stay. No step runs meanwhile. An exception leaves the
        weights undefined."""
        self.num_changes += 1
        for write in self._staged:
            write()
        if self._checkpoint is not None:
            self._checkpoint.check()
        for tree in self._trees:
            tree.process_weights_after_loading()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the sources may be changed from now on
        self.version = version
        self.num_changes += 1
        self._lost -= self._whole
        self.discard()

    def discard(self) -> None:
        """Forget what is staged."""
        self._staged, self._found, self._whole, self._announced = [], {}, set(), None
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None

    # --- sleep --------------------------------------------------------------------------------------------------------

    def stored(self) -> list[Span]:
        """The memory of all tensors."""
        return [span for tree in self._trees for span in tree.stored_weights()]

    def mark_lost(self) -> None:
        """The memory of all tensors has been dropped."""
        self._refresh()
        self.num_changes += 1
        self._lost = set(self._specs)

    def mark_drafter_reloaded(self) -> bool:
        """A drafter reads its own tensors. Returns whether some were lost."""
        found = {name for name in self._lost if name.startswith(DRAFTER)}
        self._lost -= found
        return bool(found)

    def names(self) -> set[str]:
        """Those of all tensors that this rank holds, without copies of another rank's."""
        self._refresh()
        return self._owned

    def lost_names(self) -> set[str]:
        """Names of the tensors that were dropped and have no values yet."""
        return self._lost

    # --- files --------------------------------------------------------------------------------------------------------

    def num_bytes(self, names: Iterable[str]) -> int:
        """Bytes of what this rank holds of some tensors."""
        self._refresh()
        return sum(
            _part_size(spec) * spec.stored_dtype.itemsize for name in names for spec in self._specs.get(name, [])
        )

    @torch.no_grad()
    def save(self, prefix: Path, names: Iterable[str]) -> str:
        """Write what this rank holds of some tensors to files with names that begin with ``prefix``. Returns why that
        has failed; empty: it has not."""
        self._refresh()
        chunk: dict[str, torch.Tensor] = {}
        parts: dict[str, str] = {}
        count = 0

        def write() -> None:
            nonlocal count
            save_file(chunk, f"{prefix}-{count}.safetensors", metadata=parts)
            chunk.clear()
            parts.clear()
            count += 1
            for tree in self._trees:
                tree.process_weights_after_loading()  # opened destinations are packed again

        try:
            for name in names:
                for index, spec in enumerate(self._specs.get(name, [])):
                    chunk[key := f"{index} {name}"] = spec.destination().detach().to("cpu", copy=True).contiguous()
                    parts[key] = json.dumps(_bounds(spec.part))
                if sum(tensor.nbytes for tensor in chunk.values()) > _CHUNK_BYTES:
                    write()
            write()
        except (OSError, SafetensorError) as error:
            return f"{prefix}: {error}"
        return ""

    def stage_saved(self, prefix: Path, names: Sequence[str]) -> StageReport:
        """Stage tensors that `save` has written on all ranks, of which this one holds other experts if they have moved
        since."""
        self._refresh()
        report, wanted = StageReport(), set(names)
        saved: dict[str, list[_Saved]] = {}
        own = prefix.parent.glob(f"{prefix.name}-*.safetensors")
        for path in dict.fromkeys([*sorted(own), *sorted(prefix.parent.glob("*-*.safetensors"))]):
            with safe_open(path, framework="pt", device="cpu") as file:
                parts = file.metadata()
            for key, part in parts.items():
                name = key.partition(" ")[2]
                if name in wanted and name in self._specs:
                    saved.setdefault(name, []).append(_Saved(path, key, json.loads(part)))
        for name, pieces in saved.items():
            self._staged += [partial(_copy, spec, partial(_read_saved, spec, pieces)) for spec in self._specs[name]]
            self._whole.add(name)
            report.staged[name] = name
        return report

    # --- inspection ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def checksums(self, names: Iterable[str] | None = None) -> dict[str, RowSums]:
        """The checksums, for each tensor in ``names``, or all, of the rows that this rank holds. Names of tensors that
        it does not have are left out."""
        self._refresh()
        found: dict[str, RowSums] = {}
        for given in sorted(self._owned) if names is None else names:
            if (name := self._names.get(given)) in self._owned:
                spec = self._specs[name][0]
                found[given] = row_sums(spec.destination(), spec.shape, spec.part)
        for tree in self._trees:
            tree.process_weights_after_loading()  # opened destinations are packed again
        return found


def _copy(spec: WeightSpec, read: Callable[[], torch.Tensor]) -> None:
    write_values(spec, read())


class _Saved(NamedTuple):
    """What a rank has held of a tensor, in a file."""

    path: Path
    key: str
    part: list[Any]
    """`_bounds` of it."""

    def read(self) -> torch.Tensor:
        with safe_open(self.path, framework="pt", device="cpu") as file:
            return file.get_tensor(self.key)


def _bounds(part: tuple[Rows, ...]) -> list[Any]:
    """A part of a tensor for JSON: the runs of rows, and then the bounds of each further dimension."""
    if not part:
        return []
    rows, *columns = part
    return [
        [[run.start, run.stop] for run in slices_of(rows)],
        *([run.start, run.stop] for each in columns for run in slices_of(each)),
    ]


def _read_saved(spec: WeightSpec, pieces: Sequence[_Saved]) -> torch.Tensor:
    """The values of a spec: those of the same part, or row by row from others with the same columns."""
    wanted = _bounds(spec.part)
    for piece in pieces:
        if piece.part == wanted:
            return piece.read()
    rows: dict[int, torch.Tensor] = {}
    for piece in pieces:
        if piece.part[1:] == wanted[1:]:
            numbers = [number for begin, end in piece.part[0] for number in range(begin, end)]
            rows |= zip(numbers, piece.read(), strict=True)
    return torch.stack([rows[number] for begin, end in wanted[0] for number in range(begin, end)])


def _part_size(spec: WeightSpec) -> int:
    if not spec.part:
        return math.prod(spec.shape)
    rows, *columns = spec.part
    sizes = [each.stop - each.start for part in columns for each in slices_of(part)]
    return count_rows(rows) * math.prod(sizes or spec.shape[1:])


def _same(values: torch.Tensor) -> torch.Tensor:
    return values
