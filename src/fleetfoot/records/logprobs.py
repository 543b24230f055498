"""Log-probabilities of outputs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token of the vocabulary."""
    decoded_token: str | None = None


class RowLogprobs(NamedTuple):
    """One position, on the host: the sampled token, then the most probable ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def logprob_dict(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    rank: int,
    decode: Callable[[int], str] | None = None,
) -> dict[int, Logprob]:
    """The entry of one position: the sampled token first, then the most probable ones in order.

    Args:
        token_ids, logprobs: the sampled token, followed by the most probable ones, descending.
        rank: of the sampled token. If it is among the most probable ones, its index there is used, so that tied tokens
            have different ranks.
        decode: token id to text; None leaves `Logprob.decoded_token` empty.
    """
    entries = {token_ids[0]: Logprob(logprobs[0], rank)}
    for place, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:], strict=True), start=1):
        entries[token_id] = Logprob(logprob, place)
    if decode is not None:
        for token_id, entry in entries.items():
            entry.decoded_token = decode(token_id)
    return entries
