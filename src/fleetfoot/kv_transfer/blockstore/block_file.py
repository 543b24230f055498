"""A file that holds one KV block of one rank: its header, its checksum, and how it comes into being whole. No torch.

The format, little-endian: `_PREFIX` (magic, version, length of the description, length of the payload, checksum), the
description as JSON (fingerprint, rank_layout, block), and the payload, the block's bytes of all layers in order. The
checksum is BLAKE2b with 16 bytes over description and payload.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"FLEETKV\0"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQ16s")
_CHECKSUM_BYTES = 16
_MAX_DESCRIPTION = 1 << 16
_temporary_numbers = itertools.count()


class BlockFileError(Exception):
    """A file does not hold what was looked for; the message names the file, and what was expected and found."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a block of this rank looks like."""

    fingerprint: str
    """Of the engine (`TransferContext.fingerprint`)."""
    rank_layout: str
    """Fingerprint of the rank's own KV layout."""
    num_bytes: int
    """Of the payload."""


def write_block(path: Path, digest: bytes, payload: memoryview, block_format: BlockFormat) -> None:
    """Write under a temporary name, then rename: a reader sees a whole file or none.

    Nothing is synced to the disk: after a power failure the checksum finds what is not whole.

    Args:
        digest: the block's chain hash.

    Raises:
        OSError: the disk is full, read-only, gone, ...
    """
    description = _description(digest, block_format)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(description), len(payload), _checksum(description, payload))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_temporary_numbers)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "xb") as file:
            file.write(prefix + description)
            file.write(payload)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_block(path: Path, digest: bytes, into: memoryview, block_format: BlockFormat) -> None:
    """Read the payload, checked.

    Args:
        into: ``block_format.num_bytes`` writable bytes; what they hold after an error counts for nothing.

    Raises:
        BlockFileError: there is no such file, or it is not whole, damaged, or of another engine.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            description, checksum = _read_header(path, file, digest, block_format)
            if _read_fully(file, into) != len(into):
                raise BlockFileError(f"{path} does not hold the {len(into):,} bytes of KV that its header tells of")
    except FileNotFoundError:
        raise BlockFileError(f"{path} has vanished") from None
    if _checksum(description, into) != checksum:
        raise BlockFileError(f"{path} is damaged: its checksum is wrong")


def _read_header(path: Path, file: BinaryIO, digest: bytes, block_format: BlockFormat) -> tuple[bytes, bytes]:
    """Description and checksum of a file whose header is as it must be."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise BlockFileError(f"{path} is cut short: it ends within its header, after {len(prefix)} bytes")
    magic, version, description_bytes, payload_bytes, checksum = _PREFIX.unpack(prefix)
    if magic != MAGIC or description_bytes > _MAX_DESCRIPTION:
        raise BlockFileError(f"{path} is no file of KV: it begins with {prefix[:8]!r}, and such files with {MAGIC!r}")
    if version != VERSION:
        raise BlockFileError(f"{path} has version {version} of the format, and this engine reads {VERSION}")
    description = file.read(description_bytes)
    _check_description(path, description, digest, block_format)
    if payload_bytes != block_format.num_bytes:
        raise BlockFileError(
            f"{path} tells of {payload_bytes:,} bytes of KV, and a block has {block_format.num_bytes:,} here"
        )
    size, expected = os.fstat(file.fileno()).st_size, _PREFIX.size + description_bytes + payload_bytes
    if size != expected:
        raise BlockFileError(f"{path} is not whole: it has {size:,} bytes, and its header tells of {expected:,}")
    return description, checksum


def _check_description(path: Path, description: bytes, digest: bytes, block_format: BlockFormat) -> None:
    expected = _description(digest, block_format)
    if description == expected:
        return
    try:
        found, wanted = json.loads(description), json.loads(expected)
        for name, value in wanted.items():
            if found[name] != value:
                raise BlockFileError(
                    f"{path} does not belong here: its {name} is {found[name]}, and it must be {value}"
                )
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # not even a description
    raise BlockFileError(f"{path} is damaged: its header does not describe a KV block")


def _description(digest: bytes, block_format: BlockFormat) -> bytes:
    content = {
        "fingerprint": block_format.fingerprint,
        "rank_layout": block_format.rank_layout,
        "block": digest.hex(),
    }
    return json.dumps(content).encode()


def _checksum(description: bytes, payload: memoryview) -> bytes:
    digest = hashlib.blake2b(description, digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return digest.digest()


def _read_fully(file: BinaryIO, into: memoryview) -> int:
    """Bytes read, fewer than ``into`` holds where the file ends before."""
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
