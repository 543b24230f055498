"""What a runner is told about speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.speculative.speculator import Speculator


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """Prompt lookup decoding (Saxena 2023): the tokens behind the last occurrence of the sequence's last n-gram."""

    max_ngram: int
    """Tokens of the longest n-gram that is looked for; it is tried first."""
    min_ngram: int
    """Tokens of the shortest."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made: by n-gram lookup, by a model, or not at all."""

    num_drafts: int = 0
    """``k``, in each step that drafts; 0: there is no speculative decoding."""
    ngram: NgramSettings | None = None
    drafter: Speculator | None = None

    @property
    def is_on(self) -> bool:
        return self.num_drafts > 0


NO_SPECULATION = Speculation()
