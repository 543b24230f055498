"""The weight files of a checkpoint folder. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from fleetfoot.config.json_fields import read_json_object
from fleetfoot.records.weights import WeightError
from fleetfoot.weights.gguf_folder import gguf_files

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def checkpoint_files(folder: Path) -> list[Path]:
    """The files to read: those of the index, else ``model.safetensors``, else every ``*.safetensors``. Raises
    WeightError: there are none, or the index cannot be read or names files that are absent."""
    if (files := gguf_files(folder)) is not None:
        return files
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    # Mistral's repositories contain the same weights a second time, in another layout.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files := [path for path in files if path.is_file()]:
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
        weight_map = read_json_object(index, WeightError)["weight_map"]
        files = [index.parent / name for name in sorted(set(weight_map.values()))]
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} has no weight_map from tensor to file: {error}") from error
    # not resolved: in the hub's cache files are links to elsewhere
    depth = len(index.parent.parts)
    outside = [str(file) for file in files if ".." in file.parts[depth:] or not file.is_relative_to(index.parent)]
    if outside:
        raise WeightError(f"{index} names files outside its folder, which are not read: {', '.join(outside[:10])}")
    absent = [file.name for file in files if not os.path.isfile(file)]  # False for a name that is too long
    if absent:
        raise WeightError(
            f"{index} names {len(absent)} of {len(files)} files that are absent: {', '.join(absent[:10])}"
        )
    return files
