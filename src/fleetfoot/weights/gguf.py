"""GGUF files: their metadata and where their tensors lie. No torch.

Everything that a header says is compared with the size of the file before memory is taken for it. Source of the format:
the ggml project's "GGUF" specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fleetfoot.records.weights import BLOCK_TYPES, BlockType, WeightError
from fleetfoot.utils.validation import FieldError

_MAX_HEADER = 1 << 28
"""Bytes of metadata and names of tensors."""
_MAX_NAME = 1 << 12
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Types of values -> their letters in `struct`."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GGUFError(FieldError, WeightError):
    """A GGUF file cannot be read, or holds something that is not supported. The field is that of the file."""

    def __init__(self, path: Path, field: str, value: object, problem: str) -> None:
        super().__init__(field, problem, value)
        self.path, self.args = path, (path, field, value, problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.field} is {self.value!r:.200}; {self.problem}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]
    """As in other checkpoints: the last dimension has neighbouring values."""
    offset: int
    """From the beginning of the file."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.size * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A model in one file or in several parts."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Metadata of the first part."""
    tensors: Mapping[str, StoredTensor]
    """By their names in the files."""


class _Reader:
    """Reads a header from its beginning."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._limit = path, file, min(size, _MAX_HEADER)
        self.position = 0

    def error(self, field: str, value: object, problem: str) -> GGUFError:
        return GGUFError(self._path, field, value, problem)

    def take(self, count: int, field: str) -> bytes:
        if count > self._limit - self.position:
            raise self.error(field, f"{count} bytes at {self.position}", f"the header ends at {self._limit}")
        data = self._file.read(count)
        if len(data) < count:
            raise self.error(field, f"{count} bytes at {self.position}", "the file was cut while it was read")
        self.position += count
        return data

    def number(self, layout: str, field: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), field))[0]

    def count(self, field: str, smallest: int) -> int:
        """A number of items of at least ``smallest`` bytes each."""
        found: int = self.number("<Q", field)
        if found * smallest > self._limit - self.position:
            raise self.error(
                field, found, f"more than fit in the rest of the header, {self._limit - self.position} bytes"
            )
        return found

    def text(self, field: str, most: int = _MAX_HEADER) -> str:
        length = self.number("<Q", field)
        if length > most:
            raise self.error(field, f"a text of {length} bytes", f"expected at most {most}")
        return self.take(length, field).decode("utf-8", errors="replace")

    def value(self, kind: int, field: str) -> Any:
        if kind == _STRING:
            return self.text(field)
        if kind == _ARRAY:
            item = self.number("<I", field)
            if item == _STRING:
                return [self.text(field) for _ in range(self.count(field, 8))]
            letter = self._letter(item, field)
            count = self.count(field, struct.calcsize(f"<{letter}"))
            return [*struct.unpack(f"<{count}{letter}", self.take(struct.calcsize(f"<{count}{letter}"), field))]
        return self.number(f"<{self._letter(kind, field)}", field)

    def _letter(self, kind: int, field: str) -> str:
        if kind not in _SCALARS:
            known = ", ".join(map(str, (*_SCALARS, _STRING, _ARRAY)))
            raise self.error(field, f"of type {kind}", f"known types: {known}")
        return _SCALARS[kind]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFModel:
    """Read the header of a file, and of all parts if it is the first of several. Raises GGUFError: something in it is
    invalid or not supported, or a part is missing."""
    metadata, tensors = _read_header(path)
    files = [path]
    num_parts = metadata.get("split.count", 1)
    if num_parts != 1:
        found = _SPLIT.search(path.name)
        if not isinstance(num_parts, int) or not 0 < num_parts < 100_000 or found is None:
            raise GGUFError(path, "split.count", num_parts, "expected the number of files NAME-00001-of-00003.gguf")
        if metadata.get("split.no") != 0 or int(found[1]) != 1 or int(found[2]) != num_parts:
            raise GGUFError(path, "split.no", metadata.get("split.no"), "give the first part of the files")
        for number in range(2, num_parts + 1):
            part = path.with_name(f"{path.name[: found.start()]}-{number:05}-of-{num_parts:05}.gguf")
            if not part.is_file():
                raise GGUFError(path, "split.count", num_parts, f"there is no file {part.name}")
            own, more = _read_header(part)
            if own.get("split.no") != number - 1 or own.get("split.count") != num_parts:
                raise GGUFError(part, "split.no", own.get("split.no"), f"expected {number - 1} of {num_parts}")
            if twice := sorted(tensors.keys() & more.keys()):
                raise GGUFError(part, twice[0], "in two files", "each tensor must be in one")
            files.append(part)
            tensors |= more
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise GGUFError(path, "split.tensors.count", total, f"the files have {len(tensors)} tensors")
    return GGUFModel(tuple(files), metadata, tensors)


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(_Reader(path, file, size), path, size)
    except OSError as error:
        raise GGUFError(path, "the file", str(error), "it cannot be read") from error


