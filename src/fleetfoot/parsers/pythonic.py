"""Calls in Python's syntax, as a list (``[get_weather(city="Rome"), get_time()]``) or, of Olmo 3, between tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, arguments_schema, json_rules, members
from fleetfoot.parsers.reader import Reader, Wait, Writer, skip_one_of, skip_text
from fleetfoot.parsers.typed import argument_variants, json_text, literal

_ENDS = {
    "<|python_start|>": "<|python_end|>",
    "<function_calls>": "</function_calls>",
    "<|tool_call_start|>": "<|tool_call_end|>",
}
_NAME_CHARACTERS = "_-."
_KEYWORD = re.compile(r"[\w\-.:$@/ ]+")
_TOKEN = re.compile(r"""["'\\()\[\]{},]""")


class PythonicFormat:
    """Only names of tools make a list a call.

    A call is written when it is whole, since it is text if any of its arguments has no value.
    """

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
        sources, is_whole = yield from _read_arguments(reader)
        if not (is_whole or reader.is_cut):
            return False
        try:
            arguments = _arguments(sources, tools[name])
        except ValueError:
            return False
        text = json_text(arguments)
        writer.begin_call(name)
        writer.arguments(text if is_whole else text.removesuffix("}"))
        reader.drop()
        return True

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: _call(tool, rules))
        return f"{rules.list_of(call, ', ', is_single=is_single)} {rules.text(']')}"


def _arguments(sources: Sequence[str], tool: Tool) -> dict[str, Any]:
    """The values of arguments by name. Raises ValueError: one has none."""
    names = list(argument_variants(tool.parameters)[0][0])
    arguments: dict[str, Any] = {}
    for number, source in enumerate(sources):
        name, equals, value = source.partition("=")
        if equals and not value.startswith("=") and _KEYWORD.fullmatch(name.strip()):
            added = {name.strip(): literal(value)}
        elif source.lstrip().startswith("**"):
            added = literal(source.lstrip()[2:])
        elif number >= len(names):
            raise ValueError("no name for an argument")
        else:
            added = {names[number]: literal(source)}
        if not isinstance(added, dict) or arguments.keys() & added.keys():
            raise ValueError("no arguments, or one twice")
        arguments.update(added)
    return arguments


def _read_arguments(reader: Reader) -> Wait[tuple[list[str], bool]]:
    """Read up to the bracket that closes the arguments. Returns the texts of whole ones, and whether that is all."""
    start, depth, quote, found = reader.position, 0, "", list[str]()
    while True:
        match = _TOKEN.search(reader.text, reader.position)
        reader.position = match.start() if match else len(reader.text)
        if not (yield from reader.peek()):
            return found, False
        if not match:
            continue
        character = match[0]
        reader.position += 1
        if character == "\\":
            yield from reader.peek()
            reader.position += 1
        elif quote:
            if character == quote[0] and (len(quote) == 1 or (yield from reader.literal(quote[1:]))):
                quote = ""
        elif character in "\"'":
            quote = character
            if (yield from reader.literal(character * 2)):
                quote *= 3
            elif (yield from reader.literal(character)):
                quote = ""
        elif character in "([{":
            depth += 1
        elif depth:
            depth -= character != ","
        elif character in ",)":
            source = reader.text[start : reader.position - 1]
            start = reader.position
            if character == "," or source.strip():
                found.append(source)
            if character == ")":
                return found, True


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
