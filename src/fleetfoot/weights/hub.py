"""Model folders, found by a name. No torch."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from fleetfoot.config.sentence_transformers import FILES as SENTENCE_TRANSFORMERS
from fleetfoot.utils.progress import download_bar
from fleetfoot.weights.gguf import first_parts, is_gguf
from fleetfoot.weights.gguf_folder import folder_of

logger = logging.getLogger(__name__)

_ALLOWED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_CONFIGS = ["config.json", "generation_config.json", "*quant*_config.json", *SENTENCE_TRANSFORMERS]
_IGNORED = ["consolidated*", "original/*"]  # the same weights in another layout


class ModelNotFoundError(FileNotFoundError):
    """A model is neither a local folder nor available on the hub; the message lists what was tried.

    Args:
        setting: the setting that names the model, or what it is part of.
    """

    def __init__(self, message: str, setting: str = "model") -> None:
        super().__init__(message)
        self.setting = setting


def resolve_model(
    path_or_id: str | Path, revision: str | None = None, *, config_only: bool = False, setting: str = "model"
) -> Path:
    """The folder of a model, downloaded from the Hugging Face hub if it is not a local one.

    A name that can only be a path (it is absolute, starts with ``.`` or ``~``, or is inside an existing folder) is
    never looked up on the hub, so that a mistyped path does not wait for a network. ``revision``: a branch, tag or
    commit on the hub; for a local folder it is ignored with a warning. ``config_only``: download the configuration
    files only. ``setting``: the setting with the name, for messages; a ``tokenizer`` is downloaded without weights.
    Raises ModelNotFoundError, with what was tried and why it failed.
    """
    name, what = str(path_or_id), f"{setting} {str(path_or_id)!r}"
    path = Path(os.path.expanduser(name))  # Path.expanduser raises on an unknown user
    if not name.strip():
        raise ModelNotFoundError(f"{what}: give a folder or a Hugging Face hub id", setting)
    if path.is_dir():
        if revision is not None:
            logger.warning("%s is a local folder: revision %r has no effect", what, revision)
        return _of_folder(path, what, setting)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return folder_of(path)
    if path.exists():
        raise ModelNotFoundError(
            f"{what} is a file; give the folder that holds the {setting}'s files, or a GGUF file", setting
        )
    if isinstance(path_or_id, Path) or name.startswith((".", "~", "/")) or name.count("/") > 1:  # not owner/name
        raise ModelNotFoundError(f"{what}: no such folder ({path.absolute()})", setting)
    if path.parent != Path(".") and path.parent.is_dir():  # with a folder ./models, `models/mine` is a mistyped path
        raise ModelNotFoundError(
            f"{what}: no such folder in {path.parent.absolute()} (which exists, so that this is not taken for "
            "a hub id; for the hub's model, start from a folder without it)",
            setting,
        )
    repository, _, quantized = name.partition(":")
    if quantized:
        return _download_gguf(repository, quantized, revision, setting)
    patterns = _ALLOWED if setting == "model" else [pattern for pattern in _ALLOWED if pattern != "*.safetensors"]
    folder = _download(name, revision, _CONFIGS if config_only else patterns, setting)
    return _of_folder(folder, what, setting)


def _of_folder(folder: Path, what: str, setting: str) -> Path:
    """A folder, or that of its only GGUF file if it has no other model. Raises ModelNotFoundError: it has several."""
    if (folder / "config.json").is_file() or not (files := first_parts(folder)):
        return folder
    if len(files) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:20])
        raise ModelNotFoundError(f"{what} has {len(files)} GGUF files; name one of them: {names}", setting)
    return folder_of(files[0])


def _download_gguf(repository: str, quantized: str, revision: str | None, setting: str) -> Path:
    """The folder of ``owner/repo:Q4_K_M``: the file of the repository with that in its name."""
    folder = _download(repository, revision, [f"*{each}*.gguf" for each in (quantized, quantized.lower())], setting)
    wanted = re.compile(rf"(^|[^a-z0-9_]){re.escape(quantized.lower())}([^a-z0-9_]|$)")
    files = [file for file in first_parts(folder) if wanted.search(str(file.relative_to(folder)).lower())]
    if len(files) != 1:
        found = ", ".join(str(file.relative_to(folder)) for file in files or first_parts(folder)) or "none"
        what = f"{setting} '{repository}:{quantized}'"
        raise ModelNotFoundError(f"{what}: expected one GGUF file with that in its name, found: {found}", setting)
    return folder_of(files[0])


def _download(name: str, revision: str | None, patterns: list[str], setting: str) -> Path:
    from huggingface_hub import snapshot_download

    what: dict[str, Any] = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": _IGNORED}
    try:
        folder = snapshot_download(name, **what, tqdm_class=download_bar())
    except Exception as error:  # the exception types depend on the version of huggingface_hub
        at = "" if revision is None else f" at revision {revision!r}"
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ModelNotFoundError(
            f"there is no {setting} {name!r}{at}: no folder {Path(name).absolute()}, and no such name on the Hugging "
            f"Face hub, or the hub cannot be reached. Check the spelling, the network or HF_HUB_OFFLINE, and HF_TOKEN "
            f"for a private or gated model ({reason})",
            setting,
        ) from error
    return Path(folder)
