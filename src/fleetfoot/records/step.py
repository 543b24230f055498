"""A step: what the scheduler sends to the runner, what the runner returns, and what the scheduler makes of it."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from fleetfoot.records.request import Request


@dataclass(slots=True)
class NewRequest:
    """A request that gets a row of the runner's state: new, or resumed after a preemption."""

    request_id: str
    row: int
    """The row that it keeps until it is named in `SchedulerOutput.finished`."""
    token_ids: array[int]
    """All known tokens, int32: the prompt, and after a preemption the output too. Empty on ranks that do not read
    tokens; see `without_token_ids`."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens with KV already in its blocks (prefix cache hits)."""
    block_ids: list[int]
    """What is of the first group of layers."""
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    """The model's end tokens and the request's own; suppressed until ``min_tokens``."""
    bad_words_token_ids: list[list[int]]
    max_total_tokens: int = sys.maxsize
    """Most tokens of prompt and output together. The last position that is ever an input is ``max_total_tokens - 2``.
    Drafts may extend past it: results there are discarded, and no KV is written."""
    num_tokens: int = 0
    """How many tokens are known; 0: as many as ``token_ids`` holds."""
    pooling_params: PoolingParams | None = None
    group_block_ids: list[list[int]] = field(default_factory=list)
    """Block ids of each other group; 0: before what its layers read. Tables of states are filled by
    `SchedulerOutput.new_group_block_ids` alone."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or len(self.token_ids)

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        """The record of a request that has just got its row and blocks."""
        return cls(
            request_id=request.request_id,
            row=request.row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed,
            block_ids=list(request.block_ids),
            params=request.params,
            seed=request.seed,
            # a grammar's masks have its bans: one that leaves an end token alone wins
            stop_token_ids=request.stop_token_ids if request.grammar is None else frozenset(),
            bad_words_token_ids=request.bad_words_token_ids,
            max_total_tokens=request.max_total_tokens,
            pooling_params=request.pooling_params,
            group_block_ids=[list(block_ids) for block_ids in request.group_block_ids]
            + [[] for _ in (request.states.slots if request.states is not None else ())],
        )


class Agreement(NamedTuple):
    """What data-parallel ranks have in common in a step."""

    num_tokens: int = 0
    """Rows that each rank has in layers with experts, its own tokens and padding; 0: there is no agreement."""
    kind: str = ""
    """The kind of a graph with so many tokens that every rank replays (`fleetfoot.runner.graphs.StepShape`); empty: all
    run eagerly."""


NO_AGREEMENT = Agreement()
FEW_DECODES = 8
"""Decodes of a step up to which its `SchedulerOutput.longest_decode` is known."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Its requests stand in batch order: decodes, prefills that reach their end, other prefill chunks.

    A decode computes one token and verifies ``num_drafts`` more. Each of the first ``num_sampled`` requests (decodes,
    and prefills that reach the end of their known tokens) samples a token, or several if drafts are accepted. A step
    without requests is idle: it carries work for the KV connector, and freed rows.
    """

    step: int
    rows: list[int]
    """The requests of the step, in batch order, as rows of the runner's state."""
    num_scheduled_tokens: list[int]
    """Tokens to compute for each of ``rows``."""
    num_decodes: int
    num_sampled: int
    total_num_scheduled_tokens: int
    new_requests: list[NewRequest] = field(default_factory=list)
    """Requests that get a row. ``rows`` of this step may include it."""
    new_block_ids: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(row, number of blocks it has, block ids to append), for rows of earlier steps."""
    new_group_block_ids: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    """(group, row, number of blocks it has, block ids to append), for groups of layers after the first. Rows may be new
    in this step. The group of states has a table for each of its slots, by ``position % num_slots``: ``group + index``;
    an entry is the slot of the state after the token at a position in a block, and only those that are read are set."""
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, tokens, slot): the state after so many of the row's tokens in this step, whole chunks
    (`CHUNK` of `forward_context`), is written to a slot besides."""
    changed_slabs: list[int] = field(default_factory=list)
    """Slabs of the KV cache that another group has got. They must be cleared before anything is written to them, and
    after what connectors save of their earlier blocks."""
    finished: list[tuple[str, int]] = field(default_factory=list)
    """(request id, row) of rows freed since the last step: ended or preempted. Apply before ``new_requests``."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended since the last step (preempted ones did not), for connectors."""
    num_drafts: int = 0
    """Draft tokens that each decode verifies after its last sampled token; 0: none."""
    num_to_propose: int = 0
    """Draft tokens to propose at the end of this step for each request that samples; 0: none, but a drafter with a KV
    cache still fills it."""
    awaited_step: int = -1
    """Ranks that are not last in their pipeline must apply the sampled tokens of all steps up to this one before they
    prepare inputs. It is the newest step that sampled for one of ``rows``, or the newest one with a result on the host,
    if that is later: those cost no waiting, and keep the steps of a row's previous owner away from its new one.
    -1: none, and always so without a pipeline."""
    longest_decode: int = 0
    """Context length of the longest decode, its new tokens included, in a step that also holds prefills, or has at most
    `FEW_DECODES`; else 0."""
    kv_connector_metadata: object | None = None
    """From the scheduler's side of the KV connector to the workers' side."""
    agreement: Agreement = NO_AGREEMENT
    """Made with other data-parallel ranks whose layers communicate with this one's. A step without requests computes
    padding beside them, which writes no KV."""
    structured: list[int] = field(default_factory=list)
    """Batch indices of the requests that sample under a grammar. If there are any, `TokenMasks` follow the step: the
    forward pass is queued before they are known."""

    @property
    def is_idle(self) -> bool:
        return not self.rows

    @property
    def of_ranks(self) -> tuple[SchedulerOutput, ...]:
        """The parts of data-parallel ranks that step together; this one alone if there is one rank."""
        return (self,)


