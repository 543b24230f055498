"""Resolves a model name to a local folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_ALLOWED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_CONFIGS = ["config.json", "generation_config.json"]
_IGNORED = ["consolidated*", "original/*"]  # the same weights in another layout


class ModelNotFoundError(FileNotFoundError):
    """A model is neither a local folder nor available on the hub; the message lists what was tried."""


def resolve_model(path_or_id: str | Path, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a model, downloaded from the Hugging Face hub if it is not a local one.

    A name that can only be a path (it is absolute, starts with ``.`` or ``~``, or is inside an existing folder) is
    never looked up on the hub, so that a mistyped path does not wait for a network.

    Args:
        revision: a branch, tag or commit on the hub; for a local folder it is ignored with a warning.
        config_only: download the configuration files only.

    Raises:
        ModelNotFoundError: with what was tried and why it failed.
    """
    name = str(path_or_id)
    path = Path(os.path.expanduser(name))  # Path.expanduser raises on an unknown user
    if not name.strip():
        raise ModelNotFoundError(f"model {name!r}: give a folder or a Hugging Face hub id")
    if path.is_dir():
        if revision is not None:
            logger.warning("model %r is a local folder: revision %r has no effect", name, revision)
        return path
    if path.exists():
        raise ModelNotFoundError(f"model {name!r} is a file; give the folder that holds config.json and *.safetensors")
    if isinstance(path_or_id, Path) or _is_written_as_path(name):
        raise ModelNotFoundError(f"model {name!r}: no such folder ({path.absolute()})")
    if path.parent != Path(".") and path.parent.is_dir():  # with a folder ./models, `models/mine` is a mistyped path
        raise ModelNotFoundError(
            f"model {name!r}: no such folder in {path.parent.absolute()} (which exists, so that this is not taken for "
            "a hub id; for the hub's model, start from a folder without it)"
        )
    return _download(name, revision, _CONFIGS if config_only else _ALLOWED)


def _is_written_as_path(name: str) -> bool:
    # A hub id is `owner/name` or `name`.
    return name.startswith((".", "~", "/")) or name.count("/") > 1


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
    except Exception as error:  # the exception types depend on the version of huggingface_hub
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelNotFoundError(
            f"model {name!r}: there is no folder {Path(name).absolute()}, and the Hugging Face hub did not give "
            f"{name!r}{at} ({type(error).__name__}: {error}). Check the spelling, the network or HF_HUB_OFFLINE, "
            "and HF_TOKEN for a private or gated model"
        ) from error
    return Path(folder)
