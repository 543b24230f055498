"""The memory-mapped safetensors files of a checkpoint folder: names and shapes first, values on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fleetfoot.records.weights import WeightError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """A context manager over the open files. Tensors read from it are views of the files, valid while they are open."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            WeightError: there are no files, the index names absent files, or a file is incomplete.
        """
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        try:
            for path in checkpoint_files(folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def names(self) -> Iterator[str]:
        """In the order of the values on disk, so that reading all of them is sequential."""
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The name in safetensors: ``BF16``, ``F32``, ``I8``, ..."""
        return self._files[name].get_slice(name).get_dtype()

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A view of the mapped file on the CPU: a whole tensor, or the ``part`` given by slices of its dimensions.

        Pages are read on access: for a part of the rows only these rows, for a part of the columns all pages with some
        of these columns.
        """
        if not part:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[part]

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} is not a whole safetensors file{_likely_cause(path)}: {error}") from error
        # Older safetensors list names in no particular order, and only newer ones in that of the file.
        for name in getattr(file, "offset_keys", file.keys)():
            if name in self._files:
                raise WeightError(f"tensor {name} is in {path} and in another file of the folder; keep one of them")
            self._files[name] = file


def checkpoint_files(folder: Path) -> list[Path]:
    """The files to read: those of the index, else ``model.safetensors``, else every ``*.safetensors``.

    Raises:
        WeightError: there are none, or the index cannot be read or names files that are absent.
    """
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    # Mistral's repositories contain the same weights a second time, in another layout.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return files
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if other:
        raise WeightError(
            f"{folder} holds {', '.join(other[:5])} but no *.safetensors, the only format that is read; "
            "convert it: transformers' model.save_pretrained writes safetensors"
        )
    raise WeightError(f"no *.safetensors in {folder}; use load_format dummy for random weights")


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        files = [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} has no weight_map from tensor to file: {error}") from error
    absent = [name for name, file in zip(names, files, strict=True) if not file.is_file()]
    if absent:
        raise WeightError(
            f"{index} names {len(absent)} of {len(files)} files that are absent: {', '.join(absent[:10])}"
        )
    return files


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
