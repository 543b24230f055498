"""Adaptive speculative decoding: measures while the engine runs whether drafts make it faster.

Verifying drafts makes a step longer and yields more than one token per request. Where the first outweighs the second,
because the device is compute-bound or few drafts are accepted, steps without drafts are faster.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from fleetfoot.scheduler.drafting import DraftController

NUM_SAMPLES = 12
"""Steps of each kind that a decision is based on."""
FIRST_PATIENCE = 256
"""Steps until a decision is tested again; doubled each time that it is confirmed."""
LONGEST_PATIENCE = 8192
MEASURING = "steps without drafts are measured"


class _Kind:
    """The latest steps with drafts, or without, of one group of batch sizes."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)  # mean tokens per request, seconds

    @property
    def is_known(self) -> bool:
        return len(self.steps) == NUM_SAMPLES

    @property
    def speed(self) -> float:
        """Tokens per second of a request, by the median time: a few steps may wait for a compiler or a busy machine."""
        tokens, seconds = zip(*self.steps, strict=True)
        return sum(tokens) / len(tokens) / max(median(seconds), 1e-9)


class _BatchSize:
    """The measurements of one group of batch sizes, and the decision."""

    def __init__(self) -> None:
        self.with_drafts, self.without = _Kind(), _Kind()
        self.pays = True
        self._patience = FIRST_PATIENCE
        self._steps_left = 0

    @property
    def is_measured(self) -> bool:
        return self.with_drafts.is_known and self.without.is_known

    def add(self, num_drafts: int, tokens: float, seconds: float) -> None:
        was_measured = self.is_measured
        (self.with_drafts if num_drafts else self.without).steps.append((tokens, seconds))
        if not self.is_measured:
            return
        pays = self.with_drafts.speed > self.without.speed
        if not was_measured:  # a test has ended
            self._patience = min(2 * self._patience, LONGEST_PATIENCE) if pays == self.pays else FIRST_PATIENCE
            self._steps_left = self._patience
        self.pays = pays
        self._steps_left -= 1
        if self._steps_left <= 0:  # measure the other kind again
            (self.without if pays else self.with_drafts).steps.clear()


class AdaptiveDrafts(DraftController):
    """Proposes drafts where measurements show a gain.

    Batch sizes are grouped by powers of two: 1, 2-3, 4-7, ... Each group starts with drafts, then runs without them for
    enough steps to compare, and keeps the faster kind. From time to time it measures the other kind again.
    """

    def __init__(self, num_drafts: int, max_num_decodes: int | None = None) -> None:
        super().__init__(num_drafts, max_num_decodes)
        self._sizes: defaultdict[int, _BatchSize] = defaultdict(_BatchSize)

    def _why_not(self, num_decodes: int) -> str:
        if reason := super()._why_not(num_decodes):
            return reason
        size = self._sizes[num_decodes.bit_length()]
        if not size.with_drafts.is_known:
            return ""
        if not size.without.is_known:
            return MEASURING
        if size.pays:
            return ""
        if num_decodes == 1:
            return "it does not pay at 1 request"
        first = 1 << (num_decodes.bit_length() - 1)
        return f"it does not pay at {first} to {2 * first - 1} requests"

    def observe(
        self, num_decodes: int, num_drafts: int, num_drafted: int, num_accepted: int, num_tokens: int, seconds: float
    ) -> None:
        if not num_decodes or num_tokens != num_decodes * (1 + num_drafts):
            return  # with prefills, the time is not comparable
        self._sizes[num_decodes.bit_length()].add(num_drafts, 1 + num_accepted / num_decodes, seconds)
