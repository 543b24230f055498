"""The training text: plain stories and chats, as documents with their special tokens written out."""

from dataclasses import dataclass

from stories import generate_story
from story_chat import BEGIN, END, make_chat, render
from story_grammar import Chooser

CHAT_SHARE = 0.25


@dataclass(frozen=True)
class Document:
    """One training document.

    Attributes:
        text: the text with its special tokens, from `<|begin|>` to `<|end|>`.
        nats: the information in the choices that made it.
        is_chat: whether it is a chat rather than a plain story.
    """

    text: str
    nats: float
    is_chat: bool


def document(seed: int | str) -> Document:
    """The document of this seed."""
    chooser = Chooser(f"document {seed}")
    if chooser.chance(CHAT_SHARE):
        chat = make_chat(chooser)
        return Document(render(chat.messages), chooser.nats, True)
    story = generate_story(f"of document {seed}")
    return Document(BEGIN + story.text + END, chooser.nats + story.nats, False)
