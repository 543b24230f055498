"""Model folders: found by a name, and distinguished by their weights. No torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from pathlib import Path

from fleetfoot.config.sentence_transformers import FILES as SENTENCE_TRANSFORMERS

logger = logging.getLogger(__name__)

_ALLOWED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_CONFIGS = ["config.json", "generation_config.json", *SENTENCE_TRANSFORMERS]
_IGNORED = ["consolidated*", "original/*"]  # the same weights in another layout
_SAMPLE_BYTES = 512


class ModelNotFoundError(FileNotFoundError):
    """A model is neither a local folder nor available on the hub; the message lists what was tried."""


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
        raise ModelNotFoundError(f"{what}: give a folder or a Hugging Face hub id")
    if path.is_dir():
        if revision is not None:
            logger.warning("%s is a local folder: revision %r has no effect", what, revision)
        return path
    if path.exists():
        raise ModelNotFoundError(f"{what} is a file; give the folder that holds the {setting}'s files")
    if isinstance(path_or_id, Path) or name.startswith((".", "~", "/")) or name.count("/") > 1:  # not owner/name
        raise ModelNotFoundError(f"{what}: no such folder ({path.absolute()})")
    if path.parent != Path(".") and path.parent.is_dir():  # with a folder ./models, `models/mine` is a mistyped path
        raise ModelNotFoundError(
            f"{what}: no such folder in {path.parent.absolute()} (which exists, so that this is not taken for "
            "a hub id; for the hub's model, start from a folder without it)"
        )
    patterns = _ALLOWED if setting == "model" else [pattern for pattern in _ALLOWED if pattern != "*.safetensors"]
    return _download(name, revision, _CONFIGS if config_only else patterns, what)


def _download(name: str, revision: str | None, patterns: list[str], what: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
    except Exception as error:  # the exception types depend on the version of huggingface_hub
        at = "" if revision is None else f" at revision {revision!r}"
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ModelNotFoundError(
            f"there is no {what}{at}: no folder {Path(name).absolute()}, and no such name on the Hugging Face hub, or "
            f"the hub cannot be reached. Check the spelling, the network or HF_HUB_OFFLINE, and HF_TOKEN for a private "
            f"or gated model ({reason})"
        ) from error
    return Path(folder)


def weights_identity(folder: Path, load_format: str, seed: int) -> str:
    """What distinguishes one set of weights from another, without reading all of it; copies of a folder have the same.

    The commit, for a model from the hub. Else of each file its name, size and header, and the middle and the end of
    every tensor, which may miss a few values that were changed in place.
    """
    if load_format == "dummy":
        return f"dummy {seed}"
    parts = folder.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", parts[-1]):
        return f"{parts[-3]}@{parts[-1]}"  # models--owner--name@commit, in the hub's cache
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            prefix = file.read(8)
            header = file.read(min(struct.unpack("<Q", prefix)[0], size)) if len(prefix) == 8 else b""
            digest.update(header)
            for begin, end in _tensor_spans(header):
                for start in ((begin + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
                    start = max(begin, start)
                    digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, end - start), 8 + len(header) + start))
    return digest.hexdigest()


def _tensor_spans(header: bytes) -> list[list[int]]:
    """The spans of tensors in a file; empty for a truncated file, which differs by its size and cannot be loaded."""
    try:
        return [value["data_offsets"] for name, value in sorted(json.loads(header).items()) if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
