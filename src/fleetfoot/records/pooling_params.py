"""`PoolingParams`: the parameters of a request for a vector or a score. Names follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fleetfoot.utils.validation import checked_keywords

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify")


@checked_keywords
@dataclass(slots=True)
class PoolingParams:
    """What is returned of a prompt's hidden states. None: the model's own default.

    Creating an object validates every field, and raises a ValueError that names the field and the value.
    """

    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the end of the prompt; -1: as many as the model's length allows."""
    dimensions: int | None = None
    """Elements of an embedding: the first ones, for models that were trained so (Kusupati et al. 2022, "Matryoshka
    Representation Learning")."""
    use_activation: bool | None = None
    """Whether embeddings are normalised to length 1, and softmax or sigmoid is applied to scores."""
    step_tag_id: int | None = None
    """Of a process reward model: return the scores of these tokens alone."""
    task: str | None = None
    """One of POOLING_TASKS."""

    def __post_init__(self) -> None:
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1), ("step_tag_id", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be None or an integer of at least {least}, got {value!r}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be None, -1 or at least 1, got 0")
        if not (self.use_activation is None or isinstance(self.use_activation, bool)):
            raise ValueError(f"use_activation must be None, True or False, got {self.use_activation!r}")
        if self.task is not None and self.task not in POOLING_TASKS:
            raise ValueError(f"task must be None or one of {', '.join(POOLING_TASKS)}, got {self.task!r}")

    def clone(self, **changes: Any) -> PoolingParams:
        """A validated copy."""
        return replace(self, **changes)