@dataclass(slots=True)
class StepOfRanks(SchedulerOutput):
    """A step of data-parallel ranks. Its requests, ``rows`` and counts are those of one rank after the other's."""

    parts: tuple[SchedulerOutput, ...] = ()
    """The step of each rank."""
    is_scheduled: tuple[bool, ...] = ()
    """Which ranks' schedulers have made their part, and await its result."""

    @classmethod
    def of(cls, step: int, parts: Sequence[SchedulerOutput], is_scheduled: Sequence[bool]) -> StepOfRanks:
        """The step of these parts."""
        rows, structured = list[int](), list[int]()
        for part in parts:
            structured += [len(rows) + index for index in part.structured]
            rows += part.rows
        return cls(
            step,
            rows,
            [count for part in parts for count in part.num_scheduled_tokens],
            sum(part.num_decodes for part in parts),
            sum(part.num_sampled for part in parts),
            sum(part.total_num_scheduled_tokens for part in parts),
            new_requests=[new for part in parts for new in part.new_requests],
            structured=structured,
            parts=tuple(parts),
            is_scheduled=tuple(is_scheduled),
        )

    @property
    def of_ranks(self) -> tuple[SchedulerOutput, ...]:
        return self.parts


@dataclass(slots=True)
class TokenMasks:
    """The tokens that grammars allow in a step, for some rows of its logits."""

    rows: list[int]
    """The row of logits of each mask: ``1 + num_drafts`` for each decode, then one for each prefill that ends."""
    masks: np.ndarray
    """``[len(rows), ceil(vocab_size / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is set if ``t`` is allowed."""
    memory: np.ndarray | None = None
    """int32 of which the masks are a part, and which live as long as the engine. The masks stay unchanged until the
    step has been retired. None: they are in other memory."""
    offset: int = 0
    """int32 of ``memory`` before the masks."""

    @property
    def of_ranks(self) -> tuple[TokenMasks | None, ...]:
        """As of `SchedulerOutput`."""
        return (self,)


@dataclass(slots=True)
class MasksOfRanks(TokenMasks):
    """The masks of `StepOfRanks`."""

    parts: tuple[TokenMasks | None, ...] = ()
    """The masks of each rank; None: every token is allowed."""

    @property
    def of_ranks(self) -> tuple[TokenMasks | None, ...]:
        return self.parts


