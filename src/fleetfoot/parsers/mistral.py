"""Mistral's calls: ``[TOOL_CALLS] [{"name": ..., "arguments": ...}]``, and since its tokenizer's version 11
``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules
from fleetfoot.parsers.json_calls import JsonFormat, read_calls
from fleetfoot.parsers.json_values import read_json
from fleetfoot.parsers.reader import Reader, Wait, Writer

_BEGIN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LIST = JsonFormat((_BEGIN,), is_list=True)


class MistralFormat:
    """``has_list``: whether forced calls are a list of JSON objects."""

    begin = (_BEGIN,)
    markers = (_BEGIN, _ARGS, _ID)
    id_length = 9

    def __init__(self, *, has_list: bool) -> None:
        self._has_list = has_list

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        yield from reader.space()
        first = yield from reader.peek()
        if first and first in "[{":
            return (yield from read_calls(reader, writer, None))
        name = yield from reader.name()
        yield from reader.space()
        if (yield from reader.literal(_ID)):
            yield from reader.name()
        yield from reader.literal(_ARGS)
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            return False
        writer.begin_call(name)
        yield from read_json(reader, writer.arguments)
        return True

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        if self._has_list:
            return _LIST.grammar(tools, rules, is_single=is_single)
        call = rules.each(tools, lambda tool: f"{rules.text('', tool.name, _ARGS)} {rules.arguments(tool)}")
        return rules.list_of(call, _BEGIN, is_single=is_single)
