"""Calls in Python's syntax, as a list (``[get_weather(city="Rome"), get_time()]``) or, of Olmo 3, between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, arguments_schema, json_rules, members
from fleetfoot.parsers.reader import Reader, Wait, Writer, skip_one_of, skip_text
from fleetfoot.parsers.typed import argument_variants, python_value

_ENDS = {
    "<|python_start|>": "<|python_end|>",
    "<function_calls>": "</function_calls>",
    "<|tool_call_start|>": "<|tool_call_end|>",
}
_NAME_CHARACTERS = "_-."


class PythonicFormat:
    """Only names of tools make a list a call."""

    begin = ("[", *_ENDS)
    markers = (*_ENDS, *_ENDS.values())
    id_length = None

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        if marker in _ENDS:
            yield from reader.space()
            yield from skip_one_of(reader, "[")
        has_begun = False
        while True:
            start = reader.position
            yield from reader.space()
            if has_begun:
                yield from skip_one_of(reader, ",")
            if not (yield from self._read_call(reader, writer, tools)):
                break
            has_begun = True
        if has_begun and not reader.is_at_end:
            reader.position = start
            yield from skip_one_of(reader, "]")
            if marker in _ENDS:
                yield from skip_text(reader, _ENDS[marker])
        return has_begun

    @staticmethod
    def _read_call(reader: Reader, writer: Writer, tools: Mapping[str, Tool]) -> Wait[bool]:
        yield from reader.space()
        name = yield from reader.name(_NAME_CHARACTERS)
        if name not in tools or not (yield from reader.literal("(")):
            return False
        writer.begin_call(name)
        names = list(argument_variants(tools[name].parameters)[0][0])
        text, number = "{", 0
        while True:
            yield from reader.space()
            if (yield from reader.literal(")")):
                writer.arguments("{}" if text == "{" else "}")
                return True
            key = yield from _read_key(reader)
            value = yield from _read_value(reader)
            if value is None:  # cut
                return True
            key = key or (names[number] if number < len(names) else f"argument_{number}")
            writer.arguments(f"{text}{json.dumps(key)}: {json.dumps(python_value(value), ensure_ascii=False)}")
            text, number = ", ", number + 1
            yield from skip_one_of(reader, ",")
            reader.drop()

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: _call(tool, rules))
        return f"{rules.list_of(call, ', ', is_single=is_single)} {rules.text(']')}"


def _read_key(reader: Reader) -> Wait[str]:
    """Read ``name=``; "" if the value has no name."""
    start = reader.position
    name = yield from reader.name("_-.:$ ")
    yield from reader.space()
    if name and (yield from reader.literal("=")):
        return name.strip()
    reader.position = start
    return ""


def _read_value(reader: Reader) -> Wait[str | None]:
    """Read a literal up to the comma or bracket after it. None: it is cut."""
    start, depth, quote = reader.position, 0, ""
    while character := (yield from reader.peek()):
        if quote:
            if character == "\\":
                reader.position += 1
                yield from reader.peek()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ",)]}":
            if depth == 0 and character in ",)":
                return reader.text[start : reader.position]
            depth -= character != ","
        reader.position += 1
    return None


def _call(tool: Tool, rules: Rules) -> str:
    return f"{rules.text('', tool.name + '(')} {_keywords(tool, rules)} {rules.text(')')}"


def _keywords(tool: Tool, rules: Rules) -> str:
    """An expression for the arguments of a call, in the order of the schema."""
    schema = arguments_schema(tool)
    json_rule = json_rules(schema, rules, is_strict=tool.is_strict)
    variants = []
    for properties, required in argument_variants(schema):
        pairs = {key: f"{rules.text('', key + '=')} {json_rule(value)}" for key, value in properties.items()}
        variants.append(members(pairs, required, ", ", rules))
    return variants[0] if len(variants) == 1 else rules.any_of([rules.add(one or '""') for one in variants])
