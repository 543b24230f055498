"""A request as the scheduler sees it: token counts, blocks, and when it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from fleetfoot.records.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything from FINISHED_STOPPED on has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again: its blocks were given away, and its tokens will be computed once more."""
    LOADING = 3
    """Holding blocks that a KV connector fills; it has no row, and no step touches it."""
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One sequence to generate. Plain slots, because the scheduler touches each one every step.

    Counts are in tokens. ``token_ids`` are prompt and output as far as they are known; ``num_computed`` are those whose
    KV has been queued, and so may run ahead of them. Where steps in flight verify drafts it is an upper bound: all
    drafts count as accepted until it is known how many were.
    """

    __slots__ = (
        "bad_words_token_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "capacity",
        "is_lent",
        "kv_transfer_output",
        "kv_transfer_params",
        "last_step",
        "max_tokens_in_all",
        "may_load",
        "min_tokens_in_all",
        "num_accepted",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_in_flight",
        "num_loaded",
        "num_preemptions",
        "num_prefill",
        "num_prompt_tokens",
        "num_proposed",
        "num_published",
        "packed_prompt",
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
        kv_transfer_params: dict[str, Any] | None = None,
        packed_prompt: bytes | None = None,
    ) -> None:
        """Args:
        max_tokens: most output tokens, already resolved against the model's length.
        seed: 64 bits for this sequence alone.
        eos_token_ids: the model's end tokens; left out where the request ignores them.
        kv_transfer_params: what the user's request says to the KV connector.
        packed_prompt: ``prompt_token_ids`` as int32, if they are there in that form.
        """
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        self.kv_transfer_output: dict[str, Any] | None = None  # what the KV connector says at its end
        self.token_ids = list(prompt_token_ids)
        self.packed_prompt = packed_prompt
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
        self.num_prefill = 0  # those that were known when it got its row: it decodes once they are computed
        self.num_computed = 0
        self.num_in_flight = 0  # steps queued and not yet retired that hold this request
        self.num_cached_tokens = -1  # prefix cache hits of the first admission; -1: not admitted yet
        self.num_preemptions = 0
        self.num_drafted = 0  # draft tokens that were verified for it
        self.num_accepted = 0
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids have room for
        self.block_hashes: list[bytes] = []
        self.num_published = 0  # blocks that the pool knows as full
        self.is_lent = False  # preempted or ended, while a step in flight or a load still uses its blocks
        self.may_load = True  # False: loading its KV has failed, and is not tried again
        self.num_loaded = 0  # tokens whose KV a connector loads or has loaded, since it got its blocks
        self.last_step = -1  # the last step that sampled for it, and what it proposed: kept for pipelines alone
        self.num_proposed = 0

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def has_certainly_ended(self) -> bool:
        """Whether the steps in flight reach its length even if they accept no draft: there is nothing more to do."""
        most = self.max_tokens_in_all
        return self.num_computed + 1 >= most and len(self.token_ids) + self.num_in_flight >= most

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

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


@dataclass(slots=True)
class StepResult:
    """What one request got out of a step."""

    request: Request
    new_token_ids: list[int]
    index: int
    """Its place in the batch, to find its logprobs; -1: the step did not compute it, but ended it."""
