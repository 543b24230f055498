"""What both sides of the block store connectors share: settings, a step's transfers, and block files. No torch.

The file of one block of one rank, little-endian: `_PREFIX` (magic, version, length of the description, length of the
payload, checksum), the description as JSON (fingerprint, rank_layout, block), and the payload, the block's bytes of all
layers of its group in order. The checksum is BLAKE2b with 16 bytes over description and payload.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import MAX_THREADS, ConnectorSettings, TransferContext
from fleetfoot.kv_transfer.base.registry import CPU_BYTES

IN_FLIGHT = "max_bytes_in_flight"
DEFAULT_BYTES_IN_FLIGHT = 1 << 30
DEFAULT_NUM_THREADS = 4
NUM_BLOCKS = "num_cpu_blocks"

MAGIC = b"FLEETKV\0"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQ16s")
_CHECKSUM_BYTES = 16
_MAX_DESCRIPTION = 1 << 16
_temporary_numbers = itertools.count()


# --- settings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """``kv_connector_extra_config`` of `SharedStorageConnector`."""

    path: Path
    """``shared_storage_path``: the folder, created when the first block is saved."""
    max_bytes_in_flight: int
    """Bytes of host memory on each rank for blocks that are still to be written, and a quarter of it in addition for
    blocks that are being read. A block that finds no room is not saved."""
    num_threads: int
    """Threads for reading, and as many for writing."""

    @classmethod
    def of(cls, config: KVTransferConfig) -> FilesystemSettings:
        """Raises ValueError or TypeError if a setting is missing, unknown or invalid."""
        settings = ConnectorSettings(config)
        path = settings.text("shared_storage_path")
        num_bytes = settings.integer(IN_FLIGHT, DEFAULT_BYTES_IN_FLIGHT)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        settings.check_all_read()
        if path is None:
            raise settings.error("shared_storage_path", None, "the folder in which engines share their KV blocks")
        return cls(_folder(settings, path), num_bytes, num_threads)


def _folder(settings: ConnectorSettings, path: str) -> Path:
    """The folder at ``path``, which may not exist yet; ValueError if it cannot be created."""
    expected = "a folder, or a path at which one can be made"
    try:
        folder = Path(path).expanduser()
        if "\0" in path:
            raise settings.error("shared_storage_path", path, f"{expected}; paths have no null characters")
        existing = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        if existing.exists() and not existing.is_dir():
            raise settings.error("shared_storage_path", path, f"{expected}; {existing} is a file")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of ~ is unknown
        raise settings.error("shared_storage_path", path, f"{expected} ({error})") from error
    return folder


def num_host_blocks(context: TransferContext) -> int:
    """How many blocks host memory holds, or slabs of several groups; each rank holds its part of each.

    ``cpu_bytes_to_use`` is the size for all ranks together; ``num_cpu_blocks`` is the size in blocks. Raises ValueError
    or TypeError if none or both are given, or a block does not fit.
    """
    settings = ConnectorSettings(context.config)
    num_bytes = settings.integer(CPU_BYTES, None)
    num_blocks = settings.integer(NUM_BLOCKS, None)
    settings.check_all_read()
    if num_bytes is None and num_blocks is not None:
        return num_blocks
    if num_bytes is None or num_blocks is not None:
        raise ValueError(
            f"kv_connector_extra_config of {context.config.kv_connector}: {CPU_BYTES} is {num_bytes} and {NUM_BLOCKS} "
            f"is {num_blocks}; give one of them, or leave kv_transfer_config out and set kv_offloading_size (GiB)"
        )
    unused = num_unused(context)
    if num_bytes < (1 + unused) * context.bytes_per_block:
        raise ValueError(
            f"{num_bytes:,} bytes of host memory for KV (kv_offloading_size or {CPU_BYTES}) do not hold a single block "
            f"of {(1 + unused) * context.bytes_per_block:,} bytes; give more"
        )
    return num_bytes // context.bytes_per_block - unused


def num_unused(context: TransferContext) -> int:
    """Slabs of host memory that are never used: the first, as on the device."""
    return int(len(context.groups) > 1)


# --- transfers ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BlockTransfer:
    """A KV block to be saved or loaded."""

    block_id: int
    block_hash: bytes
    """The chain hash of the block's tokens and all tokens before them."""
    group: int = 0
    """Its group of layers."""
    slot: int = -1
    """In host memory; -1: the store has no slots."""

    @property
    def key(self) -> bytes:
        """Identifies its content, given the weights."""
        return block_key(self.group, self.block_hash)


def block_key(group: int, block_hash: bytes) -> bytes:
    """See `BlockTransfer.key`."""
    return block_hash + bytes((group,)) if group else block_hash


def by_group(blocks: Iterable[BlockTransfer]) -> list[tuple[int, list[BlockTransfer]]]:
    """The blocks of each group."""
    groups: dict[int, list[BlockTransfer]] = {}
    for block in blocks:
        groups.setdefault(block.group, []).append(block)
    return list(groups.items())


