"""The KV connector protocol: a scheduler side, and a worker side on each rank.

A connector moves KV blocks between this engine and an external store: files, host memory, another engine. The scheduler
side decides what is moved and puts it into each step's metadata; the worker side moves it. The rules:

- **No step reads KV that has not arrived.** A request whose KV is being loaded waits, with its blocks allocated, until
  every rank has reported the end of the load. After a failed load the tokens are computed, or the request fails.
- **KV is final before it leaves.** `WorkerConnector.save_kv` runs after the last writer of the step's KV.
- **Freed blocks are read before they are overwritten.** Blocks to be saved that their request has freed are in the
  metadata of the next step, and are read in `WorkerConnector.flush`, before that step's forward pass.
- **Held blocks are not reused.** If `SchedulerConnector.request_finished` returns True, the blocks stay HELD until the
  workers report the request as sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput

if TYPE_CHECKING:
    import torch

    from fleetfoot.records.kv_layout import KVLayout

__all__ = [  # the scheduler side lives in records; authors of connectors import everything from here
    "KVConnector",
    "NoSchedulerConnector",
    "SchedulerConnector",
    "TransferContext",
    "WorkerConnector",
]


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The engine, as seen by both sides of a connector."""

    config: KVTransferConfig
    block_size: int
    """Tokens in a block."""
    fingerprint: str
    """Of the model, its weights' source, dtype and the KV layout of a whole engine: KV may only be exchanged between
    engines with equal fingerprints. Empty in `KVConnector.check_settings`."""
    engine_id: str
    num_ranks: int = 1
    """Workers: tensor parallel times pipeline parallel."""
    rank: int = 0
    """Of this worker; 0 on the scheduler side."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    bytes_per_block: int = 0
    """Of one KV block over all layers and all ranks."""
    dtype: str = ""
    """Of the KV cache."""
    shares_blocks: bool = False
    """Whether other connectors access the same blocks."""
    clock: Callable[[], float] | None = None
    """Seconds, monotonic; None: `time.monotonic`."""


class WorkerConnector(ABC):
    """The worker side. Every step begins with `bind_connector_metadata` and ends with `clear_connector_metadata`; see
    `fleetfoot.runner.step_connector.StepConnector` for the order of the calls."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        """Called once with the KV caches of this rank's layers, the drafter's last: ``[num_blocks, 2, num_kv_heads,
        block_size, head_dim]`` each."""

    @abstractmethod
    def bind_connector_metadata(self, metadata: object | None) -> None:
        """Set the metadata of the step; None: no work."""

    def flush(self) -> None:  # noqa: B027  (a connector that saves nothing has nothing to flush)
        """Read the blocks to be saved that this step or its loads may overwrite.

        Called before the forward pass is queued, and before `start_load_kv` of any connector. The reads must precede
        the forward pass in the order of the device's work."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Start the loads. Called after `flush`, before the forward pass is queued.

        Loads write to blocks that no step accesses, so they may continue during later steps. A transfer that writes
        outside the order of the device's work must first wait for the work that is queued: another connector may have
        flushed these blocks."""

    @abstractmethod
    def save_kv(self) -> None:
        """Start saving the blocks that the step has filled. Called after the last writer of the step's KV is queued."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return once later steps, in the order of the device's work, cannot change the blocks that are being saved."""

    @abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """The transfers that have ended since the last call. ``finished_req_ids``: requests that have ended."""

    @abstractmethod
    def clear_connector_metadata(self) -> None:
        """Drop the step's metadata. Always called, also after an exception."""

    def wait_for_progress(self) -> None:  # noqa: B027
        """Called in idle steps in place of a forward pass: return when a transfer has ended, or after a short while."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop transfers and threads; the KV caches must not be accessed afterwards."""


class KVConnector(ABC):
    """A connector: the class that ``kv_connector`` names. It creates the two sides.

    Raises (all methods):
        ValueError, TypeError: a setting is unknown, or invalid for this engine.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset()
    """Names from `fleetfoot.kv_transfer.base.layouts`."""

    @staticmethod  # noqa: B027  (a connector without settings has nothing to check)
    def check_settings(context: TransferContext) -> None:
        """Validate the settings. Called once when an engine is planned, whether or not it is started; it must not open,
        create or write anything. By default all settings are accepted."""

    @staticmethod
    @abstractmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector: ...

    @staticmethod
    @abstractmethod
    def worker_side(context: TransferContext) -> WorkerConnector: ...
