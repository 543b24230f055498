"""Calls as JSON objects: ``{"name": ..., "arguments": {...}}``, between the markers of a model or by themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.json_values import object_text, read_json, read_string
from fleetfoot.parsers.reader import Reader, Wait, Writer, skip_one_of, skip_text

_NAME = ("name", "function", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type", "tool_call_id")
PLAIN = ("{", "[", "```json")
"""Texts that are common in content, too."""


@dataclass(frozen=True)
class JsonFormat:
    """A call, or a list of calls, after a marker or at a bracket.

    Without a marker, an object is a call if its name is that of a tool and it has arguments.
    """

    begin: tuple[str, ...]
    """The first one is that of forced calls."""
    end: str = ""
    """Follows a call or the list."""
    separator: str = ""
    """Between calls that are no list."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False
    """Whether forced calls are a list."""
    is_keyed: bool = False
    """Whether a call is an object with the arguments under the name: ``{"get_weather": {...}}``."""
    padding: str = ""
    """Between markers and calls."""
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (*self.begin, self.end) if len(text) > 1)

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        names = None
        if marker in PLAIN:
            names = tools
        if marker in "{[":
            reader.position -= 1
        yield from reader.space()
        if not (yield from read_calls(reader, writer, names, is_keyed=self.is_keyed)):
            return False
        if self.end:
            yield from skip_text(reader, self.end)
        return True

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._fields(tool, rules))
        if self.begin[0] == "{":
            return rules.list_of(call, self.separator + "{", is_single=is_single)
        if self.begin[0] == "[":
            return f"{rules.text('{')} {rules.list_of(call, ', {', is_single=is_single)} {rules.text(']')}"
        before, after = self.padding, self.padding + self.end
        call = rules.add(f"{rules.text('{')} {call}")
        if self.is_list:
            calls = rules.list_of(call, ", ", is_single=is_single)
            return f"{rules.text(before + '[')} {calls} {rules.text(']' + after)}"
        one = rules.add(f"{rules.text(before)} {call} {rules.text(after)}")
        return rules.list_of(one, self.separator + self.begin[0], is_single=is_single)

    def _fields(self, tool: Tool, rules: Rules) -> str:
        """A call without its first brace."""
        before = f'"{self.name_key}": {json.dumps(tool.name)}, "{self.arguments_key}": '
        if self.is_keyed:
            before = f"{json.dumps(tool.name)}: "
        return f"{rules.text('', before)} {rules.arguments(tool)} {rules.text('}')}"


def read_calls(
    reader: Reader, writer: Writer, names: Mapping[str, Tool] | None, *, is_keyed: bool = False
) -> Wait[bool]:
    """Read a call, or a list of them. False: there is none, and nothing was written or dropped.

    Args:
        names: of functions, if other objects are no calls; None: any name.
        is_keyed: as of `JsonFormat`.
    """

    def read_one() -> Wait[bool]:
        return _read_keyed(reader, writer) if is_keyed else read_call(reader, writer, names)

    is_list = yield from reader.literal("[")
    yield from reader.space()
    if not (yield from read_one()):
        return False
    while True:
        yield from reader.space()
        start = reader.position
        if is_list and (yield from reader.literal("]")):
            return True
        yield from skip_one_of(reader, ",;")
        yield from reader.space()
        if not (yield from read_one()):
            if not reader.is_at_end:  # else the call is cut
                reader.position = start
            return True


def read_call(
    reader: Reader, writer: Writer, names: Mapping[str, Tool] | None, *, is_inner: bool = False
) -> Wait[bool]:
    """Read an object with the name and the arguments of a call. False: it is none; nothing was written or dropped."""
    if not (yield from reader.literal("{")):
        return False
    call = _Call(reader, writer, names, is_inner=is_inner)
    while True:
        yield from reader.space()
        if (yield from reader.literal("}")):
            return call.finish()
        key = yield from read_string(reader)
        yield from reader.space()
        if key is None or not (yield from reader.literal(":")):
            return call.has_begun
        yield from reader.space()
        if not (yield from call.read(key)):
            return call.has_begun
        yield from reader.space()
        yield from reader.literal(",")


def _read_keyed(reader: Reader, writer: Writer) -> Wait[bool]:
    """As `read_call`, for an object with the arguments under the name."""
    if not (yield from reader.literal("{")):
        return False
    yield from reader.space()
    name = yield from read_string(reader)
    yield from reader.space()
    if not name or not (yield from reader.literal(":")):
        return False
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        return False
    writer.begin_call(name)
    if (yield from read_json(reader, writer.arguments)):
        yield from skip_text(reader, "}")
    return True


class _Call:
    """The fields of one object as they come."""

    def __init__(self, reader: Reader, writer: Writer, names: Mapping[str, Tool] | None, *, is_inner: bool) -> None:
        self.has_begun = False
        """Whether something was written."""
        self._reader = reader
        self._writer = writer
        self._names = names
        self._name: str | None = None
        self._is_inner = is_inner
        self._arguments: str | None = None
        """Those that came before the name; "" if they come as they are written."""

    def read(self, key: str) -> Wait[bool]:
        """Read the value of a key. False: this is no call, or the value is cut."""
        reader, first = self._reader, (yield from self._reader.peek())
        if key in _NAME and first and first in "\"'":
            self._name = yield from read_string(reader)
            if self._name is None or (self._names is not None and self._name not in self._names):
                return False
            self._begin()
            return True
        if key == "function" and first == "{" and not self._is_inner:
            self.has_begun = yield from read_call(reader, self._writer, self._names, is_inner=True)
            return self.has_begun
        if key in _ARGUMENTS and not self.has_begun:
            return (yield from self._read_arguments(first))
        is_call = self.has_begun or (self._names is None and self._name is not None)
        if key not in _OTHERS and not is_call:
            return False
        return (yield from read_json(reader, _ignore, drops=self.has_begun))

    def _read_arguments(self, first: str) -> Wait[bool]:
        reader = self._reader
        if self._name is not None and first == "{":
            self._arguments = ""
            self._begin()
            return (yield from read_json(reader, self._writer.arguments))
        pieces: list[str] = []
        if not (yield from read_json(reader, pieces.append, drops=False)):
            return False
        self._arguments = object_text("".join(pieces))
        if self._arguments is not None:
            self._begin()
        return self._arguments is not None

    def _begin(self) -> None:
        """Write what is known, if that is a call."""
        if self._name is not None and self._arguments is not None and not self.has_begun:
            self.has_begun = True
            self._writer.begin_call(self._name)
            self._writer.arguments(self._arguments)

    def finish(self) -> bool:
        """The object has ended. Whether it is a call."""
        if self._names is None and self._arguments is None:
            self._arguments = "{}"
        self._begin()
        return self.has_begun


def _ignore(text: str) -> None:
    """A `Sink` of what is no part of a call."""
