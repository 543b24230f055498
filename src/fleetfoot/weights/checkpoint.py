"""The safetensors files of a checkpoint folder, and loading them tensor by tensor into a model's final memory.

Only the tensors in the specs are read: a rank of a pipeline reads its layers, a rank of a tensor group its part of each
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fleetfoot.native.mappings import CutFileError, Guard
from fleetfoot.records.weights import BLOCK_TYPES_BY_NAME, Rows, Stack, WeightError, WeightSpec, slices_of
from fleetfoot.utils.memory import release_pages
from fleetfoot.utils.progress import report_progress
from fleetfoot.weights.checksums import part_of
from fleetfoot.weights.files import checkpoint_files
from fleetfoot.weights.gguf_tensors import GGUFTensors

DTYPES_OF_KINDS = {
    "float": ("BF16", "F16", "F32", "F64"),
    "integer": ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"),
    "fp8": ("F8_E4M3",),
    "blocks": tuple(BLOCK_TYPES_BY_NAME),
}
"""`WeightSpec.kind` -> the names of its dtypes in safetensors, or of types in GGUF files."""
_BASE_PREFIX = "model."
REDUNDANT_SUFFIX = ".rotary_emb.inv_freq"  # computed from the config, but contained in old exports
_MAX_LISTED = 10
_MAX_COMPARED_ROWS = 64


class Checkpoint:
    """A context manager over the memory-mapped files: names and shapes first, values on demand. Tensors read from it
    are views of the files, valid while they are open."""

    def __init__(self, folder: Path) -> None:
        """``folder``: or one of its files. Raises WeightError: there are no files, the index names absent files, or a
        file is incomplete."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._guards: list[Guard | GGUFTensors] = []
        try:
            for path in [folder] if folder.is_file() else checkpoint_files(folder):
                self._open(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def close(self) -> None:
        self._stack.close()

    def check(self) -> None:
        """Raises WeightError: a file was cut since it was opened, and values beyond its end are zeros."""
        try:
            for each in self._guards:
                each.check()
        except CutFileError as error:
            raise WeightError(str(error)) from error

    def names(self) -> Iterator[str]:
        """In the order of the values on disk, so that reading all of them is sequential."""
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The name in safetensors: ``BF16``, ``F32``, ``I8``, ..."""
        return self._files[name].get_slice(name).get_dtype()

    def blocks(self, name: str) -> torch.Tensor | None:
        """``[rows, bytes of a row]`` uint8 of a tensor in blocks, in the mapped file's memory, which stays as long as
        the result; None: it is not in blocks."""
        file = self._files[name]
        return file.blocks(name) if isinstance(file, GGUFTensors) else None

    def tensor(self, name: str, part: tuple[Rows, ...] = ()) -> torch.Tensor:
        """A view of the mapped file on the CPU: a whole tensor, or the ``part`` of a `WeightSpec`. Several slices of
        rows are a copy.

        Pages are read on access: for a part of the rows only these rows, for a part of the columns all pages with some
        of these columns.
        """
        if not part:
            return self._files[name].get_tensor(name)
        rows, *columns = part
        values = self._files[name].get_slice(name)
        parts = [values[(each, *columns)] for each in slices_of(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _open(self, path: Path) -> None:
        if path.suffix == ".gguf":
            self._open_gguf(path)
            return
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} is not a whole safetensors file{_likely_cause(path)}: {error}") from error
        # Older safetensors list names in no particular order, and only newer ones in that of the file.
        has_order, address = hasattr(file, "offset_keys"), lambda name: int(file.get_tensor(name).data_ptr())
        names = list(file.offset_keys() if has_order else sorted(file.keys(), key=address))
        for name in names:
            if name in self._files:
                raise WeightError(f"tensor {name} is in {path} and in another file of the folder; keep one of them")
            self._files[name] = file
        if (guard := _guard_safetensors(path, file, names)) is not None:
            self._guards.append(guard)
            self._stack.callback(guard.release)

    def _open_gguf(self, first: Path) -> None:
        """All parts of a model, of which this is the first one."""
        if not self._files:
            file = GGUFTensors(first)
            self._files = dict.fromkeys(file.keys(), file)
            self._guards.append(file)


def _guard_safetensors(path: Path, file: Any, names: list[str]) -> Guard | None:
    """Guards the memory to which an open file is mapped; None: it has no values. ``names``: in the order of values."""
    first, last = (
        next((tensor for tensor in map(file.get_tensor, some) if tensor.nbytes), None)
        for some in (names, reversed(names))
    )
    if first is None or last is None:
        return None
    with path.open("rb") as opened:
        header = 8 + int.from_bytes(opened.read(8), "little")
    begin = first.data_ptr() - header

    def name_at(place: int) -> str:
        ends = ((tensor.data_ptr() + tensor.nbytes, name) for name in names if (tensor := file.get_tensor(name)).nbytes)
        return min((end, name) for end, name in ends if end > begin + place)[1]

    return Guard(path, begin, last.data_ptr() + last.nbytes - begin, name_at)


def _likely_cause(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(20)
        size = path.stat().st_size
    except OSError:
        return ""
    if start.startswith(b"version https://git"):
        return " but a Git LFS pointer (run git lfs pull)"
    return f" ({size} bytes; an interrupted download?)"


# --- loading ----------------------------------------------------------------------------------------------------------


def load_safetensors(
    specs: Iterable[WeightSpec], folder: Path, elsewhere: Collection[str] = (), unread: tuple[str, ...] = ()
) -> None:
    """Copy a checkpoint into the specs, converted to their device and dtype; at most one tensor is in memory twice.

    All mismatches are found before the first byte is copied. Names without the prefix ``model.``, as in an export of
    the base model, are accepted if no name has it. A tied checkpoint may contain the matrix as ``lm_head.weight``, or
    twice; then evenly spaced rows are compared, because a separately trained head differs in all rows. ``elsewhere``:
    names that belong to other ranks' specs; ``unread``: beginnings of names that are ignored. Raises WeightError if a
    file cannot be read, tensors are missing, misshapen, of another kind of dtype or unexpected, or the two copies of a
    tied matrix differ.
    """
    specs = list(specs)
    with Checkpoint(folder) as checkpoint:
        names = {name for spec in specs for name in names_of(spec)}
        found = _by_model_name(checkpoint, names | set(elsewhere))
        expected = {name: source for name, source in found.items() if not name.startswith(unread)}
        if problems := [*_problems(specs, expected, checkpoint, elsewhere)]:
            raise _misfit(folder, problems)
        sources: dict[
            str, list[tuple[WeightSpec, tuple[Rows, ...]]]
        ] = {}  # name in the checkpoint -> specs, and places
        for spec in specs:
            if stack := _stack(spec, found):
                sources.setdefault(found[stack.name], []).append((spec, stack.index))
                continue
            if not _present(spec, found):
                assert spec.default is not None
                spec.destination().fill_(spec.default)
                spec.filled()
                continue
            first, *copies = _present(spec, found)
            for copy in copies:
                _check_same(checkpoint, spec, found[first], found[copy])
            sources.setdefault(found[first], []).append((spec, ()))
        names_in_order = [name for name in checkpoint.names() if name in sources]
        for number, name in enumerate(names_in_order):
            report_progress("weights", number, len(names_in_order))
            for spec, index in sources[name]:
                if spec.kind == "blocks":
                    blocks = checkpoint.blocks(name)
                    assert blocks is not None
                    (write_values if spec.adopt is None else _adopt)(spec, blocks)
                    continue
                values = checkpoint.tensor(name, index or spec.part)
                write_values(spec, place_of(values, spec) if index else values)
                release_pages(values.data_ptr(), values.nbytes)  # of the file, and read once


def _adopt(spec: WeightSpec, blocks: torch.Tensor) -> None:
    assert spec.adopt is not None
    spec.adopt(blocks)


def write_values(spec: WeightSpec, values: torch.Tensor) -> None:
    """Replace all that the place of ``spec`` holds by its part of a checkpoint's tensor."""
    destination = spec.destination()
    destination.copy_(values.reshape(destination.shape))
    spec.filled()


def _by_model_name(checkpoint: Checkpoint, expected: set[str]) -> dict[str, str]:
    """Name in the model -> name in the checkpoint."""
    names = list(checkpoint.names())
    has_prefix = any(name.startswith(_BASE_PREFIX) for name in names)
    return {name if has_prefix or (full := _BASE_PREFIX + name) not in expected else full: name for name in names}


def names_of(spec: WeightSpec) -> tuple[str, ...]:
    """All names of tensors that can fill it."""
    return spec.name, *spec.aliases, *(stack.name for stack in spec.stacks)


def _present(spec: WeightSpec, found: dict[str, str]) -> list[str]:
    return [name for name in (spec.name, *spec.aliases) if name in found]


def _stack(spec: WeightSpec, found: dict[str, str]) -> Stack | None:
    """The larger tensor that has the values of ``spec``; None: the checkpoint has it by itself, or not at all."""
    if _present(spec, found):
        return None
    return next((stack for stack in spec.stacks if stack.name in found), None)


def place_of(values: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    """What ``spec`` holds of ``values``, the place of its tensor in a stack."""
    return part_of(values.reshape(spec.shape), spec.part)


def _problems(
    specs: list[WeightSpec], found: dict[str, str], checkpoint: Checkpoint, elsewhere: Collection[str]
) -> Iterator[tuple[str, str]]:
    """``(kind, description)`` of each spec that the checkpoint cannot fill, and of each tensor that has no spec."""
    for spec in specs:
        stack, names = _stack(spec, found), _present(spec, found)
        if not names and stack is None and spec.default is None:
            yield "missing", f"{spec.name}: expected {list(spec.shape)}"
        for name, expected in [(name, spec.shape) for name in names] + ([(stack.name, stack.shape)] if stack else []):
            shape, dtype = checkpoint.shape(found[name]), checkpoint.dtype(found[name])
            if spec.kind == "blocks" and (blocks := checkpoint.blocks(found[name])) is not None:
                shape = tuple(blocks.shape)
            elif spec.kind == "float" and dtype in BLOCK_TYPES_BY_NAME:
                dtype = "F32"  # which they are dequantized to
            if not (shape == expected if name not in names else spec.has_shape(shape)):
                yield "misshapen", f"{found[name]}: found {list(shape)}, expected {list(expected)}"
            if dtype not in (dtypes := DTYPES_OF_KINDS[spec.kind]):
                kind = "unquantized" if dtype in DTYPES_OF_KINDS["float"] else "quantized"
                yield kind, f"{found[name]}: found {dtype}, expected one of {', '.join(dtypes)}"
    known = {name for spec in specs for name in names_of(spec)} | set(elsewhere)
    for name, source in found.items():
        if name not in known and not name.endswith(REDUNDANT_SUFFIX):
            yield "unexpected", f"{source}: found {list(checkpoint.shape(source))}, expected nothing of that name"


def _misfit(folder: Path, problems: list[tuple[str, str]]) -> WeightError:
    kinds = [kind for kind, _ in problems]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = [f"  {kind} {description}" for kind, description in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        lines.append(f"  and {len(problems) - _MAX_LISTED} more")
    missing = [description for kind, description in problems if kind == "missing"]
    if missing and all(description.startswith("lm_head.") for description in missing):
        lines.append(
            "(no output head: a base model, or a tied one with a config.json without tie_word_embeddings: true)"
        )
    return WeightError(f"the tensors in {folder} do not fit its config.json: {counts}\n" + "\n".join(lines))


def _check_same(checkpoint: Checkpoint, spec: WeightSpec, name: str, copy: str) -> None:
    if not same_rows(checkpoint.tensor(name, spec.part), checkpoint.tensor(copy, spec.part)):
        raise WeightError(
            f"{copy} differs from {name}, although tie_word_embeddings is true; set it to false in config.json"
        )


def same_rows(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether evenly spaced rows of two tensors are equal."""
    rows = torch.linspace(0, first.shape[0] - 1, min(first.shape[0], _MAX_COMPARED_ROWS)).long()
    # NaN equals NaN: otherwise a checkpoint with a NaN would differ from itself.
    ours, theirs = first[rows.to(first.device)].float(), second[rows.to(second.device)].float()
    return torch.allclose(ours, theirs.to(ours.device), rtol=0, atol=0, equal_nan=True)
