"""How many tokens of prompts join a step while other clients wait for it."""

from __future__ import annotations

_FIRST, _LEAST, _MEASURED = 512, 128, 64
"""Tokens before anything was measured, the least of a step, and the fewest that are timed: a step has fixed costs."""


class PromptPace:
    """The tokens of prompts that a step takes a set time for, as measured in the last steps.

    Steps without prompts show what decodes take, which is no part of the time. ``step_s``: the time in seconds; None:
    steps are as long as the budget allows. ``most``: the most tokens in a step.
    """

    def __init__(self, step_s: float | None, most: int) -> None:
        self._step_s = step_s
        self._most = most
        self._decode_s = 0.0
        self.limit = most if step_s is None else min(_FIRST, most)

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Record a step that has ended."""
        if self._step_s is None:
            return
        if not num_prompt_tokens:
            self._decode_s = seconds
        elif num_prompt_tokens >= _MEASURED:
            own = max(seconds - self._decode_s if num_decodes else seconds, seconds / 4)
            found = (self.limit + num_prompt_tokens * self._step_s / own) / 2
            self.limit = max(min(_LEAST, self._most), min(int(found), self._most))
