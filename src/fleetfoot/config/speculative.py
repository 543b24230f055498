"""``speculative_config``: who proposes the tokens that the model then verifies several at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fleetfoot.config.json_record import checked_object, string_field
from fleetfoot.config.vllm_names import SPECULATIVE_KEYS

SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle")
EMBEDDED_EAGLE = "story-llama-eagle"
"""The name of the EAGLE head that the package carries for its embedded model."""
MAX_SPECULATIVE_TOKENS = 64
"""Beyond this a step would verify more than any drafter gets right."""
_NGRAM_MODELS = ("ngram", "[ngram]")
"""What scripts written for vLLM may give as the model to ask for n-grams."""
DEFAULT_PROMPT_LOOKUP_MAX, DEFAULT_PROMPT_LOOKUP_MIN = 5, 1


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What ``--speculative-config`` says; names as in vLLM."""

    method: str = ""
    """One of SPECULATIVE_METHODS; empty: ``draft_model`` where there is a model, else ``ngram``."""
    model: str | None = None
    """Folder or hub id of the draft model or the EAGLE head; n-grams need none. The embedded model has a head of its
    own, which ``eagle`` takes when none is named."""
    num_speculative_tokens: int = 0
    """Tokens proposed in a step; must be given."""
    prompt_lookup_max: int | None = None
    """Longest n-gram to look for in the tokens so far; filled in where n-grams are the method."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram to look for; likewise."""
    disable_by_batch_size: int | None = None
    """Steps with more decodes than this are not drafted for; None: all are."""
    adaptive: bool = True
    """Whether drafting turns itself off at batch sizes where it is seen not to pay; False: it goes on regardless."""

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):  # scripts pass either
            object.__setattr__(self, "model", os.fspath(self.model))
        string_field("speculative_config", "model", self.model)
        if self.method == "":
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        self._check_method()
        self._check_numbers()
        if self.method == "ngram":
            self._fill_in_lookup()

    def _check_method(self) -> None:
        if self.model in _NGRAM_MODELS:
            raise ValueError(
                f"speculative_config: model is {self.model!r}, which is no model here; set method to 'ngram' and leave "
                "model out (a folder of that name is './ngram')"
            )
        if self.method == "eagle3":
            raise ValueError(
                "speculative_config: method is 'eagle3', and EAGLE-3 heads, which read several of the target's layers, "
                "are not supported; method 'eagle' takes heads of the first EAGLE"
            )
        if self.method not in SPECULATIVE_METHODS:
            raise ValueError(
                f"speculative_config: method is {self.method!r}; it can be {', '.join(SPECULATIVE_METHODS)}"
            )
        if self.method == "draft_model" and self.model is None:
            raise ValueError("speculative_config: method 'draft_model' needs a model, and none is given")
        if self.method == "ngram" and self.model is not None:
            raise ValueError(
                f"speculative_config: model is {self.model!r}, and method 'ngram' takes none; leave it out, or set "
                "method to 'draft_model' or 'eagle'"
            )

    def _check_numbers(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"speculative_config: adaptive is {self.adaptive!r}; it must be true or false")
        if self.num_speculative_tokens == 0 and not isinstance(self.num_speculative_tokens, bool):
            raise ValueError(
                "speculative_config: num_speculative_tokens is missing or 0; it must be given, as an integer from 1 to "
                f"{MAX_SPECULATIVE_TOKENS}: how many tokens are proposed in a step (3 is a fair start)"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size"):
            value = getattr(self, name)
            if value is None and name != "num_speculative_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"speculative_config: {name} is {value!r}; it must be an integer of at least 1")
            if name.startswith("prompt_lookup") and self.method != "ngram":
                raise ValueError(
                    f"speculative_config: {name} is {value}, which means nothing for method {self.method!r}; leave it "
                    "out, or set method to 'ngram'"
                )
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"speculative_config: num_speculative_tokens is {self.num_speculative_tokens}; "
                f"it can be at most {MAX_SPECULATIVE_TOKENS}"
            )

    def _fill_in_lookup(self) -> None:
        """The bound that is not given is its default, or the other one if that leaves nothing between them."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None:
            longest = max(DEFAULT_PROMPT_LOOKUP_MAX, shortest or 0)
        if shortest is None:
            shortest = min(DEFAULT_PROMPT_LOOKUP_MIN, longest)
        if shortest > longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min is {shortest} and prompt_lookup_max is {longest}; "
                "the shortest n-gram cannot be longer than the longest"
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    @classmethod
    def parse(cls, value: Any) -> SpeculativeConfig:
        """From a dictionary or JSON text.

        Raises:
            TypeError, ValueError: it is neither, or has a key or value that means nothing; says which.
        """
        return (
            value
            if isinstance(value, cls)
            else cls(**checked_object("speculative_config", value, cls, SPECULATIVE_KEYS))
        )
