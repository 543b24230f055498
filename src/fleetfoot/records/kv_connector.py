"""What became of KV transfers: the records that travel from the workers' side of a connector to the scheduler's. No
torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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


class KVOutputMerger:
    """Merges the outputs of all ranks: a transfer has ended when it has ended on every rank, and has failed if it has
    failed on any.

    Args:
        num_ranks: how many ranks report.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[str, int] = {}
        self._sends: dict[str, int] = {}
        self._failures: dict[str, TransferFailure] = {}

    def merge(self, outputs: Iterable[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """Take in what some ranks have reported, in any order; returns what has ended on all of them with it."""
        merged = KVConnectorOutput()
        for output in outputs:
            if output is None:
                continue
            for name, count in output.counters.items():
                merged.counters[name] = merged.counters.get(name, 0) + count
            merged.addresses.update(output.addresses)
            for request_id, failure in output.failed.items():
                self._failures.setdefault(request_id, failure)
            for request_id in (*output.loaded, *output.failed):
                if self._has_ended(self._loads, request_id):
                    failed = self._failures.pop(request_id, None)
                    if failed is None:
                        merged.loaded.add(request_id)
                    else:
                        merged.failed[request_id] = failed
            merged.sent.update(request_id for request_id in output.sent if self._has_ended(self._sends, request_id))
        return None if merged.is_empty else merged

    def _has_ended(self, counts: dict[str, int], request_id: str) -> bool:
        count = counts.pop(request_id, 0) + 1
        if count < self._num_ranks:
            counts[request_id] = count
        return count == self._num_ranks
