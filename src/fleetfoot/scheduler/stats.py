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
    accepted_at: tuple[int, ...] = ()
    """For each place among a step's drafts, the first one first: how often a draft was accepted there."""
    off: dict[str, int] = field(default_factory=dict)
    """Why drafting was off -> steps that proposed nothing for that reason."""
    off_reason: str = ""
    """Why the latest step proposed nothing; empty: it did, or there are no drafts at all."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were accepted, 0 to 1; 0 before there was any."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a request gets, on average, in a step in which it has drafts, the target's own included: at least
        1; 0 before there was any."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """For each place, the share of ``num_rows`` in which a draft was accepted there: with those before it, so it
        falls from place to place. Their sum and 1 are the mean acceptance length."""
        return tuple(count / self.num_rows for count in self.accepted_at) if self.num_rows else ()

    def since(self, before: DraftStats) -> DraftStats:
        """What was counted after ``before``, an earlier moment of the same engine."""
        earlier = before.accepted_at or (0,) * len(self.accepted_at)
        return DraftStats(
            num_steps=self.num_steps - before.num_steps,
            num_rows=self.num_rows - before.num_rows,
            num_drafted=self.num_drafted - before.num_drafted,
            num_accepted=self.num_accepted - before.num_accepted,
            accepted_at=tuple(now - then for now, then in zip(self.accepted_at, earlier, strict=True)),
            off={
                reason: steps - before.off.get(reason, 0)
                for reason, steps in self.off.items()
                if steps > before.off.get(reason, 0)
            },
            off_reason=self.off_reason,
        )


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

    def since(self, before: TransferStats) -> TransferStats:
        """What was counted after ``before``, an earlier moment of the same engine; what is under way is as it is."""
        return TransferStats(
            num_loading=self.num_loading,
            num_lent_blocks=self.num_lent_blocks,
            loads_started=self.loads_started - before.loads_started,
            loads_done=self.loads_done - before.loads_done,
            loads_failed=self.loads_failed - before.loads_failed,
            loads_timed_out=self.loads_timed_out - before.loads_timed_out,
            tokens_loaded=self.tokens_loaded - before.tokens_loaded,
            counters={name: count - before.counters.get(name, 0) for name, count in self.counters.items()},
        )


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
