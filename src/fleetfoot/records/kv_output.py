"""Results of KV transfers, from the worker side of a connector to its scheduler side. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """Why a transfer failed."""

    reason: str
    """A sentence with what was expected and what was found."""
    timed_out: bool = False
    block: bytes | None = None
    """The chain hash of the invalid block, if one is known to be the cause."""


@dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that have ended since the last step, of one rank, or merged over all ranks.

    A rank reports each load and each send that it takes part in exactly once, when it no longer accesses the blocks.
    """

    loaded: set[str] = field(default_factory=set)
    """Requests whose KV has been loaded completely."""
    failed: dict[str, TransferFailure] = field(default_factory=dict)
    """Requests whose load has failed; the contents of their blocks are undefined."""
    sent: set[str] = field(default_factory=set)
    """Requests whose held blocks are no longer read: sent, or given up."""
    counters: dict[str, int] = field(default_factory=dict)
    """Increments since the last output: ``blocks_saved``, ``blocks_loaded``, ``bytes_saved``, ``bytes_loaded``, ... Of
    all ranks together once merged."""

    addresses: dict[int, str] = field(default_factory=dict)
    """Rank -> ``host:port`` at which other engines reach its side of the connector; reported once, in the rank's first
    step."""

    @property
    def is_empty(self) -> bool:
        return not (self.loaded or self.failed or self.sent or self.counters or self.addresses)
