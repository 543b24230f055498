"""What parsers are made of: text that arrives in pieces, and the message that is written from it.

A parser is a generator that yields where it needs more text. It sees one character after the other, so its result does
not depend on how the text is split.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from fleetfoot.parsers.base import MessageDelta, ToolCallDelta
from fleetfoot.parsers.completion import completion

_T = TypeVar("_T")

Wait = Generator[None, None, _T]
"""A part of a parser; it returns its result."""
Sink = Callable[[str], None]

MAX_NAME = 256
"""Characters of a function's name."""


class Markers:
    """Texts to look for. The match that begins first is found, the longest one of several that begin there."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._beginnings = frozenset(text[:size] for text in ordered for size in range(1, len(text)))
        self._halves = frozenset(text for text in self._beginnings if text[0] in "<[")
        self._longest = max(map(len, ordered), default=0)

    def search(self, text: str, start: int, *, is_over: bool) -> tuple[int, str]:
        """The first match at or after ``start``, and its position. Without one, "" and the position from which on the
        text may begin one."""
        match = self._pattern.search(text, start)
        if is_over:
            return (match.start(), match[0]) if match else (len(text), "")
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if match is not None and position > match.start():
                break
            if text[position:] in self._beginnings:
                return position, ""
        return (match.start(), match[0]) if match else (len(text), "")

    def at(self, text: str, start: int) -> bool | None:
        """Whether a match begins at ``start``; None: the text ends within what may be one."""
        if self._pattern.match(text, start):
            return True
        return None if len(text) - start < self._longest and text[start:] in self._beginnings else False

    def half(self, text: str, start: int) -> int:
        """The position of the beginning of a mark, at or after ``start``, that ends the text; its length without one.
        Beginnings of words and of code are no marks yet."""
        positions = range(max(start, len(text) - self._longest + 1), len(text))
        return next((position for position in positions if text[position:] in self._halves), len(text))


@lru_cache(64)
def markers_of(texts: frozenset[str]) -> Markers:
    """Those of special tokens are a thousand texts."""
    return Markers(texts)


class Reader:
    """The text of a sequence.

    Args:
        marks: texts of the format that are no part of a value without quotes; the end of a block of code is another.
    """

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self.marks = markers_of(frozenset(("```", *(mark for mark in marks if mark.startswith("<")))))
        self.text = ""
        """What has arrived and is not dropped yet."""
        self.position = 0
        """Position of the next character."""
        self.is_over = False
        self.is_cut = False
        """Whether the text might have gone on."""
        self.misses_text = False
        """Whether something has been looked for after the end."""

    @property
    def is_at_end(self) -> bool:
        return self.is_over and self.position == len(self.text)

    def more(self) -> Wait[bool]:
        """Wait for more text. False: there is none."""
        size = len(self.text)
        while len(self.text) == size and not self.is_over:
            yield
        self.misses_text = len(self.text) == size
        return not self.misses_text

    def drop(self) -> None:
        """Forget the text before the position."""
        self.text, self.position = self.text[self.position :], 0

    def peek(self) -> Wait[str]:
        """The next character; "" at the end."""
        if self.position == len(self.text) and not (yield from self.more()):
            return ""
        return self.text[self.position]

    def space(self) -> Wait[None]:
        """Read white space."""
        while (yield from self.peek()).isspace():
            self.position += 1

    def literal(self, expected: str) -> Wait[bool]:
        """Read this text; False: another one comes, and nothing is read."""
        while True:
            found = self.text[self.position : self.position + len(expected)]
            if found == expected:
                self.position += len(expected)
                return True
            if not expected.startswith(found) or not (yield from self.more()):
                return False

    def at_mark(self) -> Wait[bool]:
        """Whether one of ``marks`` follows, whole or cut. Reads nothing."""
        while (found := self.marks.at(self.text, self.position)) is None:
            if not (yield from self.more()):
                return True
        return found

    def name(self, others: str = "_-.:/") -> Wait[str]:
        """Read letters, digits and ``others``."""
        start = self.position
        while (character := (yield from self.peek())) and (character.isalnum() or character in others):
            self.position += 1
            if self.position - start > MAX_NAME:
                return ""
        return self.text[start : self.position]

    def until(self, markers: Markers, sink: Sink, *, keeps_cut: bool = True) -> Wait[tuple[str, str]]:
        """Pass on text until a marker, which is read. Returns the marker, "" at the end of the text, and the white
        space before it, which is not passed on. ``keeps_cut``: whether the beginning of a marker at the end of a text
        that is whole is passed on."""
        while True:
            end, marker = markers.search(self.text, self.position, is_over=self.is_over and keeps_cut)
            if self.is_cut and not marker:
                end = min(end, markers.half(self.text, self.position))
            passed = self.text[self.position : end]
            kept = passed if self.is_over and not marker else passed.rstrip()
            if kept:
                sink(kept)
            self.position += len(kept)
            if marker:
                self.position = end + len(marker)
                return marker, passed[len(kept) :]
            if self.is_over:
                self.position = len(self.text)
                return "", ""
            self.drop()
            yield from self.more()


def skip_one_of(reader: Reader, characters: str) -> Wait[None]:
    """Read one of the characters, if it is there."""
    character = yield from reader.peek()
    if character and character in characters:
        reader.position += 1


def skip_text(reader: Reader, text: str) -> Wait[None]:
    """Read white space and a text that is not empty, if they are there; also a text that is cut."""
    start = reader.position
    yield from reader.space()
    if not (yield from reader.literal(text)):
        rest = reader.text[reader.position :]
        reader.position = len(reader.text) if rest and text.startswith(rest) else start


class Writer:
    """The message. White space next to reasoning and calls is no part of it.

    Args:
        max_calls: later calls are dropped; None: no limit.
        id_length: of the ids of calls; None: OpenAI's form.
    """

    def __init__(self, max_calls: int | None = None, id_length: int | None = None) -> None:
        self.num_calls = 0
        self.is_fresh = True
        """Whether there has been no content since the beginning, reasoning or a call."""
        self._trims = False
        self._trims_reasoning = False
        self._has_reasoning = False
        self._max_calls = max_calls
        self._id_length = id_length
        self._ids: set[str] = set()
        self._arguments: list[str] | None = None
        """Those of the call that is open; None: there is none."""
        self._delta = MessageDelta()

    def take(self) -> MessageDelta:
        """What was written since the last time."""
        delta, self._delta = self._delta, MessageDelta()
        return delta

    def content(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self.is_fresh = self.is_fresh and text.isspace()
            self._delta.content += text

    def begin_reasoning(self) -> None:
        self._trims_reasoning = True

    def reasoning(self, text: str) -> None:
        if self._trims_reasoning:
            text = text.lstrip()
            text = f"\n{text}" if text and self._has_reasoning else text
        if text:
            self._trims_reasoning, self._has_reasoning = False, True
            self._delta.reasoning += text

    def end_part(self) -> None:
        """Reasoning or a call has ended."""
        self.complete()
        self._trims = self.is_fresh = True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """``call_id``: None: a random one."""
        self.complete()
        self.num_calls += 1
        self._arguments = []
        if self._takes_call:
            if call_id is None:
                call_id = f"call_{secrets.token_hex(12)}" if self._id_length is None else secrets.token_hex(8)
            self._ids.add(call_id)
            self._delta.tool_calls.append(ToolCallDelta(self.num_calls - 1, call_id[: self._id_length], name))

    def numbered_id(self, stem: str, number: int) -> str:
        """An id of no call so far, with this number or a later one."""
        while f"{stem}{number}" in self._ids:
            number += 1
        return f"{stem}{number}"

    def arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        if not self._takes_call or not text or self._arguments is None:
            return
        self._arguments.append(text)
        if not self._delta.tool_calls or self._delta.tool_calls[-1].index != self.num_calls - 1:
            self._delta.tool_calls.append(ToolCallDelta(self.num_calls - 1))
        self._delta.tool_calls[-1].arguments += text

    def complete(self) -> None:
        """End the arguments of the last call: they are JSON, although the text has ended within them."""
        if self._arguments is not None:
            self.arguments(completion("".join(self._arguments)))
            self._arguments = None

    @property
    def _takes_call(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


class GeneratorParser:
    """A `MessageParser` in which a generator reads the text, and waits where it ends.

    Args:
        steps: of a reader and a writer.
    """

    def __init__(self, reader: Reader, writer: Writer, steps: Wait[None]) -> None:
        self._reader, self._writer, self._steps = reader, writer, steps
        next(steps)

    def feed(self, text: str, token_ids: Sequence[int]) -> MessageDelta:
        self._reader.text += text
        next(self._steps)
        return self._writer.take()

    def finish(self, *, is_cut: bool = False) -> MessageDelta:
        self._reader.is_over, self._reader.is_cut = True, is_cut
        next(self._steps, None)
        if not is_cut:
            self._writer.complete()
        return self._writer.take()