@dataclass(slots=True)
class WarmUpOutput(SchedulerOutput):
    """A step of the warm-up, of no request. A runner makes it for itself: the scheduler, the KV connector and
    statistics never get it, and `ForwardContext.is_warm_up` is set in its forward passes."""


def without_token_ids(output: SchedulerOutput) -> SchedulerOutput:
    """``output`` as a middle rank of a pipeline needs it, without the tokens of new requests.

    The first rank embeds tokens. The last rank keeps them for penalties, bad words, prompt logprobs and drafts, also
    where no request uses those yet: a later request may share the prefix. Other ranks read hidden states only.
    """
    if not output.new_requests:
        return output
    return replace(output, new_requests=[replace(new, token_ids=array("i")) for new in output.new_requests])


class RowLogprobs(NamedTuple):
    """The log-probabilities of one position, on the host: of the sampled token, then of the most probable ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the sampled token; 1 for the most probable one."""

    def pack(self) -> PackedLogprobs:
        return _row_format(len(self.token_ids)).pack(*self.logprobs, *self.token_ids, self.rank)

    @classmethod
    def unpack(cls, packed: PackedLogprobs) -> RowLogprobs:
        size = len(packed) // 8
        words = _row_format(size).unpack(packed)
        return cls(list(words[size:-1]), list(words[:size]), words[-1])


@cache
def _row_format(size: int) -> struct.Struct:
    return struct.Struct(f"={size}f{size}ii")


PackedLogprobs = bytes
"""A `RowLogprobs` on its way to an output: the logprobs as float32, then the token ids and the rank as int32. A step
has many, most of which are read late or never; an object without references is not visited by garbage collections."""


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """What the balancing of experts has done so far; all but the seconds is the same on all ranks that share experts.
    Balancedness is the mean of the ranks' loads by the largest, for the load of the last round."""

    num_rounds: int = 0
    num_moved: int = 0
    """Experts that came to another slot."""
    balancedness: float = 1.0
    """Where experts were before the round, the mean of the layers."""
    least: float = 1.0
    """The same of the layer with the least."""
    expected: float = 1.0
    """Where the round has placed experts, the mean of the layers."""
    seconds: float = 0.0
    """Time of all rounds, beside steps."""
    rank_loads: tuple[float, ...] = ()
    """The share of the tokens of the last round that each rank's experts computed."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """The results of a step, in the order of `SchedulerOutput.rows`."""

    sampled_token_ids: list[list[int]]
    """The new tokens of each of the first ``num_sampled`` requests: one, or more with accepted drafts; none if the
    device had already counted the request's last token. Empty on ranks that do not sample."""
    logprobs: dict[int, list[PackedLogprobs]] = field(default_factory=dict)
    """Batch index -> an entry for each new token, for requests with logprobs."""
    prompt_logprobs: dict[int, tuple[int, list[PackedLogprobs]]] = field(default_factory=dict)
    """Batch index -> (position in the prompt of the first entry, entries for the prompt tokens that this chunk
    predicts). The prompt's first token has none. After a preemption the same entries are repeated."""
    invalid: dict[int, str] = field(default_factory=dict)
    """Batch index -> why the last of its new tokens is invalid (non-finite logits); earlier ones are valid."""
    num_drafted: list[int] = field(default_factory=list)
    """How many, for each decode, of the ``num_drafts`` were real proposals (n-gram lookup may find fewer); empty if
    there were none. ``len(sampled_token_ids[i]) - 1`` of them were accepted."""
    draft_token_ids: list[list[int]] = field(default_factory=list)
    """In a step with ``structured`` requests, the drafts that the next step of each of the first ``num_sampled``
    requests may verify (-1: none); empty without speculative decoding."""
    pooled: dict[int, tuple[list[int], bytes]] = field(default_factory=dict)
    """Batch index -> shape and float32 values of the result of a pooling request; it has no tokens."""
    kv_connector_output: KVConnectorOutput | None = None
    """Transfers that have ended."""
    balance: BalanceReport | None = None
    """None: as in the step before."""

    def get(self) -> ModelRunnerOutput:
        """This output: `PendingOutput` without copies in flight."""
        return self

    @property
    def of_ranks(self) -> tuple[ModelRunnerOutput, ...]:
        """As of `SchedulerOutput`."""
        return (self,)


