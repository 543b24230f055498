"""What the scheduler's side of a connector tells the workers' side to move: plain records of a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetfoot.records.step import SchedulerOutput


@dataclass(slots=True)
class BlockMove:
    """One KV block that goes out, or comes in."""

    block_id: int
    digest: bytes
    """The chain hash of the block's tokens and all before."""
    slot: int = -1
    """In host memory, for connectors that have one there."""


@dataclass(slots=True)
class LoadOrder:
    """The blocks that a request waits for."""

    request_id: str
    moves: list[BlockMove]


@dataclass(slots=True)
class BlockMoves:
    """A step's."""

    epoch: str = ""
    """Changes with the weights: blocks of another epoch are other blocks, whatever their digest."""
    flushes: list[BlockMove] = field(default_factory=list)
    """Out, before the step can overwrite them."""
    loads: list[LoadOrder] = field(default_factory=list)
    """In, beside the step."""
    saves: list[BlockMove] = field(default_factory=list)
    """Out, once the step has filled them."""
    reused: list[int] = field(default_factory=list)
    """Blocks that have new owners from this step on: it must not write to them before their last copies out have
    ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.flushes or self.loads or self.saves or self.reused)

    def add_new_owners(self, scheduler_output: SchedulerOutput, block_size: int) -> None:
        """Note the blocks that requests of this step have got since the last; those of a prefix that was found are only
        read."""
        for request in scheduler_output.new_requests:
            self.reused += request.block_ids[request.num_computed_tokens // block_size :]
        for _, _, block_ids in scheduler_output.new_block_ids:
            self.reused += block_ids


NO_MOVES = BlockMoves()


def moves_of(metadata: object | None) -> BlockMoves:
    """A step's metadata as these records; None: nothing is to be moved.

    Raises:
        TypeError: the metadata is another connector's.
    """
    if metadata is None:
        return NO_MOVES
    if not isinstance(metadata, BlockMoves):
        raise TypeError(f"KV connector metadata is a {type(metadata).__name__}; it must be BlockMoves or None")
    return metadata