def _read(reader: _Reader, path: Path, size: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    magic = reader.take(4, "magic")
    if magic != b"GGUF":
        raise reader.error("magic", magic, "expected b'GGUF'")
    version = reader.number("<I", "version")
    if version not in (2, 3):
        raise reader.error("version", version, "supported: 2 and 3, little endian")
    num_tensors, num_fields = reader.count("tensor_count", 25), reader.count("metadata_kv_count", 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.text("the name of a field", _MAX_NAME)
        if name in metadata:
            raise reader.error(name, "there twice", "expected each field once")
        metadata[name] = reader.value(reader.number("<I", name), name)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.error("general.alignment", alignment, "expected a power of two")
    tensors: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        name = reader.text("the name of a tensor", _MAX_NAME)
        if name in tensors:
            raise reader.error(name, "there twice", "expected each tensor once")
        tensors[name] = _read_tensor(reader, name, path)
    begin = -(-reader.position // alignment) * alignment
    placed = {}
    for name, each in tensors.items():
        if each.offset % alignment:
            raise reader.error(name, f"at {each.offset}", f"expected a multiple of general.alignment, {alignment}")
        placed[name] = StoredTensor(path, each.type, each.shape, begin + each.offset)
    end, before = begin, "the header"
    for name, each in sorted(placed.items(), key=lambda item: item[1].offset):
        if each.offset < end and each.num_bytes:
            raise reader.error(name, f"at {each.offset}", f"{before} ends at {end}: they overlap")
        end, before = each.offset + each.num_bytes, name
        if end > size:
            raise reader.error(
                name, f"{each.num_bytes} bytes at {each.offset}", f"the file has {size} (an interrupted download?)"
            )
    return metadata, placed


def _read_tensor(reader: _Reader, name: str, path: Path) -> StoredTensor:
    """The tensor at the offset that the file has."""
    num_dimensions = reader.number("<I", name)
    if not 1 <= num_dimensions <= 4:
        raise reader.error(name, f"of {num_dimensions} dimensions", "expected 1 to 4")
    shape = [reader.number("<Q", name) for _ in range(num_dimensions)]
    if not all(0 < length < 1 << 32 for length in shape):
        raise reader.error(name, f"of shape {shape}", "expected lengths of at least 1 and less than 2^32")
    number, offset = reader.number("<I", name), reader.number("<Q", name)
    if number not in BLOCK_TYPES:
        names = ", ".join(each.name for each in BLOCK_TYPES.values())
        raise reader.error(name, f"of type {number}", f"supported: {names}")
    kind = BLOCK_TYPES[number]
    if shape[0] % kind.size:
        raise reader.error(name, f"of rows of {shape[0]} values", f"{kind.name} has blocks of {kind.size}")
    return StoredTensor(path, kind, tuple(reversed(shape)), offset)


def first_parts(folder: Path) -> list[Path]:
    """The GGUF files of a folder that can be named: whole ones, and the first of several parts."""

    def is_first(path: Path) -> bool:
        found = _SPLIT.search(path.name)
        return found is None or int(found[1]) == 1

    return sorted(path for path in folder.rglob("*.gguf") if is_first(path) and not path.name.startswith("mmproj"))


def tensor_names(architecture: str, num_layers: int) -> Iterator[tuple[str, str]]:
    """Names of modules in files and as other checkpoints have them, without ``.weight`` and ``.bias``."""
    yield from (("token_embd", "model.embed_tokens"), ("output", "lm_head"), ("output_norm", "model.norm"))
    is_sandwich = architecture == "gemma3"
    router = "router" if architecture == "gpt-oss" else "gate"
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        **({"post_ffw_norm": "post_feedforward_layernorm"} if is_sandwich else {}),
        **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": f"mlp.{router}",
        **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
        **{f"ffn_{each}_exps": f"mlp.experts.{each}_proj" for each in ("gate", "up", "down")},
    }
    for layer in range(num_layers):
        for name, module in parts.items():
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{module}"
