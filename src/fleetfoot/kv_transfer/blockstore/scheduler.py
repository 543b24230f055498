"""The scheduler side of the block store connectors: which blocks are moved in each step. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput


@dataclass(slots=True)
class BlockTransfer:
    """A KV block to be saved or loaded."""

    block_id: int
    block_hash: bytes
    """The chain hash of the block's tokens and all tokens before them."""
    slot: int = -1
    """In host memory; -1: the store has no slots."""


@dataclass(slots=True)
class RequestLoad:
    """The blocks that a request waits for."""

    request_id: str
    blocks: list[BlockTransfer]


@dataclass(slots=True)
class BlockStoreMetadata:
    """The metadata of a step."""

    epoch: str = ""
    """Identifies the weights: blocks of different epochs differ, whatever their hashes."""
    flushes: list[BlockTransfer] = field(default_factory=list)
    """To be saved before the step can overwrite them."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)
    """To be saved after the step has filled them."""
    reused: list[int] = field(default_factory=list)
    """Blocks with new owners from this step on: they must not be written before earlier copies out have ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.flushes or self.loads or self.saves or self.reused)


class BlockIndex(ABC):
    """The blocks in a store, as known to the scheduler side."""

    epoch: str

    @abstractmethod
    def count_stored(self, request: Request, first: int, last: int) -> int:
        """How many of the request's blocks ``first .. last - 1`` are stored before the first that is not."""

    @abstractmethod
    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that load these blocks, which `count_stored` has found."""

    @abstractmethod
    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that save these blocks; none for blocks that need no saving."""

    def request_finished(self, request: Request) -> None:  # noqa: B027
        """A request has ended and still has its blocks and hashes."""

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:  # noqa: B027
        """The transfers ``saved`` are in the metadata of the step being scheduled."""

    @abstractmethod
    def update(self, output: KVConnectorOutput) -> None:
        """Process loads that have ended."""

    @abstractmethod
    def reset(self, unsent: Sequence[BlockTransfer]) -> None:
        """Begin a new epoch. ``unsent``: saves that will not be carried out."""


class BlockStoreScheduler(SchedulerConnector):
    """Saves every block that is filled, and loads the blocks that are stored."""

    def __init__(self, context: TransferContext, index: BlockIndex) -> None:
        self.index = index
        self._block_size = context.block_size
        self._can_load, self._can_save = context.config.can_load, context.config.can_save
        self._metadata = BlockStoreMetadata(index.epoch)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not self._can_load:
            return 0
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        return self.index.count_stored(request, num_computed_tokens // self._block_size, last) * self._block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        self._metadata.loads.append(RequestLoad(request.request_id, self.index.load(request, first, last)))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        if self._can_save:
            blocks = self._metadata.saves if by_this_step else self._metadata.flushes
            blocks += self.index.save(request, first, last)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.index.request_finished(request)
        return False, None  # blocks to be saved are copied before anything can overwrite them

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockStoreMetadata | None:
        if self._can_save:
            for request in scheduler_output.new_requests:  # blocks of a prefix hit are only read
                self._metadata.reused += request.block_ids[request.num_computed_tokens // self._block_size :]
            for _, _, block_ids in scheduler_output.new_block_ids:
                self._metadata.reused += block_ids
        metadata, self._metadata = self._metadata, BlockStoreMetadata(self.index.epoch)
        self.index.metadata_built([*metadata.flushes, *metadata.saves], scheduler_output.finished_req_ids)
        return None if metadata.is_empty else metadata

    def blocks_reused(self, block_ids: list[int]) -> None:
        if self._can_save:
            self._metadata.reused += block_ids

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.index.update(output)

    @property
    def has_pending(self) -> bool:
        return not self._metadata.is_empty

    def reset_cache(self) -> None:
        """Loads that the workers have not received yet stay: their blocks are of another epoch, so they will fail."""
        metadata = self._metadata
        self.index.reset([*metadata.flushes, *metadata.saves])
        self._metadata = BlockStoreMetadata(self.index.epoch, loads=metadata.loads, reused=metadata.reused)
