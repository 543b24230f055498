"""`PoolingParams`: the parameters of a request for a vector or a score. Names follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fleetfoot.config.pooling import ACTIVATION_NAMES, merge_activation
from fleetfoot.utils.validation import FieldError, checked_keywords

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify")


@checked_keywords
@dataclass(slots=True)
class PoolingParams:
    """What is returned of a prompt's hidden states. None: the model's own default.

    Creating an object validates every field, and raises a ValueError that names the field and the value.
    """

    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the beginning of the prompt, special ones at its end included; -1: as many as the
    model's length allows."""
    dimensions: int | None = None
    """Elements of an embedding: the first ones, for models that were trained so (Kusupati et al. 2022, "Matryoshka
    Representation Learning")."""
    use_activation: bool | None = None
    """Whether embeddings are normalised to length 1, and softmax or sigmoid is applied to scores. None: as the model's
    checkpoint has it, else True."""
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    """Other names for use_activation."""
    step_tag_id: int | None = None
    """Return, for a process reward model, the scores of these tokens alone."""
    task: str | None = None
    """One of POOLING_TASKS."""
    prompt_name: str | None = None
    """Names the prompt of a checkpoint of sentence-transformers that is put before a text; None: its default."""

    unsupported: ClassVar[dict[str, Any]] = {
        "returned_token_ids": (None, "set pooler_config={'returned_token_ids': [...]}"),
        "requires_token_ids": (False, "leave it out"),
        "skip_reading_prefix_cache": (None, "leave it out, or give prompts a cache_salt"),
        "extra_kwargs": (None, "leave it out"),
    }

    def __post_init__(self) -> None:
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1), ("step_tag_id", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise FieldError(name, f"must be an integer of at least {least}, or not set, got {value!r}", value)
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "must be -1, at least 1, or not set, got 0")
        for name in ("use_activation", *ACTIVATION_NAMES):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), bool)):
                raise FieldError(
                    name, f"must be a boolean, or not set, got {getattr(self, name)!r}", getattr(self, name)
                )
        self.use_activation = merge_activation(self)
        if not isinstance(self.prompt_name, str | None):
            raise FieldError(
                "prompt_name", f"must be the name of a prompt, or not set, got {self.prompt_name!r}", self.prompt_name
            )
        if self.task is not None and self.task not in POOLING_TASKS:
            raise FieldError(
                "task", f"must be one of {', '.join(POOLING_TASKS)}, or not set, got {self.task!r}", self.task
            )

    def clone(self, **changes: Any) -> PoolingParams:
        """A validated copy."""
        return replace(self, **changes)
