"""What the scheduler counts. All counters are since its start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What became of draft tokens."""

    num_steps: int = 0
    """Steps that verified drafts."""
    num_rows: int = 0
    """Times that a request had drafts verified."""
    num_drafted: int = 0
    """Tokens proposed."""
    num_accepted: int = 0
    """Tokens accepted."""
    off: dict[str, int] = field(default_factory=dict)
    """Why drafting was off -> steps that proposed nothing for that reason."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were accepted, 0 to 1; 0 before there was any."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a request gets, on average, in a step in which it has drafts, the target's own included: at least
        1; 0 before there was any."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What the KV connector did."""

    num_loading: int = 0
    """Requests whose KV is under way or has just come: a moment's figure, as the next."""
    num_lent_blocks: int = 0
    """Blocks of requests that have ended which a transfer still uses."""
    loads_started: int = 0
    loads_done: int = 0
    loads_failed: int = 0
    """Timed out ones included."""
    loads_timed_out: int = 0
    tokens_loaded: int = 0
    """Tokens that were not computed because their KV came from elsewhere."""
    counters: dict[str, int] = field(default_factory=dict)
    """The connector's own, of all workers together: ``blocks_saved``, ``bytes_loaded``, ..."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A moment of the scheduler."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up."""
    prefix_cache_hits: int
    """Prompt tokens found."""
    drafts: DraftStats = field(default_factory=DraftStats)
    transfers: TransferStats = field(default_factory=TransferStats)
