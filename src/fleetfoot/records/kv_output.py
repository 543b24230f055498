"""What became of KV transfers: from the workers' side of a connector to the scheduler's. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """Why a transfer did not happen."""

    reason: str
    """A sentence for people, with what was expected and what was found."""
    timed_out: bool = False
    block: bytes | None = None
    """The chain hash of a block that is not what it should be, where it is known to be that."""


@dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that have ended since the last step, on one rank, or merged over all.

    A rank reports each load and each send that it took part in exactly once, when it no longer touches the blocks.
    """

    loaded: set[str] = field(default_factory=set)
    """Requests whose KV has arrived whole."""
    failed: dict[str, TransferFailure] = field(default_factory=dict)
    """Requests whose KV has not; their blocks hold nothing that counts."""
    sent: set[str] = field(default_factory=set)
    """Requests whose lent blocks nobody reads any more: sent, or given up."""
    counters: dict[str, int] = field(default_factory=dict)
    """What has happened since the last output, for whoever adds it up: ``blocks_saved``, ``blocks_loaded``,
    ``bytes_saved``, ``bytes_loaded``, ... Of all ranks together once merged."""

    addresses: dict[int, str] = field(default_factory=dict)
    """Rank -> ``host:port`` at which other engines reach its side of the connector; said once, with its first step."""

    @property
    def is_empty(self) -> bool:
        return not (self.loaded or self.failed or self.sent or self.counters or self.addresses)
