"""The settings of the file connector, and where a block's file lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.settings import MAX_THREADS, ConnectorSettings

IN_FLIGHT = "max_bytes_in_flight"


DEFAULT_BYTES_IN_FLIGHT = 1 << 30


DEFAULT_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """What ``kv_connector_extra_config`` says."""

    path: Path
    """``shared_storage_path``: the folder, made when the first block is saved."""
    max_bytes_in_flight: int
    """Of host memory on each rank, for blocks that are still to be written; a block that finds no room is not saved.
    A quarter of that comes on top for blocks that are being read."""
    num_threads: int
    """That read, and as many that write."""

    @classmethod
    def of(cls, config: KVTransferConfig) -> FilesystemSettings:
        """
        Raises:
            ValueError, TypeError: a setting is missing, unknown or has a value that means nothing.
        """
        settings = ConnectorSettings(config)
        path = settings.text("shared_storage_path")
        num_bytes = settings.integer(IN_FLIGHT, DEFAULT_BYTES_IN_FLIGHT)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        settings.check_all_read()
        if path is None:
            raise settings.error("shared_storage_path", None, "the folder in which engines share their KV blocks")
        assert num_bytes is not None and num_threads is not None
        return cls(_folder(settings, path), num_bytes, num_threads)


def _folder(settings: ConnectorSettings, path: str) -> Path:
    """The folder at ``path``, there or not; ValueError if it can never be one."""
    expected = "a folder, or a path at which one can be made"
    try:
        folder = Path(path).expanduser()
        if "\0" in path:
            raise settings.error("shared_storage_path", path, f"{expected}; paths have no null characters")
        there = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        if there.exists() and not there.is_dir():
            raise settings.error("shared_storage_path", path, f"{expected}; {there} is a file")
    except (OSError, RuntimeError) as error:  # a RuntimeError: ~ stands for nobody's home
        raise settings.error("shared_storage_path", path, f"{expected} ({error})") from error
    return folder


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """Where the blocks of one rank lie.

    Ranks of other numbers hold other parts of a block, so they have folders of their own, and so has each epoch.
    """

    root: Path
    num_ranks: str

    @classmethod
    def of(cls, context: TransferContext, settings: FilesystemSettings) -> BlockFolder:
        return cls(settings.path, f"tp{context.tensor_parallel_size}-pp{context.pipeline_parallel_size}")

    def of_rank(self, epoch: str, rank: int) -> str:
        return str(self.root / epoch / f"{self.num_ranks}-rank{rank}")


def file_name(digest: bytes) -> str:
    """Of a block, by the chain hash of its tokens."""
    return f"{digest.hex()}.kv"
