"""A request as the scheduler sees it: token counts, blocks, and when it ends."""

from __future__ import annotations

import enum

from fleetfoot.sampling.params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything from FINISHED_STOPPED on has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again: its blocks were given away, and its tokens will be computed once more."""
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One sequence to generate. Plain slots, because the scheduler touches each one every step.

    Counts are in tokens. ``num_tokens`` counts prompt, output and the tokens of steps in flight, which are not known
    yet; ``len(token_ids)`` counts those that are known. ``num_computed`` are those whose KV has been queued.
    """

    __slots__ = (
        "bad_words_token_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "capacity",
        "is_lent",
        "max_tokens_in_all",
        "min_tokens_in_all",
        "num_cached_tokens",
        "num_computed",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_tokens",
        "params",
        "priority",
        "request_id",
        "row",
        "scheduled_ts",
        "seed",
        "sequence_number",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_words_token_ids: list[list[int]] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Args:
        max_tokens: most output tokens, already resolved against the model's length.
        seed: 64 bits for this sequence alone.
        eos_token_ids: the model's end tokens; left out where the request ignores them.
        """
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens_in_all = self.num_prompt_tokens + max_tokens
        self.min_tokens_in_all = self.num_prompt_tokens + params.min_tokens
        self.stop_token_ids = (frozenset() if params.ignore_eos else eos_token_ids) | frozenset(
            params.stop_token_ids or ()
        )
        self.bad_words_token_ids = bad_words_token_ids or []
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.sequence_number = 0  # order of arrival, set by the scheduler
        self.row = -1  # of the runner's state, while running
        self.scheduled_ts = 0.0  # when it was first scheduled, by the engine's clock
        self.num_tokens = self.num_prompt_tokens
        self.num_computed = 0
        self.num_in_flight = 0  # steps queued and not yet retired that hold this request
        self.num_cached_tokens = -1  # prefix cache hits of the first admission; -1: not admitted yet
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids have room for
        self.block_hashes: list[bytes] = []
        self.num_published = 0  # blocks that the pool knows as full
        self.is_lent = False  # preempted or ended, with steps in flight that still hold its blocks and row

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    def __lt__(self, other: Request) -> bool:
        """Heap order: priority first (lower is sooner), then arrival."""
        return (self.priority, self.sequence_number) < (other.priority, other.sequence_number)
