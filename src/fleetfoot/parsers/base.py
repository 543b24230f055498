"""The interface of message parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """A part of one tool call."""

    index: int
    """Index of the call within its message, from 0."""
    id: str | None = None
    """Present in the first delta of a call."""
    name: str | None = None
    """Present in the first delta of a call."""
    arguments: str = ""
    """The next piece of the arguments' JSON text."""


@dataclass(slots=True)
class MessageDelta:
    """What a piece of generated text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class Tool:
    """A function that the model can call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of its arguments."""
    is_strict: bool = False
    """Whether the arguments must be valid."""
    is_open: bool = False
    """Whether JSON of the arguments may be any object."""

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> Tool:
        """OpenAI's form: ``{"type": "function", "function": {...}}``."""
        function = tool["function"]
        return cls(function["name"], function.get("parameters") or {}, bool(function.get("strict")))


class MessageParser(Protocol):
    """Parses the text of one generated sequence. The joined deltas do not depend on how the text is split."""

    def feed(self, text: str, token_ids: Sequence[int]) -> MessageDelta:
        """The delta of the next ``text``, which are ``token_ids``. Text that may begin a marker is held back."""
        ...

    def finish(self, *, is_cut: bool = False) -> MessageDelta:
        """The delta of the text that was held back. Called once, after the last text.

        Args:
            is_cut: the text was ended by a limit or a stop string. Half a mark or half the head of a call at its end
                is then dropped, and else content.
        """
        ...


class PlainParser:
    """All text is content."""

    def feed(self, text: str, token_ids: Sequence[int]) -> MessageDelta:
        return MessageDelta(content=text)

    def finish(self, *, is_cut: bool = False) -> MessageDelta:
        return MessageDelta()
