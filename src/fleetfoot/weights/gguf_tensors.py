"""The tensors of a GGUF file under the names and in the order of other checkpoints."""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fleetfoot.kernels.quantized.blocks import dequantize
from fleetfoot.native.mappings import Guard
from fleetfoot.weights.gguf import GGUFError, GGUFModel, StoredTensor, read_gguf, tensor_names

_EXPERTS = ".mlp.experts."
_UNREAD = ("rope_freqs.weight",)
"""Tensors that the config is made of."""


class _Place(NamedTuple):
    stored: StoredTensor
    expert: int | None
    """Its place in a stack; None: it is the whole tensor."""
    heads: int
    """Heads of which the rows are in the order of pairs, as Llama's q and k: 0: they are not."""
    offset: float
    """What the file has added to values, as Gemma's norms."""


class GGUFTensors:
    """All parts of a model, mapped. Raises GGUFError: a part is invalid, or shorter than its header says."""

    def __init__(self, path: Path) -> None:
        self._model = read_gguf(path)
        self._maps = {file: _Mapping(file, self._model.tensors) for file in self._model.files}
        self._places = dict(_places(self._model))

    def check(self) -> None:
        """Raises CutFileError: a file was cut since it was mapped."""
        for each in self._maps.values():
            each.check()

    def keys(self) -> Iterator[str]:
        """In the order of the values in the files."""
        return iter(sorted(self._places, key=self._order))

    def _order(self, name: str) -> tuple[int, int, int]:
        place = self._places[name]
        return self._model.files.index(place.stored.path), place.stored.offset, place.expert or 0

    def get_slice(self, name: str) -> GGUFSlice:
        """As of safetensors: shape, dtype and parts."""
        return GGUFSlice(self, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The values, dequantized to float32 where they are in blocks."""
        return GGUFSlice(self, name)[...]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        return place.stored.shape if place.expert is None else place.stored.shape[1:]

    def dtype(self, name: str) -> str:
        return self._places[name].stored.type.name

    def blocks(self, name: str) -> torch.Tensor:
        """``[rows, bytes of a row]`` uint8: the file's own memory, but for rows in another order, which are a copy."""
        place = self._places[name]
        stored = place.stored
        data = self._maps[stored.path].bytes(stored.offset, stored.num_bytes)
        rows = data.view(-1, stored.row_bytes)
        if place.expert is not None:
            rows = rows.unflatten(0, (stored.shape[0], -1))[place.expert]
        is_matrix = len(self.shape(name)) > 1
        return _unpaired(rows, place.heads) if place.heads and is_matrix else rows

    def values(self, name: str, rows: slice) -> torch.Tensor:
        """Rows of a matrix, or values of a vector."""
        place = self._places[name]
        number, shape = place.stored.type.number, self.shape(name)
        data = self.blocks(name)
        if len(shape) == 1:
            found = dequantize(number, data)[0]
            found = (_unpaired(found, place.heads) if place.heads else found)[rows]
        else:
            found = dequantize(number, data[rows])
        return found - place.offset if place.offset else found


@dataclass(frozen=True, slots=True)
class GGUFSlice:
    """See `GGUFTensors.get_slice`."""

    file: GGUFTensors
    name: str

    def get_shape(self) -> tuple[int, ...]:
        return self.file.shape(self.name)

    def get_dtype(self) -> str:
        return self.file.dtype(self.name)

    def __getitem__(self, part: object) -> torch.Tensor:
        """``(rows, columns)``, ``rows`` or ``...``"""
        if part is Ellipsis:
            return self.file.values(self.name, slice(None))
        rows, *columns = part if isinstance(part, tuple) else (part,)
        assert isinstance(rows, slice)
        return self.file.values(self.name, rows)[(slice(None), *columns)]


class _Mapping:
    """A mapped file, which stays mapped as long as tensors of it are there."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError) as error:
            raise GGUFError(path, "the file", str(error), "it cannot be mapped") from error

        def name_at(place: int) -> str:
            found = (
                name for name, each in tensors.items() if each.path == path and place < each.offset + each.num_bytes
            )
            return min(found, key=lambda name: tensors[name].offset, default="the end")

        self._path, self._array = path, np.frombuffer(mapped, np.uint8)
        self._guard = Guard(path, self._array.ctypes.data, len(self._array), name_at)
        if self._guard:
            weakref.finalize(self._array, self._guard.release)
        else:
            self._array = np.fromfile(path, np.uint8)

    def check(self) -> None:
        self._guard.check()

    def bytes(self, offset: int, count: int) -> torch.Tensor:
        if offset + count > len(self._array):
            raise GGUFError(self._path, "size", len(self._array), f"a tensor ends at {offset + count}; it was cut")
        array = self._array[offset : offset + count]
        array.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing writes to it
            return torch.from_numpy(array)


def _places(model: GGUFModel) -> Iterator[tuple[str, _Place]]:
    architecture = str(model.metadata.get("general.architecture"))
    num_layers = int(model.metadata.get(f"{architecture}.block_count", 0))
    modules = dict(tensor_names(architecture, min(num_layers, len(model.tensors))))
    heads = int(model.metadata.get(f"{architecture}.attention.head_count", 0))
    kv_heads = model.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    for name, stored in model.tensors.items():
        if name in _UNREAD:
            continue
        module, _, suffix = name.rpartition(".")
        path = modules.get(module, module)
        full = path if path.endswith(".sinks") else f"{path}.{suffix}"
        if _EXPERTS in full:
            before, part = full.split(_EXPERTS)
            for expert in range(stored.shape[0]):
                yield f"{before}{_EXPERTS}{expert}.{part}", _Place(stored, expert, 0, 0.0)
            continue
        is_paired = architecture == "llama"
        pairs = {".q_proj.": heads, ".k_proj.": kv_heads}
        paired = next((count for part, count in pairs.items() if is_paired and part in full), 0)
        offset = 1.0 if architecture == "gemma3" and "norm" in full else 0.0
        yield full, _Place(stored, None, int(paired), offset)


def _unpaired(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of heads in which the two elements of a rotated pair follow each other: all first ones come first."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
