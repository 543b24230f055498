"""The KV connector protocol: two sides, one beside the scheduler, one in each worker.

A connector moves KV blocks between this engine and somewhere else: files, host memory, another engine. The scheduler's
side decides what is moved and writes it into each step's metadata; the workers' side moves it. The rules that keep
tokens right:

- **No step runs on KV that has not arrived.** A request whose KV is being loaded waits, holding its blocks, until every
  rank has said how the load ended. A failed load leaves nothing behind: the tokens are computed, or the request fails.
- **KV is final before it leaves.** `WorkerConnector.save` runs after the last writer of the step's KV.
- **Blocks that their request has given back are read before anything can overwrite them**: what is to be saved of them
  is in the metadata of the next step, and is taken in `WorkerConnector.flush` before that step's forward pass.
- **A block is lent until it is given back.** Where `SchedulerConnector.request_finished` says that blocks are still
  read, they stay LENT until the workers report the request as sent.
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

__all__ = [  # the scheduler's side lives with the records; authors of connectors find all of it here
    "KVConnector",
    "NoSchedulerConnector",
    "SchedulerConnector",
    "TransferContext",
    "WorkerConnector",
]


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What both sides of a connector know of their engine."""

    config: KVTransferConfig
    block_size: int
    """Tokens in a block."""
    fingerprint: str
    """Of the model, its weights' source, dtype and the KV layout of a whole engine: KV may only be exchanged between
    engines whose fingerprints are equal. Empty in `KVConnector.check_settings`."""
    engine_id: str
    num_ranks: int = 1
    """Workers: tensor parallel times pipeline parallel."""
    rank: int = 0
    """Of this worker; the scheduler's side has 0."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    bytes_per_block: int = 0
    """Of one KV block over all layers and all ranks."""
    dtype: str = ""
    """Of the KV cache."""
    shares_blocks: bool = False
    """Whether other connectors run beside this one, on the same blocks."""
    clock: Callable[[], float] | None = None
    """Seconds, monotonic; None: `time.monotonic`."""


class WorkerConnector(ABC):
    """A worker's side. `bind` and `clear` enclose each step; the order between them is `StepConnector`'s."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        """The tensors of this rank's layers, a drafter's included, ``[num_blocks, 2, num_kv_heads, block_size,
        head_dim]`` each; called once."""

    @abstractmethod
    def bind(self, metadata: object | None) -> None:
        """What this step has to do."""

    def flush(self) -> None:  # noqa: B027  (a connector that saves nothing has nothing to flush)
        """Before the step's forward pass is queued, and before any connector's `start`: read, in the order of the
        device's work, what must be saved of blocks that this step or its loads may overwrite."""

    @abstractmethod
    def start(self) -> None:
        """Before the step's forward pass is queued, and after `flush`: begin the loads.

        Loads write to blocks that no step touches, so they may go on behind steps. A transfer that writes outside of
        the order of the device's work must first wait for what is queued: another connector may have flushed these
        blocks."""

    @abstractmethod
    def save(self) -> None:
        """After the last writer of the step's KV was queued: begin to save the blocks that the step has filled."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when, in the order of the device's work, later steps can no longer change what is being saved."""

    @abstractmethod
    def take_ended(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """The transfers that have ended since the last call. ``finished_req_ids``: requests that ended."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the step's metadata. Called always, also after something raised."""

    def wait_for_progress(self) -> None:  # noqa: B027
        """An idle step has nothing else to do: return when a transfer has ended, or after a short while."""

    @abstractmethod
    def shutdown(self) -> None:
        """End transfers and threads; nothing may touch the KV caches afterwards."""


class KVConnector(ABC):
    """What a ``kv_connector`` names: makes the two sides.

    Raises (all methods):
        ValueError, TypeError: the config has settings that the connector does not know, or that do not fit this engine.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset()
    """Names of `fleetfoot.kv_transfer.base.layouts`."""

    @staticmethod  # noqa: B027  (most connectors of other people's have nothing to check)
    def check_settings(context: TransferContext) -> None:
        """Called once when an engine is planned, be it to start or not: nothing may be opened, made or written here.
        What is wrong is raised, and what has no effect may be logged. Without this method all settings pass."""

    @staticmethod
    @abstractmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector: ...

    @staticmethod
    @abstractmethod
    def worker_side(context: TransferContext) -> WorkerConnector: ...
