"""The forms in which a prompt can be given; vLLM's import path for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from fleetfoot.compat.paths import provide_names


class TextPrompt(TypedDict):
    """A prompt as text, to be tokenized."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt`` is then only returned in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | TextPrompt | TokensPrompt | Sequence[int]
"""One prompt: text, one of the two dictionaries, or a list of token ids."""

ChatMessage = dict[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates expect them."""

provide_names(__name__)
