"""The KV connector protocol: a scheduler side, and a worker side on each rank.

A connector moves KV blocks between this engine and an external store: files, host memory, another engine. The scheduler
side decides what is moved and puts it into each step's metadata; the worker side moves it. The rules:

- **No step reads KV that has not arrived.** A request waits for its KV, with its blocks allocated, until
  every rank has reported the end of the load. After a failed load the tokens are computed, or the request fails.
- **KV is final before it leaves.** `WorkerConnector.save_kv` runs after the last writer of the step's KV.
- **Freed blocks are read before they are overwritten.** Blocks to be saved that their request has freed are in the
  metadata of the next step, and are read in `WorkerConnector.flush`, before that step's forward pass.
- **Held blocks are not reused.** If `SchedulerConnector.request_finished` returns True, the blocks stay HELD until the
  workers report the request as sent.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fleetfoot.config.json_fields import check_key
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.records.kv_connector import READ_HISTOGRAMS
from fleetfoot.records.kv_connector import SchedulerConnector as SchedulerConnector  # for authors of connectors
from fleetfoot.records.kv_layout import ARENA as ARENA
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND as BLOCK_CONTIGUOUS_HND
from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup
from fleetfoot.records.kv_layout import TOKEN_MAJOR_NHD as TOKEN_MAJOR_NHD
from fleetfoot.records.step import KVConnectorOutput

if TYPE_CHECKING:
    import torch

    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.config.model import ModelConfig
    from fleetfoot.records.kv_layout import KVLayout

logger = logging.getLogger(__name__)
_D = TypeVar("_D", int, None)

MAX_THREADS = 1024  # of one kind on a rank
UNUSED_FIELDS = ("kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "kv_buffer_device", "kv_buffer_size")
"""Fields of a kv_transfer_config that Fleetfoot's own connectors do not use."""


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The engine, as seen by both sides of a connector."""

    config: KVTransferConfig
    block_size: int
    """Tokens in a block."""
    identity: str | Callable[[], str] = field(hash=False, compare=False)
    """`fingerprint`, or what computes it."""
    engine_id: str
    num_ranks: int = 1
    """Workers: tensor parallel times pipeline parallel."""
    rank: int = 0
    """This worker's rank; 0 on the scheduler side."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    bytes_per_block: int = 0
    """Bytes of one KV block, or slab, over all layers and all ranks."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """The groups of layers in the KV cache."""
    dtype: str = ""
    """The dtype of the KV cache."""
    shares_blocks: bool = False
    """Whether other connectors access the same blocks."""
    clock: Callable[[], float] | None = None
    """Seconds, monotonic; None: `time.monotonic`."""
    engine: EngineConfig | None = field(default=None, hash=False)
    """All settings."""
    model: ModelConfig | None = field(default=None, hash=False)
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    num_blocks: int = 0
    """Blocks of the KV cache, as planned; the workers may have room for fewer."""

    @property
    def fingerprint(self) -> str:
        """Identifies the model, every byte of its weights, dtype and the KV layout of a whole engine: KV may only be
        exchanged between engines with equal fingerprints. Empty in `KVConnector.check_settings`. On the side of a
        worker the files are hashed at the first use, unless the user's cache has their hashes."""
        return self.identity if isinstance(self.identity, str) else self.identity()


class WorkerConnector(ABC):
    """The worker side. Every step begins with `bind_connector_metadata` and ends with `clear_connector_metadata`; see
    `fleetfoot.runner.step_connector.StepConnector` for the order of the calls."""

    @abstractmethod
    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        """Called once with the tensors of this rank's KV cache, which have ``layout.tensor_shapes``: one of all layers
        (`ARENA`), or one for each, the drafter's last."""

    @abstractmethod
    def bind_connector_metadata(self, metadata: object | None) -> None:
        """Set the metadata of the step; None: no work."""

    def flush(self) -> None:  # noqa: B027  (a connector that saves nothing has nothing to flush)
        """Read the blocks to be saved that this step or its loads may overwrite. Called before `start_load_kv` of any
        connector; the reads must precede the forward pass in the order of the device's work."""

    @abstractmethod
    def start_load_kv(self) -> None:
        """Start the loads. Called after `flush`, before the forward pass is queued. Loads write to blocks that no step
        accesses, so they may continue during later steps. A transfer that writes outside the order of the device's work
        must first wait for the work that is queued: another connector may have flushed these blocks."""

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
    """Names of KV layouts, such as `BLOCK_CONTIGUOUS_HND`. With `ARENA` there may be several groups of layers, of each
    of which it moves blocks (`TransferContext.groups`, `KVLayout.block_parts`, `Request.blocks_between`)."""

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


class ConnectorSettings:
    """Typed access to ``kv_connector_extra_config``, which checks that every setting is read."""

    def __init__(self, config: KVTransferConfig) -> None:
        self._name = config.kv_connector
        self._content = dict(config.kv_connector_extra_config)
        self._known: list[str] = []

    def text(self, name: str) -> str | None:
        """A non-empty string or a path; None: not set. Raises ValueError for other values."""
        value = self._read(name)
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if text is not None and (not isinstance(text, str) or not text):
            raise self.error(name, text, "a string that is not empty")
        return text

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings that are not empty; (): not set. Raises ValueError for other values."""
        value = self._read(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
            raise self.error(name, value, "a list of strings that are not empty")
        return tuple(value)

    def integer(self, name: str, default: _D, *, minimum: int = 1, maximum: int | None = None) -> int | _D:
        """An integer from ``minimum`` to ``maximum`` (None: no limit), or ``default``. Raises ValueError for other
        values."""
        value = self._read(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():  # such as 4e9
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        if maximum is not None and value > maximum:
            raise self.error(name, value, f"at most {maximum}")
        return value

    def error(self, name: str, value: Any, expected: str) -> ValueError:
        """The error for an invalid setting."""
        return ValueError(f"kv_connector_extra_config of {self._name}: {name} is {value!r}; it must be {expected}")

    def check_all_read(self) -> None:
        """Raises TypeError if there are settings that were not read."""
        for name in self._content:
            check_key(f"kv_connector_extra_config of {self._name}", name, self._known)

    def _read(self, name: str) -> Any:
        self._known.append(name)
        return self._content.get(name)


def warn_of_unused_fields(config: KVTransferConfig) -> None:
    """Log a warning for each of `UNUSED_FIELDS` that is set."""
    for name in UNUSED_FIELDS:
        if getattr(config, name) is not None:
            logger.warning("kv_transfer_config: %s has no meaning for %s", name, config.kv_connector)


class TransferCounters(Counter[str]):
    """Named counts on the worker side."""

    def add(self, name: str, count: int = 1) -> None:
        self[name] += count

    def observe(self, name: str, value: int) -> None:
        """Add a sample of one of `READ_HISTOGRAMS`."""
        limits = READ_HISTOGRAMS[name][2]
        at = bisect_left(limits, value)
        self[f"{name}<={limits[at] if at < len(limits) else 'inf'}"] += 1
        self[name] += value

    def take(self) -> dict[str, int]:
        """The increments since the last call."""
        taken = dict(+self)
        self.clear()
        return taken