@dataclass(slots=True)
class OutputOfRanks(ModelRunnerOutput):
    """The results of `StepOfRanks`."""

    parts: tuple[ModelRunnerOutput, ...] = ()

    @property
    def of_ranks(self) -> tuple[ModelRunnerOutput, ...]:
        return self.parts


class PendingOutput(Protocol):
    """The output of a step, while copies from the device may be in flight."""

    def get(self) -> ModelRunnerOutput:
        """Wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """Why a transfer failed."""

    reason: str
    """A sentence with what was expected and what was found."""
    timed_out: bool = False
    block: bytes | None = None
    """Identifies the invalid block for its connector, if one is known to be the cause."""


@dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that have ended since the last step, of one rank, or merged over all ranks.

    A rank reports each load and each send that it takes part in exactly once, when it no longer accesses the blocks.
    """

    loaded: set[str] = field(default_factory=set)
    """Requests with all their KV loaded."""
    failed: dict[str, TransferFailure] = field(default_factory=dict)
    """Failed loads; the contents of the requests' blocks are undefined."""
    sent: set[str] = field(default_factory=set)
    """Requests with held blocks that are no longer read: sent, or given up."""
    counters: dict[str, int] = field(default_factory=dict)
    """Increments since the last output: ``blocks_saved``, ``blocks_loaded``, ``bytes_saved``, ``bytes_loaded``, ... Of
    all ranks together once merged."""
    addresses: dict[int, str] = field(default_factory=dict)
    """Rank -> ``host:port`` at which other engines reach its side of the connector; reported in its first step."""

    @property
    def is_empty(self) -> bool:
        return not (self.loaded or self.failed or self.sent or self.counters or self.addresses)


class SequenceEnd(msgspec.Struct, array_like=True, gc=False):
    """The last of a sequence."""

    status: int
    """`RequestStatus`."""
    stop_reason: int | str | None
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int
    scheduled_ts: float
    kv_transfer_output: dict[str, Any] | None
    pooled: tuple[list[int], bytes] | None
    """As in `ModelRunnerOutput`."""

    @classmethod
    def of(cls, request: Request, pooled: tuple[list[int], bytes] | None = None) -> SequenceEnd:
        return cls(
            int(request.status),
            request.stop_reason,
            max(0, request.num_cached_tokens),
            request.num_drafted,
            request.num_accepted,
            request.scheduled_ts,
            request.kv_transfer_output,
            pooled,
        )


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output of a step for one sequence, from the scheduler to the client that makes its text, between processes
    too. (A struct is created faster than a dataclass, and steps create many.)"""

    number: int
    """`Request.sequence_number`; from a process to its clients, the number that the client has given."""
    new_token_ids: list[int]
    logprobs: list[PackedLogprobs] | None = None
    """An entry for each new token, for requests with logprobs."""
    prompt_logprobs: tuple[int, list[PackedLogprobs]] | None = None
    """As in `ModelRunnerOutput`."""
    end: SequenceEnd | None = None
    num_cached_tokens: int = -1
    """In the first output; -1: as before."""
    scheduled_ts: float = 0.0
    """In the first output."""
    seed_number: int = -1
    """See `EngineRequest.seed_number`, in the first output from a process; -1: as before."""

    @classmethod
    def last(cls, request: Request) -> EngineOutput:
        """The output of a request that has ended without new tokens."""
        output = cls(request.sequence_number, [])
        output.add_news(request)
        return output

    def add_news(self, request: Request, pooled: tuple[list[int], bytes] | None = None) -> None:
        """State what the first output of a request has, and the last one."""
        request.has_news = False
        self.num_cached_tokens, self.scheduled_ts = request.num_cached_tokens, request.scheduled_ts
        if request.is_finished:
            self.end = SequenceEnd.of(request, pooled)
