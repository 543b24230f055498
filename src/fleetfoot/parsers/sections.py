"""Calls in a section, each with a name, a separator and a JSON object: DeepSeek's and Kimi's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.json_values import read_json
from fleetfoot.parsers.reader import Reader, Wait, Writer, skip_text

_FENCE, _FENCE_END = "```json", "```"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")


@dataclass(frozen=True)
class SectionFormat:
    """The marks of a section, and the form of a call."""

    calls: str
    calls_end: str
    call: str
    separator: str
    call_end: str
    has_fence: bool = False
    """Whether forced calls have the form ``function<separator>name`` and a block of JSON."""
    has_ids: bool = False
    """Whether the id of the call is in the place of the name: ``functions.name:0``."""
    id_length: int | None = None

    @property
    def begin(self) -> tuple[str, ...]:
        return self.calls, self.call

    @property
    def markers(self) -> tuple[str, ...]:
        return self.calls, self.calls_end, self.call, self.call_end, self.separator

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        has_begun, is_first = False, marker == self.call
        while True:
            start = reader.position
            yield from reader.space()
            if not is_first and not (yield from reader.literal(self.call)):
                break
            is_first = False
            if not (yield from self._read_call(reader, writer)):
                break
            has_begun = True
        reader.position = start
        yield from skip_text(reader, self.calls_end)
        return has_begun

    def _read_call(self, reader: Reader, writer: Writer) -> Wait[bool]:
        yield from reader.space()
        name, call_id = (yield from reader.name()), None
        yield from reader.space()
        if not name or not (yield from reader.literal(self.separator)):
            return False
        yield from reader.space()
        has_fence = name == "function" and (yield from reader.peek()) != "{"
        if has_fence:
            name = yield from reader.name()
            yield from skip_text(reader, _FENCE)
            yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            return False
        if self.has_ids and (parts := _ID.fullmatch(name)):
            name = parts[1]
            call_id = writer.numbered_id(f"functions.{name}:", int(parts[2] or writer.num_calls))
        writer.begin_call(name, call_id)
        yield from read_json(reader, writer.arguments)
        if has_fence:
            yield from skip_text(reader, _FENCE_END)
        yield from skip_text(reader, self.call_end)
        return True

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._call(tool, rules))
        separator = "\n" if self.has_fence else ""
        calls = rules.list_of(call, separator, is_single=is_single) if separator or is_single else f"{call}+"
        return f"{calls} {rules.text(self.calls_end)}"

    def _call(self, tool: Tool, rules: Rules) -> str:
        after = self.call_end
        begin = rules.text(self.call, tool.name, self.separator)
        if self.has_fence:
            begin = rules.text(f"{self.call}function{self.separator}", tool.name, f"\n{_FENCE}\n")
            after = f"\n{_FENCE_END}{after}"
        if self.has_ids:
            name = rules.text(f"{self.call}functions.", f"{tool.name}:")
            begin = f"{name} /[0-9]{{1,3}}/ {rules.text(self.separator)}"
        return f"{begin} {rules.arguments(tool)} {rules.text(after)}"
