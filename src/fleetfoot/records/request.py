"""A request as the scheduler tracks it: tokens, blocks, and its status."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import Any

from fleetfoot.records.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """The state of a request. Values from FINISHED_STOPPED on mean that it has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again: its blocks were freed, and its tokens will be computed again."""
    LOADING = 3
    """A KV connector fills its blocks; it has no row, and is in no step."""
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
    """One sequence to generate.

    Counts are in tokens. ``num_tokens`` are the known tokens, prompt and output. ``num_computed`` counts tokens whose
    KV is written by steps queued so far, so it may run ahead of ``num_tokens``. While steps in flight verify drafts it
    is an upper bound: all drafts count as accepted until the result is known.
    """

    __slots__ = (
        "bad_words_token_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "can_load",
        "capacity",
        "has_prompt_logprobs",
        "is_held",
        "kv_transfer_output",
        "kv_transfer_params",
        "last_sampled_step",
        "max_tokens",
        "max_total_tokens",
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
        "output_token_ids",
        "params",
        "priority",
        "prompt_token_ids",
        "request_id",
        "row",
        "scheduled_ts",
        "seed",
        "sequence_number",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_words_token_ids: list[list[int]] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            request_id: unique among requests that have not ended.
            prompt_token_ids: an int32 ``array`` is kept and must not change; anything else is copied.
            params: of sampling.
            max_tokens: most output tokens, already limited by the model's length.
            seed: 64 bits for this sequence alone.
            eos_token_ids: the model's end tokens; empty if the request ignores them.
            bad_words_token_ids: token sequences that must not be generated.
            priority: lower runs sooner.
            cache_salt: requests with different salts share no cached prefix.
            kv_transfer_params: the user's parameters for the KV connector.
        """
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        self.kv_transfer_output: dict[str, Any] | None = None  # from the KV connector, when the request has ended
        if not isinstance(prompt_token_ids, array):
            prompt_token_ids = array("i", prompt_token_ids)
        self.prompt_token_ids = prompt_token_ids  # int32
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_tokens = max_tokens
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.stop_token_ids = (frozenset() if params.ignore_eos else eos_token_ids) | frozenset(
            params.stop_token_ids or ()
        )
        self.bad_words_token_ids = bad_words_token_ids or []
        self.has_prompt_logprobs = params.prompt_logprobs is not None
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.sequence_number = 0  # order of arrival, set by the scheduler
        self.row = -1  # of the runner's state, while running
        self.scheduled_ts = 0.0  # when it was first scheduled, by the engine's clock
        self.num_prefill = 0  # known tokens when it got its row: it decodes once they are computed
        self.num_computed = 0
        self.num_in_flight = 0  # steps queued and not yet retired that hold this request
        self.num_cached_tokens = -1  # prefix cache hits of the first admission; -1: not admitted yet
        self.num_preemptions = 0
        self.num_drafted = 0  # draft tokens that were verified for it
        self.num_accepted = 0
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids have room for
        self.block_hashes: list[bytes] = []
        self.num_published = 0  # full blocks that the pool has hashes of
        self.is_held = False  # preempted or ended, while a step in flight or a load still uses its blocks
        self.can_load = True  # False: a load of its KV has failed and is not retried
        self.num_loaded = 0  # tokens whose KV a connector loads or has loaded, since it got its blocks
        self.last_sampled_step = -1  # the last step that sampled for it, and how many drafts that step proposed:
        self.num_proposed = 0  # both are set in pipelines only

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def reaches_limit_in_flight(self) -> bool:
        """Whether the steps in flight reach its length even if they accept no draft: no further step is needed."""
        most = self.max_total_tokens
        return self.num_computed + 1 >= most and self.num_tokens + self.num_in_flight >= most

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def token_ids(self) -> array[int]:
        """A copy of the known tokens, int32: prompt and output."""
        return self.prompt_token_ids + array("i", self.output_token_ids)

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    def __lt__(self, other: Request) -> bool:
        """Scheduling order: priority (lower first), then arrival."""
        return (self.priority, self.sequence_number) < (other.priority, other.sequence_number)
