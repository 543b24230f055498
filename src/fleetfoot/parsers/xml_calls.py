"""Qwen3-Coder's calls: a function with parameters as XML-like tags. Values have no quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.grammar import Rules, arguments_schema
from fleetfoot.parsers.reader import Markers, Reader, Wait, Writer, skip_text
from fleetfoot.parsers.typed import is_text, property_schema, typed_json, types_of

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = Markers((_PARAMETER_END, "\n" + _PARAMETER_END))
_NAME_CHARACTERS = "_-.:/$@ "


class XmlFormat:
    """Values are strings unless the tool's schema has another type."""

    begin = (_CALL, _FUNCTION)
    markers = (*begin, _CALL_END, _FUNCTION_END, _PARAMETER, _PARAMETER_END)
    id_length = None

    def read(self, reader: Reader, writer: Writer, marker: str, tools: Mapping[str, Tool]) -> Wait[bool]:
        if marker == _CALL:
            yield from reader.space()
            if not (yield from reader.literal(_FUNCTION)):
                return False
        name = yield from reader.name(_NAME_CHARACTERS)
        if not name or not (yield from reader.literal(">")):
            return False
        writer.begin_call(name)
        text = "{"
        while True:
            yield from reader.space()
            if not (yield from reader.literal(_PARAMETER)):
                break
            key = yield from reader.name(_NAME_CHARACTERS)
            if not (yield from reader.literal(">")):
                return True
            schema = property_schema(tools.get(name), key)
            writer.arguments(f"{text}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._read_value(reader, writer, schema)):
                return True
            text = ", "
        is_whole = yield from reader.literal(_FUNCTION_END)
        rest = reader.text[reader.position :]
        if not is_whole and (_PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest)):  # cut
            reader.position += len(rest)
            return True
        writer.arguments("{}" if text == "{" else "}")
        yield from skip_text(reader, _CALL_END)
        return True

    @staticmethod
    def _read_value(reader: Reader, writer: Writer, schema: Mapping[str, Any]) -> Wait[bool]:
        """False: it is cut."""
        yield from reader.literal("\n")
        if is_text(schema):
            write = lambda piece: writer.arguments(_escaped(piece))  # noqa: E731
            writer.arguments('"')
            marker, space = yield from reader.until(_VALUE_ENDS, write, keeps_cut=False)
            if marker:
                writer.arguments(_escaped(space) + '"')
            return bool(marker)
        pieces: list[str] = []
        marker, space = yield from reader.until(_VALUE_ENDS, pieces.append)
        if marker:
            writer.arguments(typed_json("".join(pieces) + space, schema))
        return bool(marker)

    def grammar(self, tools: Sequence[Tool], rules: Rules, *, is_single: bool) -> str:
        call = rules.each(tools, lambda tool: self._call(tool, rules))
        return rules.list_of(call, f"\n{_CALL}", is_single=is_single)

    @staticmethod
    def _call(tool: Tool, rules: Rules) -> str:
        schema = arguments_schema(tool)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = [rules.text(f"\n{_FUNCTION}{tool.name}>\n")]
        for key in schema.get("properties") or {}:
            value, after = property_schema(tool, key), f"\n{_PARAMETER_END}\n"
            if "string" in types_of(value) or not types_of(value):
                choices = value.get("enum") or ([value["const"]] if "const" in value else [])
                texts = [rules.text(f"{choice}{after}") for choice in choices]
                limits = (
                    (0, None) if types_of(value) - {"string"} else (value.get("minLength", 0), value.get("maxLength"))
                )
                body = rules.any_of(texts) if texts else rules.until(after, *limits)
            else:
                body = f"{rules.json({**value, **shared}, is_strict=tool.is_strict)} {rules.text(after)}"
            parameter = rules.add(f"{rules.text(f'{_PARAMETER}{key}>' + chr(10))} {body}")
            parts.append(parameter if key in (schema.get("required") or ()) else f"{parameter}?")
        return " ".join([*parts, rules.text(f"{_FUNCTION_END}\n{_CALL_END}")])


def _escaped(text: str) -> str:
    """Text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
