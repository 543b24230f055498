"""A GGUF file as a checkpoint folder: the files that other checkpoints have beside their weights, in the user's cache.

The folder has ``config.json``, ``tokenizer.json`` and so on, and ``gguf.json``, which names the files with the weights.
No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.json_fields import read_json_object
from fleetfoot.records.weights import WeightError
from fleetfoot.weights.gguf import GGUFModel, read_gguf
from fleetfoot.weights.gguf_config import config_of
from fleetfoot.weights.gguf_tokenizer import end_tokens, has_tokenizer, tokenizer_files

MARK = "gguf.json"
_VERSION = 1
"""Version of what is written; another one makes folders again."""


def folder_of(path: Path) -> Path:
    """The folder of a model in a GGUF file, the first of several parts. Raises GGUFError: see `read_gguf`, `config_of`
    and `tokenizer_files`."""
    path = path.absolute()
    state = path.stat()
    key = repr((_VERSION, str(path), state.st_size, state.st_mtime_ns))
    name = f"{path.stem[:80]}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    folder = env.cache_folder() / "gguf" / name
    if (folder / MARK).is_file():
        return folder
    contents = _contents(read_gguf(path))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write(contents, folder)
    except OSError:  # a cache that cannot be written to
        return _write(contents, Path(tempfile.mkdtemp(prefix="fleetfoot-gguf-")) / name)


def _contents(model: GGUFModel) -> dict[str, dict[str, Any]]:
    contents = {MARK: {"files": list(map(str, model.files))}, "config.json": config_of(model)}
    if has_tokenizer(model):
        contents |= tokenizer_files(model)
    if tokens := end_tokens(model):
        contents["generation_config.json"] = {"eos_token_id": tokens}
    return contents


def _write(contents: dict[str, dict[str, Any]], folder: Path) -> Path:
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, content in contents.items():
        (new / name).write_text(json.dumps(content), encoding="utf-8")
    try:
        new.rename(folder)
    except OSError:
        shutil.rmtree(new)
        if not (folder / MARK).is_file():  # else another process was faster
            raise
    return folder


def gguf_files(folder: Path) -> list[Path] | None:
    """The files with the weights of a folder that `folder_of` made; None: it is another one. Raises WeightError: the
    list is invalid, or a file is absent."""
    if not (folder / MARK).is_file():
        return None
    names = read_json_object(folder / MARK, WeightError).get("files")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise WeightError(f"{folder / MARK}: files is {names!r:.200}; expected a list of paths")
    if absent := [name for name in names if not os.path.isfile(name)]:
        raise WeightError(f"{folder / MARK} names files that are absent: {', '.join(absent[:10])}")
    return [Path(name) for name in names]
