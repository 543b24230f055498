"""DeepSeek's calls: V3 (``function<sep>name``, then a block of JSON) and V3.1 (``name<sep>{...}``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.reader import Reader, Wait, Writer, skip_text

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "```json", "```"


class DeepSeekFormat:
    """``has_fence``: whether forced calls have V3's form."""

    begin = (_CALLS, _CALL)
    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP)
    id_length = None

    def __init__(self, *, has_fence: bool) -> None:
        self._has_fence = has_fence

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        has_begun, is_first = False, marker == _CALL
        while True:
            start = reader.position
            yield from reader.space()
            if not is_first and not (yield from reader.literal(_CALL)):
                break
            is_first = False
            if not (yield from self._read_call(reader, writer)):
                break
            has_begun = True
        reader.position = start
        yield from skip_text(reader, _CALLS_END)
        return has_begun

    @staticmethod
    def _read_call(reader: Reader, writer: Writer) -> Wait[bool]:
        yield from reader.space()
        name = yield from reader.name()
        if not (yield from reader.literal(_SEP)):
            return False
        yield from reader.space()
        has_fence = name == "function" and (yield from reader.peek()) != "{"
        if has_fence:
            name = yield from reader.name()
            yield from skip_text(reader, _FENCE)
            yield from reader.space()
        if not name or not (yield from reader.peek()):
            return False
        writer.begin_call(name)
        yield from reader.value(writer.arguments)
        if has_fence:
            yield from skip_text(reader, _FENCE_END)
        yield from skip_text(reader, _CALL_END)
        return True

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._call(tool, rules))
        separator = "\n" if self._has_fence else ""
        calls = rules.list_of(call, separator, is_single=is_single) if separator or is_single else f"{call}+"
        return f"{calls} {rules.text(_CALLS_END)}"

    def _call(self, tool: Tool, rules: Rules) -> str:
        before, after = f"{_CALL}{tool.name}{_SEP}", _CALL_END
        if self._has_fence:
            before, after = f"{_CALL}function{_SEP}{tool.name}\n{_FENCE}\n", f"\n{_FENCE_END}{_CALL_END}"
        return f"{rules.text(before)} {rules.arguments(tool)} {rules.text(after)}"
