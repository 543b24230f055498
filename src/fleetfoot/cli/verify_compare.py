"""Two runs of the same requests, held against each other token by token and logprob by logprob. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.records.logprobs import Logprob
from fleetfoot.records.outputs import RequestOutput

_Entry = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first place where a request's outputs part; up to there both runners saw the same tokens."""

    request: int
    """Number of the request, from 0."""
    position: int
    """In the output, from 0."""
    tokens: tuple[int | None, int | None]
    """V1's and V2's; None: its output has ended."""
    gaps: tuple[float | None, float | None]
    """V1's and V2's most probable logprob there, less the second: what a rounding error must bridge."""
    error: str | None = None
    """Why a runner ended the request, if it did."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """A logprob that both runners returned."""

    request: int
    position: int
    """In prompt and output together, from 0."""
    token: int
    difference: float
    """V2's less V1's."""


@dataclass(slots=True)
class Comparison:
    """What came out."""

    num_tokens: int = 0
    """Output tokens that agree."""
    num_logprobs: int = 0
    """Logprobs compared."""
    differences: list[TokenDifference] = field(default_factory=list)
    """At most one for each request, in order."""
    largest: LogprobDifference | None = None
    """None: nothing could be compared."""

    @property
    def first(self) -> TokenDifference | None:
        """The earliest in a request's output; of several, that of the first request."""
        return min(self.differences, key=lambda difference: (difference.position, difference.request), default=None)

    def as_json(self) -> dict[str, Any]:
        largest = self.largest
        return {
            "equal": not self.differences,
            "num_equal_tokens": self.num_tokens,
            "first_difference": None if self.first is None else _as_json(self.first),
            "differences": [_as_json(difference) for difference in self.differences],
            "num_logprobs": self.num_logprobs,
            "largest_logprob_difference": None
            if largest is None
            else {
                "difference": largest.difference if math.isfinite(largest.difference) else None,
                "request": largest.request,
                "position": largest.position,
                "token": largest.token,
            },
        }


def compare(v1: Sequence[RequestOutput], v2: Sequence[RequestOutput]) -> Comparison:
    """Hold the outputs of the same requests against each other.

    Logprobs are compared where both runners returned one for the token, over the prompt and over the output up to and
    with the first token that differs: beyond it the runners go on from different texts.
    """
    comparison = Comparison()
    for request, (first, second) in enumerate(zip(v1, v2, strict=True)):
        _compare_request(comparison, request, first, second)
    return comparison


def _compare_request(comparison: Comparison, request: int, v1: RequestOutput, v2: RequestOutput) -> None:
    for position, pair in enumerate(zip(v1.prompt_logprobs or (), v2.prompt_logprobs or (), strict=True)):
        _compare_logprobs(comparison, request, position, *pair)
    first, second = v1.outputs[0], v2.outputs[0]
    num_equal = _num_equal(first.token_ids, second.token_ids)
    comparison.num_tokens += num_equal
    for position in range(num_equal + 1):
        entries = _at(first.logprobs, position), _at(second.logprobs, position)
        _compare_logprobs(comparison, request, len(v1.prompt_token_ids) + position, *entries)
    if num_equal < max(len(first.token_ids), len(second.token_ids)) or first.finish_reason != second.finish_reason:
        errors = [output.stop_reason for output in (first, second) if output.finish_reason == "error"]
        comparison.differences.append(
            TokenDifference(
                request=request,
                position=num_equal,
                tokens=(_at(first.token_ids, num_equal), _at(second.token_ids, num_equal)),
                gaps=(_gap(_at(first.logprobs, num_equal)), _gap(_at(second.logprobs, num_equal))),
                error=str(errors[0]) if errors else None,
            )
        )


def _compare_logprobs(
    comparison: Comparison, request: int, position: int, v1: _Entry | None, v2: _Entry | None
) -> None:
    if v1 is None or v2 is None:
        return
    for token, before in v1.items():
        if token not in v2:
            continue
        after = v2[token].logprob
        difference = 0.0 if after == before.logprob else after - before.logprob  # infinities may be equal
        comparison.num_logprobs += 1
        if comparison.largest is None or _size(difference) > _size(comparison.largest.difference):
            comparison.largest = LogprobDifference(request, position, token, difference)


def _size(difference: float) -> float:
    """What is no number is larger than any."""
    return math.inf if math.isnan(difference) else abs(difference)


def _num_equal(first: list[int], second: list[int]) -> int:
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return min(len(first), len(second))


def _gap(entry: _Entry | None) -> float | None:
    if entry is None or len(entry) < 2:
        return None
    best, second, *_ = sorted((chance.logprob for chance in entry.values()), reverse=True)
    return best - second


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values is not None and index < len(values) else None


def _as_json(difference: TokenDifference) -> dict[str, Any]:
    return {
        "request": difference.request,
        "position": difference.position,
        "v1_token": difference.tokens[0],
        "v2_token": difference.tokens[1],
        "v1_gap": difference.gaps[0],
        "v2_gap": difference.gaps[1],
        "error": difference.error,
    }
