"""What a benchmark asks of the engine: prompts, lengths and times, all from one seed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleetfoot.records.prompts import PromptType

if TYPE_CHECKING:
    import numpy as np

_ARRIVALS = 1 << 30
"""The random stream of arrival times, which no other uses."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths in tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, or ``100:1024``."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high) if colon else int(low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no length; write 128, or 100:1024 for a range") from None
        if not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} is no range from at least 1 up; write 100:1024")
        return lengths

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths, evenly distributed."""
        drawn: list[int] = rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        return drawn

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: PromptType
    output_len: int
    """Tokens to generate, exactly."""
    due_s: float | None = None
    """When it arrives, in seconds after the start; None: at once, whenever the engine takes it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes requests; those of different streams, warm-up and measurement say, have only the prefix in common."""

    vocab_size: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    """Tokens that all prompts begin with."""
    seed: int = 0

    def random_requests(self, count: int, *, stream: tuple[int, ...]) -> list[BenchRequest]:
        """Prompts of random tokens."""
        rng = self._rng(*stream)
        prefix = self._rng().integers(0, self.vocab_size, size=self.prefix_len).tolist()
        input_lens = self.input_len.draw(rng, count)
        output_lens = self.output_len.draw(rng, count)
        requests = []
        for input_len, output_len in zip(input_lens, output_lens, strict=True):
            own = rng.integers(0, self.vocab_size, size=input_len - self.prefix_len).tolist()
            requests.append(BenchRequest({"prompt_token_ids": prefix + own}, output_len))
        return requests

    def dataset_requests(self, prompts: Sequence[PromptType], *, stream: tuple[int, ...]) -> list[BenchRequest]:
        """Given prompts."""
        output_lens = self.output_len.draw(self._rng(*stream), len(prompts))
        return [BenchRequest(prompt, output_len) for prompt, output_len in zip(prompts, output_lens, strict=True)]

    def with_arrivals(self, requests: Sequence[BenchRequest], rate: float) -> list[BenchRequest]:
        """The requests at the times of a Poisson process of ``rate`` per second; with an infinite one all at once."""
        if math.isinf(rate):
            return list(requests)
        gaps = self._rng(_ARRIVALS).exponential(1.0 / rate, size=len(requests))
        times = (gaps.cumsum() - gaps[0]).tolist()  # the first one arrives at once
        return [replace(request, due_s=due_s) for request, due_s in zip(requests, times, strict=True)]

    def _rng(self, *stream: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng([self.seed, *stream])
