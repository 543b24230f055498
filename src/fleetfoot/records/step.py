"""What the scheduler tells the runner in a step, and what comes back. Small records that travel between processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.logprobs import RowLogprobs
from fleetfoot.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fleetfoot.records.request import Request


@dataclass(slots=True)
class NewRequest:
    """A request that takes a row of the runner's state: new, or back from a preemption."""

    request_id: str
    row: int
    """The row that it keeps until it is named in `SchedulerOutput.finished`."""
    token_ids: list[int]
    """All tokens known so far: the prompt, and after a preemption the output too."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in its blocks (prefix cache hits)."""
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    """End tokens and the request's own; held back until min_tokens."""
    bad_words_token_ids: list[list[int]]
    max_tokens_in_all: int = sys.maxsize
    """Most tokens of prompt and output together. With drafts, a query may reach beyond the last position that is ever
    an input, ``max_tokens_in_all - 2``: what lies there is computed for nothing and must be written nowhere."""
    packed_prompt: bytes | None = None
    """The first ``num_prompt_tokens`` of ``token_ids`` as int32, if they are there in that form: a list of thousands of
    ints takes long to convert, and admission had to do so."""

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        """A request that has just got its row and blocks."""
        return cls(
            request_id=request.request_id,
            row=request.row,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed,
            block_ids=list(request.block_ids),
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            max_tokens_in_all=request.max_tokens_in_all,
            packed_prompt=request.packed_prompt,
        )


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Three groups of requests stand in batch order: decodes, prefills that end, prefills that go on.

    A decode has one token to compute, and ``num_drafts`` more to verify; the first ``num_sampled`` rows (decodes, and
    prefills that reach the end of their known tokens) each yield a token, or several if drafts are accepted. A step
    without rows is idle: it only carries what the KV connector has to do, and rows that were given back.
    """

    step: int
    rows: list[int]
    """Batch order, as rows of the runner's state."""
    num_scheduled_tokens: list[int]
    """Tokens to compute, for each of ``rows``."""
    num_decodes: int
    num_sampled: int
    total_num_scheduled_tokens: int
    new_requests: list[NewRequest] = field(default_factory=list)
    """They may be named in ``rows`` of this very step."""
    new_block_ids: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(row, blocks that it has, block ids to append), for rows taken in an earlier step."""
    finished: list[tuple[str, int]] = field(default_factory=list)
    """(request id, row) of rows given back since the last step: ended, or preempted. Apply before ``new_requests``."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended (preempted ones did not), for connectors."""
    num_drafts: int = 0
    """Draft tokens that every decode verifies in this step, behind the token sampled last; 0: none."""
    num_to_propose: int = 0
    """Draft tokens to propose at the end of this step for each request that samples; 0: none, though a drafter with a
    KV cache of its own still fills it."""
    awaited_step: int = -1
    """What a rank that is not last in its pipeline must have heard before it makes this step's inputs: what was sampled
    in all steps up to this one. It is the newest step that sampled for one of ``rows``, or, if that is later, the
    newest whose result the host had seen (which costs no waiting, and keeps the steps of a row's last owner from its
    new one). -1: nothing, and always where there is no pipeline."""
    longest_decode: int = 0
    """Tokens that the decode with the most of them attends to, its own too, in a step that holds prefills; else 0."""
    kv_connector_metadata: object | None = None
    """What the scheduler's side of the KV connector tells the workers' side."""

    @property
    def is_idle(self) -> bool:
        return not self.rows


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step yielded, in the order of `SchedulerOutput.rows`."""

    sampled_token_ids: list[list[int]]
    """For each of the first ``num_sampled`` rows, the new tokens: one, or more with accepted drafts; none where the
    request had reached its length before (only the device knew). Empty on ranks that do not sample."""
    logprobs: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    """Batch index -> an entry for each new token, for requests that asked for logprobs."""
    prompt_logprobs: dict[int, tuple[int, list[RowLogprobs]]] = field(default_factory=dict)
    """Batch index -> (position of the first of them in the prompt, entries for the prompt tokens that this chunk
    predicts). The prompt's first token has none; after a preemption the same ones come again."""
    invalid: dict[int, str] = field(default_factory=dict)
    """Batch index -> why the last of its new tokens means nothing (logits that are not numbers); those before it do."""
    num_drafted: list[int] = field(default_factory=list)
    """For each decode, how many of the ``num_drafts`` were real proposals (n-gram lookup may have found fewer); empty
    where there were none. Accepted are ``len(sampled_token_ids[i]) - 1``."""
    kv_connector_output: KVConnectorOutput | None = None

    def get(self) -> ModelRunnerOutput:
        """It is here already; an asynchronous output waits for the device instead."""
        return self
