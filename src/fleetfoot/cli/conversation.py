"""A chat's history, and what is left of it when it outgrows the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleetfoot.records.prompts import ChatMessage


@dataclass(slots=True)
class _Turn:
    user: str
    assistant: str | None = None
    """None until there is a reply."""

    def messages(self) -> list[ChatMessage]:
        messages = [{"role": "user", "content": self.user}]
        if self.assistant is not None:
            messages.append({"role": "assistant", "content": self.assistant})
        return messages


@dataclass(slots=True)
class Conversation:
    """A system message and turns, each a user's message and the reply to it."""

    system: str | None = None
    turns: list[_Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append(_Turn(text))

    def answer(self, text: str) -> None:
        """The reply to the last `ask`."""
        self.turns[-1].assistant = text

    def take_back(self) -> None:
        """Forget the last turn."""
        self.turns.pop()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def messages(self, first: int = 0) -> list[ChatMessage]:
        """The system message, and the turns from number ``first`` on."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for turn in self.turns[first:] for message in turn.messages()]


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    token_ids: list[int]
    num_dropped: int
    """Turns that were forgotten to make room."""


def fit(
    conversation: Conversation, tokenize: Callable[[list[ChatMessage]], list[int]], *, limit: int, reserve: int
) -> FittedPrompt:
    """The prompt for the next reply. Where it is too long, the conversation loses its oldest turns.

    Args:
        tokenize: messages to a prompt's token ids.
        limit: most tokens of prompt and reply together.
        reserve: tokens to keep free for the reply, unless the last message alone leaves less.

    Raises:
        ValueError: the last message is too long; the conversation has not changed.
    """
    for first in range(len(conversation.turns)):
        token_ids = tokenize(conversation.messages(first))
        is_last = first == len(conversation.turns) - 1
        if len(token_ids) + reserve <= limit or (is_last and len(token_ids) < limit):
            del conversation.turns[:first]
            return FittedPrompt(token_ids, first)
    raise ValueError(
        f"the message makes a prompt of {len(token_ids)} tokens, and there is room for {limit - 1}; "
        f"shorten it, or raise max_model_len where the model allows"
    )
