"""Gemma's calls: ``<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>``, and others of FunctionGemma.
Strings are between marks instead of quotes, and names of properties stand alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, arguments_schema, definitions, members, text_terminal
from fleetfoot.parsers.json_values import read_json, read_string
from fleetfoot.parsers.reader import Markers, Reader, Sink, Wait, Writer, skip_one_of, skip_text
from fleetfoot.parsers.typed import MAX_DEPTH, argument_variants, json_text, python_value, types_of

_CALL = "call:"
_KEY_CHARACTERS = "_-.$/@ "
_MAX_DEPTH = 8
"""Depth of objects and lists in a grammar; further ones are empty."""
_SCALARS = ["number", "boolean", "null"]


@dataclass(frozen=True)
class GemmaFormat:
    """The marks of a call and of its strings."""

    call: str
    call_end: str
    quote: str
    id_length: int | None = None

    @property
    def begin(self) -> tuple[str, ...]:
        return (self.call,)

    @property
    def markers(self) -> tuple[str, ...]:
        return self.call, self.call_end, self.quote

    @cached_property
    def _quotes(self) -> Markers:
        return Markers({self.quote})

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        yield from reader.space()
        if not (yield from reader.literal(_CALL)):
            return False
        name = yield from reader.name()
        if not name or not (yield from reader.literal("{")):
            return False
        writer.begin_call(name)
        writer.arguments("{")
        if (yield from self._read_members(reader, writer.arguments, "}")):
            yield from skip_text(reader, self.call_end)
        return True

    def _read_members(self, reader: Reader, sink: Sink, end: str, depth: int = 0) -> Wait[bool]:
        """Read the values of a list, or the keys and values of an object, and the bracket at the end. False: cut."""
        text = ""
        while True:
            yield from reader.space()
            if (yield from reader.literal(end)):
                sink(end)
                return True
            if end == "}":
                key = yield from self._read_key(reader)
                if not (yield from reader.literal(":")):
                    return False
                text += json_text(key.strip()) + ": "
            if depth == MAX_DEPTH or not (yield from self._read_value(reader, sink, text, depth)):
                return False
            text = ", "
            yield from reader.space()
            yield from skip_one_of(reader, ",")
            reader.drop()

    def _read_key(self, reader: Reader) -> Wait[str]:
        if (key := (yield from read_string(reader))) is not None:
            return key
        is_quoted = yield from reader.literal(self.quote)
        key = yield from reader.name(_KEY_CHARACTERS)
        if is_quoted:
            yield from reader.literal(self.quote)
        return key

    def _read_value(self, reader: Reader, sink: Sink, before: str, depth: int) -> Wait[bool]:
        """Read a value, which is written after ``before``. False: it is cut."""
        yield from reader.space()
        if (yield from reader.literal(self.quote)):
            sink(f'{before}"')
            write = lambda piece: sink(json_text(piece)[1:-1])  # noqa: E731
            marker, space = yield from reader.until(self._quotes, write, keeps_cut=False)
            if marker:
                write(space)
                sink('"')
            return bool(marker)
        for bracket, end in (("{", "}"), ("[", "]")):
            if (yield from reader.literal(bracket)):
                sink(before + bracket)
                return (yield from self._read_members(reader, sink, end, depth + 1))
        first = yield from reader.peek()
        if first and first in "\"'":
            sink(before)
            return (yield from read_json(reader, sink))
        start = reader.position
        while (character := (yield from reader.peek())) and character not in ",}]":
            reader.position += 1
        value = reader.text[start : reader.position].strip()
        if (not character and reader.is_cut) or (not value and character != ","):
            return False
        sink(before + (json_text(python_value(value)) if value else "null"))
        return True

    # --- forced calls -------------------------------------------------------------------------------------------------

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._call(tool, rules))
        return rules.list_of(call, self.call, is_single=is_single)

    def _call(self, tool: Tool, rules: Rules) -> str:
        schema = arguments_schema(tool)
        shared = definitions(schema)

        def value(part: Mapping[str, Any], depth: int = 0) -> str:
            if options := part.get("anyOf") or part.get("oneOf"):
                return rules.any_of([value({**shared, **one}, depth) for one in options])
            if choices := part.get("enum") or ([part["const"]] if "const" in part else []):
                return rules.any_of([rules.text(*self._constant(choice)) for choice in choices])
            types = types_of(part) or {"string", *_SCALARS}
            return rules.any_of([self._typed(kind, {**shared, **part}, value, rules, depth) for kind in sorted(types)])

        return f"{rules.text(_CALL, tool.name)} {self._typed('object', schema, value, rules, 0)} " + rules.text(
            self.call_end
        )

    def _typed(
        self,
        kind: str,
        schema: Mapping[str, Any],
        value: Callable[[Mapping[str, Any], int], str],
        rules: Rules,
        depth: int,
    ) -> str:
        """A value of one type."""
        if kind == "string":
            text = rules.until(self.quote, text_terminal(rules.prepared(schema)))
            return rules.add(f"{rules.text(self.quote)} {text}")
        if kind not in ("array", "object"):
            return rules.json({**schema, "type": kind}, is_strict=False)
        if depth > _MAX_DEPTH:
            return rules.text("[]" if kind == "array" else "{}")
        if kind == "array":
            items = schema.get("items")
            resolved = argument_variants({"properties": {"x": items}, **definitions(schema)})[0][0]["x"]
            item, least, most = rules.add(value(resolved, depth + 1)), schema.get("minItems", 0), schema.get("maxItems")
            if most == 0:
                return rules.text("[]")
            more = f"({rules.text(',')} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            return rules.add(f"{rules.text('[')} ({item} {more}){'' if least else '?'} {rules.text(']')}")
        options = []
        for properties, required in argument_variants(schema):
            pairs = {key: f"{rules.text('', key + ':')} {value(part, depth + 1)}" for key, part in properties.items()}
            options.append(rules.add(members(pairs, required, ",", rules) or '""'))
        return f"{rules.text('{')} {rules.any_of(options)} {rules.text('}')}"

    def _constant(self, value: Any) -> Sequence[str]:
        """The arguments of `Rules.text` for a constant."""
        if isinstance(value, str):
            return self.quote, value, self.quote
        if isinstance(value, dict):
            return self._joined("{", [("", f"{key}:", *self._constant(one)) for key, one in value.items()], "}")
        if isinstance(value, list):
            return self._joined("[", [self._constant(one) for one in value], "]")
        return ("", json.dumps(value))

    @staticmethod
    def _joined(begin: str, items: Sequence[Sequence[str]], end: str) -> Sequence[str]:
        parts = [part for item in items for part in (",", *item)]
        return (begin, "", *parts[1:], end)
