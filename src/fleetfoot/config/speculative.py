"""``speculative_config``: how draft tokens are proposed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleetfoot.compat.names import SPECULATIVE_KEYS
from fleetfoot.config.json_fields import Bounds, JSONSettings


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A method of speculative decoding."""

    make: str = ""
    """``module:callable``, from a `DrafterContext` to a `Drafter`; imported where it is used. Empty: n-grams, which the
    runners look up themselves."""
    has_model: bool = False
    """Whether it drafts with the model that the setting ``model`` names."""


DRAFT_METHODS: dict[str, DraftMethod] = {
    "ngram": DraftMethod(),
    "draft_model": DraftMethod("fleetfoot.speculative.draft_model:DraftModel", has_model=True),
    "eagle": DraftMethod("fleetfoot.speculative.eagle:EagleDrafter", has_model=True),
    "mtp": DraftMethod("fleetfoot.speculative.eagle:MTPDrafter"),
}
"""By the names of the setting ``method``."""
EMBEDDED_EAGLE = "story-llama-eagle"
"""The name of the EAGLE head in the package, for its embedded model."""
MAX_SPECULATIVE_TOKENS = 64
"""More than any drafter predicts correctly."""
_NGRAM_MODELS = ("ngram", "[ngram]")
"""vLLM's values of ``model`` for n-grams."""
DEFAULT_PROMPT_LOOKUP_MAX, DEFAULT_PROMPT_LOOKUP_MIN = 5, 1
_COUNT: dict[str, Any] = {"bounds": Bounds("be an integer of at least 1", 1)}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(JSONSettings):
    """``--speculative-config``; names as in vLLM."""

    setting: ClassVar[str] = "speculative_config"
    neutral: ClassVar[Mapping[str, Any]] = {"draft_tensor_parallel_size": 1}
    advice: ClassVar[Mapping[str, str]] = SPECULATIVE_KEYS

    method: str = ""
    """One of DRAFT_METHODS; empty: ``draft_model`` if ``model`` is given, else ``ngram``."""
    model: str | None = None
    """Folder or hub id of the draft model or the EAGLE head; none for n-grams. ``eagle`` defaults to the embedded head
    for the embedded model."""
    num_speculative_tokens: int = field(default=0, metadata=_COUNT)
    """Draft tokens per step; required."""
    prompt_lookup_max: int | None = field(default=None, metadata=_COUNT)
    """Longest n-gram to look up in the tokens so far; has a default for method ``ngram``."""
    prompt_lookup_min: int | None = field(default=None, metadata=_COUNT)
    """Shortest n-gram to look up; likewise."""
    disable_by_batch_size: int | None = field(default=None, metadata=_COUNT)
    """Steps with more decodes than this propose no drafts; None: no limit."""
    adaptive: bool = True
    """Whether drafting is disabled at batch sizes where measurements show no gain."""

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if self.num_speculative_tokens == 0 and not isinstance(self.num_speculative_tokens, bool):
            raise ValueError(
                "speculative_config: num_speculative_tokens is missing or 0; it must be given, as an integer from 1 to "
                f"{MAX_SPECULATIVE_TOKENS}: how many tokens are proposed in a step (3 is a fair start)"
            )
        JSONSettings.__post_init__(self)
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"speculative_config: num_speculative_tokens is {self.num_speculative_tokens}; "
                f"it can be at most {MAX_SPECULATIVE_TOKENS}"
            )
        if self.method == "":
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        self._check_method()
        self._check_lookup()

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
        if self.method not in DRAFT_METHODS:
            raise ValueError(f"speculative_config: method is {self.method!r}; it can be {', '.join(DRAFT_METHODS)}")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("speculative_config: method 'draft_model' needs a model, and none is given")
        if self.model is not None and not DRAFT_METHODS[self.method].has_model:
            raise ValueError(
                f"speculative_config: model is {self.model!r}, and method {self.method!r} takes none; leave it out, or "
                "set method to 'draft_model' or 'eagle'"
            )

    def _check_lookup(self) -> None:
        """Fill in missing bounds of n-grams: the default, or the other bound if the default contradicts it."""
        if self.method != "ngram":
            for name in ("prompt_lookup_max", "prompt_lookup_min"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"speculative_config: {name} is {getattr(self, name)}, which means nothing for method "
                        f"{self.method!r}; leave it out, or set method to 'ngram'"
                    )
            return
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