@dataclass(slots=True)
class BlockStoreMetadata:
    """The transfers of a step."""

    epoch: str = ""
    """Identifies the weights: blocks of different epochs differ, whatever their hashes."""
    flushes: list[BlockTransfer] = field(default_factory=list)
    """To be saved before the step can overwrite them."""
    loads: list[tuple[str, list[BlockTransfer]]] = field(default_factory=list)
    """Requests, and the blocks that each waits for."""
    saves: list[BlockTransfer] = field(default_factory=list)
    """To be saved after the step has filled them."""
    reused: list[int] = field(default_factory=list)
    """Slabs with new owners of blocks from this step on: not to be written before earlier copies out have ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.flushes or self.loads or self.saves or self.reused)


# --- files ----------------------------------------------------------------------------------------------------------


class BlockFileError(Exception):
    """A file is missing or invalid; the message has its path, and what was expected and found."""


def block_path(context: TransferContext, root: Path, epoch: str, rank: int, key: bytes) -> str:
    """The file of a block (`BlockTransfer.key`). Each rank of each parallel configuration, and each epoch, has its own
    folder."""
    folder = f"tp{context.tensor_parallel_size}-pp{context.pipeline_parallel_size}-rank{rank}"
    return os.path.join(root, epoch, folder, f"{key.hex()}.kv")


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The file of one block. ``fingerprint``: of the engine (`TransferContext.fingerprint`); ``rank_layout``:
    fingerprint of the rank's own KV layout; ``key``: `BlockTransfer.key`."""

    path: str
    fingerprint: str
    rank_layout: str
    key: bytes

    def write(self, payload: memoryview) -> None:
        """Write to a temporary file, then rename it: a reader sees a complete file or none.

        The file is not synced to the disk: after a power failure, the checksum detects incomplete files. Raises OSError
        if the disk is full, read-only or gone.
        """
        description = self._description()
        prefix = _PREFIX.pack(MAGIC, VERSION, len(description), len(payload), _checksum(description, payload))
        folder, name = os.path.split(self.path)
        temporary = os.path.join(folder, f".{name}.{os.getpid()}.{next(_temporary_numbers)}.tmp")
        os.makedirs(folder, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(prefix + description)
                file.write(payload)
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, into: memoryview) -> None:
        """Read the payload and check it. ``into``: as many writable bytes, undefined after an error.

        Raises BlockFileError if the file is missing, incomplete, corrupt, or of another engine; OSError if it cannot be
        read.
        """
        try:
            with open(self.path, "rb") as file:
                checksum = self._check_header(file, len(into))
                if file.readinto(into) != len(into):
                    raise BlockFileError(f"{self.path} has fewer than the {len(into):,} bytes of KV in its header")
        except FileNotFoundError:
            raise BlockFileError(f"{self.path} does not exist any more") from None
        if _checksum(self._description(), into) != checksum:
            raise BlockFileError(f"{self.path} is corrupt: its checksum is wrong")

    def _check_header(self, file: BinaryIO, num_bytes: int) -> bytes:
        """The checksum of a file with a valid header and size."""
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise BlockFileError(f"{self.path} is incomplete: it ends within its header, after {len(prefix)} bytes")
        magic, version, description_bytes, payload_bytes, checksum = _PREFIX.unpack(prefix)
        if magic != MAGIC or description_bytes > _MAX_DESCRIPTION:
            raise BlockFileError(
                f"{self.path} is not a KV block file: it begins with {prefix[:8]!r} instead of {MAGIC!r}"
            )
        if version != VERSION:
            raise BlockFileError(f"{self.path} has version {version} of the format, and this engine reads {VERSION}")
        self._check_description(file.read(description_bytes))
        if payload_bytes != num_bytes:
            raise BlockFileError(
                f"{self.path} has {payload_bytes:,} bytes of KV by its header, and a block has {num_bytes:,} here"
            )
        size, expected = os.fstat(file.fileno()).st_size, _PREFIX.size + description_bytes + payload_bytes
        if size != expected:
            raise BlockFileError(
                f"{self.path} has the wrong size: it has {size:,} bytes, and {expected:,} by its header"
            )
        return checksum

    def _check_description(self, description: bytes) -> None:
        expected = self._description()
        if description == expected:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # not a description
            found = json.loads(description)
            for name, value in json.loads(expected).items():
                if found[name] != value:
                    raise BlockFileError(
                        f"{self.path} holds another block: its {name} is {found[name]}, and it must be {value}"
                    )
        raise BlockFileError(f"{self.path} is corrupt: its header does not describe a KV block")

    def _description(self) -> bytes:
        block = self.key.hex()
        content = {"fingerprint": self.fingerprint, "rank_layout": self.rank_layout, "block": block}
        return json.dumps(content).encode()


def _checksum(description: bytes, payload: memoryview) -> bytes:
    checksum = hashlib.blake2b(description, digest_size=_CHECKSUM_BYTES)
    checksum.update(payload)
    return checksum.digest()
