"""A request as the scheduler tracks it: tokens, blocks, and its status."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from fleetfoot.records.pooling_params import PoolingParams
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
    FINISHED_UNFIT = 8
    """An error of its own: its grammar cannot go on."""


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_UNFIT: "error",
}


@dataclass(slots=True)
class StateSlots:
    """The recurrent states of a running request."""

    slots: list[int]
    """By ``position % num_slots``: the slots of the states after the next positions."""
    block_size: int
    kept: list[tuple[int, int]] = field(default_factory=list)
    """States that do not change any more: how many tokens they come after, and their slots; ascending. The one that
    the request began with is the first."""
    num_blocks: int = 0
    """Blocks of tokens up to the last one in its tables."""
    newest: int = 0
    """Tokens before the newest snapshot in the prefix cache that it began with or has made."""
    for_connector: bool = False
    """Whether the newest state within the prompt is kept until the request ends: a KV connector reads it then."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence to generate: the user's request, then the scheduler's state.

    Counts are in tokens. ``num_tokens`` are the known tokens, prompt and output. ``num_computed`` counts tokens with
    KV written by steps queued so far, so it may run ahead of ``num_tokens``. While steps in flight verify drafts it
    is an upper bound: all drafts count as accepted until the result is known.
    """

    request_id: str
    """Unique among requests that have not ended."""
    prompt_token_ids: array[int]
    """An int32 array, which must not change; anything else is copied to one."""
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    """Most output tokens, already limited by the model's length."""
    seed: int
    """64 bits for this sequence alone."""
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    """The model's end tokens."""
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Token sequences that must not be generated."""
    priority: int = 0
    """Lower runs sooner."""
    flow: str = ""
    """Requests of different flows, such as those of different clients, take turns."""
    session: str = ""
    """Requests of a session go to the same data-parallel rank; empty: to any."""
    rank: int = -1
    """The data-parallel rank; -1: any."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""
    kv_transfer_params: dict[str, Any] | None = None
    """The user's parameters for the KV connector."""
    pooling_params: PoolingParams | None = None
    """Set for a request that ends with its prompt, and yields a vector or scores."""
    reads_whole_prompt: bool = False
    """Whether the hidden states of all prompt tokens are read, so that none can come from a cache."""
    grammar: Any = None
    """The state of its structured output (`fleetfoot.structured.masks`); None: every token is allowed."""

    kv_transfer_output: dict[str, Any] | None = None  # from the KV connector, when the request has ended
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    has_prompt_logprobs: bool = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    sequence_number: int = 0  # order of arrival, unique in an engine, set by the scheduler
    has_news: bool = True  # whether its next output says more than its tokens: it is the first one, or the last
    turn: int = -1  # order among requests of one priority, set by the waiting queue
    row: int = -1  # of the runner's state, while running
    queued_ts: float = 0.0  # when it was added, by the engine's clock
    scheduled_ts: float = 0.0  # when it was first scheduled
    num_prefill: int = 0  # known tokens when it got its row: it decodes once they are computed
    num_computed: int = 0
    num_in_flight: int = 0  # steps queued and not yet retired that hold this request
    num_cached_tokens: int = -1  # prefix cache hits of the first admission; -1: not admitted yet
    num_preemptions: int = 0
    num_drafted: int = 0  # draft tokens that were verified for it
    num_accepted: int = 0
    block_ids: list[int] = field(default_factory=list)  # of the first group of layers, which frees none meanwhile
    group_block_ids: list[list[int]] = field(default_factory=list)  # of each other group; 0: freed, or never needed
    num_freed: list[int] = field(default_factory=list)  # how many zeros each of these begins with
    capacity: int = 0  # tokens that all of these have room for
    num_retired: int = 0  # tokens of prefills that steps have computed which are not in flight any more
    num_hits: int = 0  # blocks of the prefix that it began with
    states: StateSlots | None = None  # its recurrent states; None: it has none, or does not run
    snapshots_at: list[int] = field(default_factory=list)  # descending: prompt tokens after which the state is kept
    num_lost: int = 0  # tokens with KV in the prefix cache that are computed again for want of a snapshot
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0  # full blocks that the pool has hashes of
    is_held: bool = False  # preempted or ended, while a step in flight or a load still uses its blocks
    can_load: bool = True  # False: a load of its KV has failed and is not retried
    num_loaded: int = 0  # tokens with KV that a connector loads or has loaded, since it got its blocks
    last_sampled_step: int = -1  # the last step that sampled for it, and how many drafts that step proposed:
    num_proposed: int = 0  # both are set in pipelines only

    def __post_init__(self, eos_token_ids: frozenset[int]) -> None:
        if not isinstance(self.prompt_token_ids, array):
            self.prompt_token_ids = array("i", self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        # under a grammar, an end token is allowed only if the output may end there
        ignores_eos = self.params.ignore_eos and self.grammar is None
        end_tokens = frozenset() if ignores_eos else eos_token_ids
        self.stop_token_ids = end_tokens | frozenset(self.params.stop_token_ids or ())
        self.has_prompt_logprobs = self.params.prompt_logprobs is not None
        self.reads_whole_prompt |= self.has_prompt_logprobs

    def restart(self) -> None:
        """Forget everything that is on workers, which are gone; prompt, output and counts of statistics stay."""
        if self.status is not RequestStatus.WAITING:
            self.status = RequestStatus.PREEMPTED
        self.row, self.stop_reason, self.kv_transfer_output = -1, None, None
        self.block_ids, self.block_hashes, self.group_block_ids, self.num_freed = [], [], [], []
        self.capacity = self.num_prefill = self.num_computed = self.num_published = self.num_loaded = 0
        self.num_retired = self.num_hits = self.num_in_flight = self.num_proposed = 0
        self.states = None
        self.last_sampled_step = -1
        self.is_held, self.can_load = False, True

    @property
    def min_tokens(self) -> int:
        """Fewest tokens of an output that ends with a stop token; a grammar may leave an end token alone before."""
        return self.params.min_tokens if self.grammar is None else 0

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

    def blocks_between(self, first: int, last: int) -> Iterator[tuple[int, int, list[int]]]:
        """Those of its blocks ``first`` to ``last - 1`` that it has, of each group: group, number of the first one in
        the sequence, ids. Of states that is each one that it keeps: the state after these blocks."""
        yield 0, first, self.block_ids[first:last]
        for group, (block_ids, num_freed) in enumerate(zip(self.group_block_ids, self.num_freed, strict=True), 1):
            begin = max(first, num_freed)
            yield group, begin, block_ids[begin:last]
        if (states := self.states) is not None:
            for position, slot in states.kept:
                if first < (num_blocks := position // states.block_size) <= last:
                    yield len(self.group_block_ids) + 1, num_blocks - 1, [slot]

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
        mine = (self.priority, self.turn, self.sequence_number)
        return mine < (other.priority, other.turn, other.sequence_number)
