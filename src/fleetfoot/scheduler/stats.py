"""Statistics of the scheduler. Counters start at 0 with the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any


def _difference(now: object, before: object, *names: str) -> dict[str, Any]:
    return {name: getattr(now, name) - getattr(before, name) for name in names}


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Statistics of speculative decoding."""

    num_steps: int = 0
    """Steps that verified drafts."""
    num_rows: int = 0
    """How often a request had drafts verified, summed over steps."""
    num_drafted: int = 0
    """Tokens proposed."""
    num_accepted: int = 0
    """Tokens accepted."""
    accepted_at: tuple[int, ...] = ()
    """How often, for each draft position, first one first, a draft was accepted there."""
    off: dict[str, int] = field(default_factory=dict)
    """Reason -> steps that proposed no drafts for that reason."""
    off_reason: str = ""
    """Why the latest step proposed no drafts; empty if it did, or without speculative decoding."""

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the drafts that were accepted, 0 to 1; 0 before the first draft."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per request of a step with drafts, the target's own included: at least 1; 0 before the first."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """The fraction, for each draft position, of ``num_rows`` with a draft accepted there. A draft is accepted only
        with all drafts before it, so the rates fall. Their sum plus 1 is `mean_acceptance_length`."""
        return tuple(count / self.num_rows for count in self.accepted_at) if self.num_rows else ()

    def since(self, before: DraftStats) -> DraftStats:
        """The difference from ``before``, earlier statistics of the same engine."""
        earlier = before.accepted_at or (0,) * len(self.accepted_at)
        return replace(
            self,
            accepted_at=tuple(now - then for now, then in zip(self.accepted_at, earlier, strict=True)),
            off=dict(Counter(self.off) - Counter(before.off)),
            **_difference(self, before, "num_steps", "num_rows", "num_drafted", "num_accepted"),
        )


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of the KV connector."""

    num_loading: int = 0
    """Requests that load KV or have just loaded it, at this moment."""
    num_held_blocks: int = 0
    """Blocks of ended requests that a transfer still uses, at this moment."""
    loads_started: int = 0
    loads_done: int = 0
    loads_failed: int = 0
    """Including those that timed out."""
    loads_timed_out: int = 0
    tokens_loaded: int = 0
    """Tokens that were not computed because their KV was loaded."""
    counters: dict[str, int] = field(default_factory=dict)
    """The connector's own counters, summed over all workers: ``blocks_saved``, ``bytes_loaded``, ..."""

    def since(self, before: TransferStats) -> TransferStats:
        """The difference from ``before``, earlier statistics of the same engine; current values are kept."""
        counted = ("loads_started", "loads_done", "loads_failed", "loads_timed_out", "tokens_loaded")
        counters = {name: count - before.counters.get(name, 0) for name, count in self.counters.items()}
        return replace(self, counters=counters, **_difference(self, before, *counted))


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's state at one moment, and its counters."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    prefix_cache_lost: int = 0
    """Prompt tokens whose KV was found there, and that were computed again for want of a recurrent state after them."""
    drafts: DraftStats = field(default_factory=DraftStats)
    transfers: TransferStats = field(default_factory=TransferStats)
