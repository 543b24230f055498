"""Warm-up: the steps that run, and those that are dry, before the first request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fleetfoot.kernels.runtime.row_buckets import row_buckets
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest, WarmUpOutput
from fleetfoot.runner.graphs import BatchShape

NAME = "warm-up"
_LIBRARY_TOKENS = 512
"""Tokens from which on eager prompts of powers of two run, so that the library's kernels are loaded."""
_FEW_ROWS = 256
"""Rows up to which kernels depend on their bucket in more ways than by `distinct_rows`."""
_MANY_REQUESTS = 32
"""Requests of a batch for which attention has another kernel than for few."""
_LONG_PROMPT = 512


def warm_up_steps(
    max_num_batched_tokens: int, max_model_len: int, block_size: int, blocks: Sequence[int] = (0,)
) -> list[WarmUpOutput]:
    """A prefill and a decode of one request, in row 0 and one of ``blocks`` in each of its tables.

    They bypass the scheduler. What they leave in rows and blocks is overwritten before it is read.
    """
    length = max(1, min(4, block_size, max_num_batched_tokens, max_model_len - 1))
    request = Request(NAME, array("i", [0] * length), SamplingParams(temperature=1.0), max_tokens=2, seed=0)
    request.row, num_blocks = 0, length // block_size + 1
    request.block_ids, *request.group_block_ids = ([block] * num_blocks for block in blocks)

    def step(number: int, num_tokens: int, new_requests: list[NewRequest]) -> WarmUpOutput:
        num_decodes = int(num_tokens == 1)
        return WarmUpOutput(number, [0], [num_tokens], num_decodes, 1, num_tokens, new_requests=new_requests)

    return [step(-2, length, [NewRequest.of(request)]), step(-1, 1, [])]


@dataclass(frozen=True, slots=True)
class EagerStep:
    """A step without a graph."""

    shape: BatchShape
    num_to_propose: int = 0
    reads_all: bool = False
    """Hidden states of all tokens are read, for prompt logprobs."""


def eager_steps(
    sizes: Iterable[int], *, max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int
) -> Iterator[EagerStep]:
    """Steps that together launch every kernel of steps without a graph. Kernels depend on the buckets of the rows of
    tokens and of logits, and on the lengths of queries. ``sizes``: requests of decodes without a graph."""
    few = [rows for rows in row_buckets(max_num_batched_tokens) if rows <= _FEW_ROWS]
    for length in reversed(few):
        yield EagerStep(prompt(length), num_drafts)
        yield EagerStep(prompt(length), num_drafts, reads_all=True)
    yield EagerStep(_mixed(1, 1, 0, num_sampled=0))
    width = 1 + num_drafts
    for number in sorted({1, min(_MANY_REQUESTS, max_num_seqs - 1), max_num_seqs - 1} - {0}):
        if 2 * number <= max_num_batched_tokens:
            yield EagerStep(_mixed(number, 2, 0), num_drafts)
        for each in {1, width}:  # beside decodes with and without drafts
            if number * each < max_num_batched_tokens:
                yield EagerStep(_mixed(1, 1, number, each), num_drafts)
                room = max_num_batched_tokens - number * each
                yield EagerStep(_mixed(1, min(room, _LONG_PROMPT), number, each), num_drafts)
    for number in sizes:
        for context in (1, 0):
            for num_to_propose in {0, num_drafts}:
                for each in {1, width}:
                    if number * each <= max_num_batched_tokens:
                        yield EagerStep(_decode(number, each, context), num_to_propose)


def prompt(length: int) -> BatchShape:
    """A step with one prompt."""
    return _mixed(1, length, 0)


def library_steps(max_num_batched_tokens: int) -> list[BatchShape]:
    """Prompts of different kernels of the library."""
    powers = (1 << power for power in range(max_num_batched_tokens.bit_length()))
    return [prompt(size) for size in {*(size for size in powers if size >= _LIBRARY_TOKENS), max_num_batched_tokens}]


def _mixed(
    num_prompts: int, length: int, num_decodes: int, width: int = 1, num_sampled: int | None = None
) -> BatchShape:
    """``num_decodes`` of ``width`` tokens, and prompts of ``length`` tokens."""
    num_reqs, num_tokens = num_decodes + num_prompts, num_decodes * width + num_prompts * length
    sampled = num_reqs if num_sampled is None else num_sampled
    longest = max(length, width)
    return BatchShape(num_reqs, num_tokens, num_decodes, sampled, longest, num_reqs, num_tokens, width - 1)


def _decode(num_reqs: int, width: int, max_context: int) -> BatchShape:
    sizes = num_reqs, num_reqs * width
    return BatchShape(*sizes, num_reqs, num_reqs, width, *sizes, width - 1, max_context)
