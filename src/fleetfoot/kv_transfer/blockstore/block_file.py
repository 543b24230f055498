"""The file of one KV block of one rank: its path, header and checksum, and how it is written atomically. No torch.

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

from fleetfoot.kv_transfer.base.connector import TransferContext

MAGIC = b"FLEETKV\0"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQ16s")
_CHECKSUM_BYTES = 16
_MAX_DESCRIPTION = 1 << 16
_temporary_numbers = itertools.count()


class BlockFileError(Exception):
    """A file is missing or invalid; the message has its path, and what was expected and found."""


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """Paths of block files. Each rank of each parallel configuration, and each epoch, has its own folder."""

    root: str
    parallelism: str

    @classmethod
    def of(cls, context: TransferContext, root: Path) -> BlockFolder:
        return cls(str(root), f"tp{context.tensor_parallel_size}-pp{context.pipeline_parallel_size}")

    def path(self, epoch: str, rank: int, block_hash: bytes) -> str:
        return os.path.join(self.root, epoch, f"{self.parallelism}-rank{rank}", f"{block_hash.hex()}.kv")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a block of this rank looks like."""

    fingerprint: str
    """Of the engine (`TransferContext.fingerprint`)."""
    rank_layout: str
    """Fingerprint of the rank's own KV layout."""
    num_bytes: int
    """Of the payload."""


def write_block(path: Path, block_hash: bytes, payload: memoryview, block_format: BlockFormat) -> None:
    """Write to a temporary file, then rename it: a reader sees a complete file or none.

    The file is not synced to the disk: after a power failure, the checksum detects incomplete files.

    Raises:
        OSError: the disk is full, read-only, gone, ...
    """
    description = _description(block_hash, block_format)
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


def read_block(path: Path, block_hash: bytes, into: memoryview, block_format: BlockFormat) -> None:
    """Read the payload and check it.

    Args:
        into: ``block_format.num_bytes`` writable bytes, undefined after an error.

    Raises:
        BlockFileError: the file is missing, incomplete, corrupt, or of another engine.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            description, checksum = _read_header(path, file, block_hash, block_format)
            if _read_fully(file, into) != len(into):
                raise BlockFileError(f"{path} has fewer than the {len(into):,} bytes of KV in its header")
    except FileNotFoundError:
        raise BlockFileError(f"{path} does not exist any more") from None
    if _checksum(description, into) != checksum:
        raise BlockFileError(f"{path} is corrupt: its checksum is wrong")


def _read_header(path: Path, file: BinaryIO, block_hash: bytes, block_format: BlockFormat) -> tuple[bytes, bytes]:
    """The description and checksum of a file with a valid header."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise BlockFileError(f"{path} is incomplete: it ends within its header, after {len(prefix)} bytes")
    magic, version, description_bytes, payload_bytes, checksum = _PREFIX.unpack(prefix)
    if magic != MAGIC or description_bytes > _MAX_DESCRIPTION:
        raise BlockFileError(f"{path} is not a KV block file: it begins with {prefix[:8]!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise BlockFileError(f"{path} has version {version} of the format, and this engine reads {VERSION}")
    description = file.read(description_bytes)
    _check_description(path, description, block_hash, block_format)
    if payload_bytes != block_format.num_bytes:
        raise BlockFileError(
            f"{path} has {payload_bytes:,} bytes of KV by its header, and a block has {block_format.num_bytes:,} here"
        )
    size, expected = os.fstat(file.fileno()).st_size, _PREFIX.size + description_bytes + payload_bytes
    if size != expected:
        raise BlockFileError(f"{path} has the wrong size: it has {size:,} bytes, and {expected:,} by its header")
    return description, checksum


def _check_description(path: Path, description: bytes, block_hash: bytes, block_format: BlockFormat) -> None:
    expected = _description(block_hash, block_format)
    if description == expected:
        return
    try:
        found = json.loads(description)
        for name, value in json.loads(expected).items():
            if found[name] != value:
                raise BlockFileError(f"{path} holds another block: its {name} is {found[name]}, and it must be {value}")
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # not a description
    raise BlockFileError(f"{path} is corrupt: its header does not describe a KV block")


def _description(block_hash: bytes, block_format: BlockFormat) -> bytes:
    content = {
        "fingerprint": block_format.fingerprint,
        "rank_layout": block_format.rank_layout,
        "block": block_hash.hex(),
    }
    return json.dumps(content).encode()


def _checksum(description: bytes, payload: memoryview) -> bytes:
    checksum = hashlib.blake2b(description, digest_size=_CHECKSUM_BYTES)
    checksum.update(payload)
    return checksum.digest()


def _read_fully(file: BinaryIO, into: memoryview) -> int:
    """Bytes read, fewer than ``into`` has if the file ends before."""
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
