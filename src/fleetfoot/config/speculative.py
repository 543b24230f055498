"""``speculative_config``: who proposes the tokens that the model then verifies several at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetfoot.config.json_record import checked_object, string_field

SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3")
_NEED_MODEL = ("draft_model", "eagle", "eagle3")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What ``--speculative-config`` says; names as in vLLM."""

    method: str = ""
    """One of SPECULATIVE_METHODS; empty: ``draft_model`` where there is a model, else ``ngram``."""
    model: str | None = None
    """Folder or hub id of the draft model; n-grams need none."""
    num_speculative_tokens: int = 0
    """Tokens proposed in a step; at least 1."""
    prompt_lookup_max: int | None = None
    """Longest n-gram to look for in the tokens so far."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram to look for."""

    def __post_init__(self) -> None:
        string_field("speculative_config", "model", self.model)
        if self.method == "":
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        if self.method not in SPECULATIVE_METHODS:
            raise ValueError(
                f"speculative_config: method is {self.method!r}; it can be {', '.join(SPECULATIVE_METHODS)}"
            )
        if self.method in _NEED_MODEL and self.model is None:
            raise ValueError(f"speculative_config: method {self.method!r} needs a model, and none is given")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"speculative_config: {name} is {value!r}; it must be an integer of at least 1")

    @classmethod
    def parse(cls, value: Any) -> SpeculativeConfig:
        """From a dictionary or JSON text.

        Raises:
            TypeError, ValueError: it is neither, or has a key or value that means nothing; says which.
        """
        return value if isinstance(value, cls) else cls(**checked_object("speculative_config", value, cls))
