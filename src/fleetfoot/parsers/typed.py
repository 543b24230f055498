"""Values of arguments that are no JSON, by the schema of a tool."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from fleetfoot.parsers.base import Tool

_CHECKS: dict[str, Any] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def property_schema(tool: Tool | None, name: str) -> Mapping[str, Any]:
    """The schema of an argument; empty if it has none."""
    properties = tool.parameters.get("properties") if tool else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if isinstance(schema, Mapping) and tool and isinstance(reference := schema.get("$ref"), str):
        target: Any = tool.parameters
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names; empty if it names none."""
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind or ())
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name) or ():
            found |= types_of(one) if isinstance(one, Mapping) else set()
    if not found and isinstance(schema.get("enum"), list):
        found = {_type_name(value) for value in schema["enum"]}
    if not found and "properties" in schema:
        found = {"object"}
    return found


def _type_name(value: Any) -> str:
    return next((name for name, check in _CHECKS.items() if check(value)), "string")


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is a string, as it stands."""
    types = types_of(schema)
    return not types or types == {"string"}


def typed_json(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON text of a value that is written without quotes, in that type of the schema that fits; else a string."""
    types, value = types_of(schema), text.strip()
    if types - {"string"}:
        parsed = python_value(value)
        for kind, fits in _CHECKS.items():
            if kind in types and fits(parsed):
                return json.dumps(int(parsed) if kind == "integer" else parsed, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def python_value(text: str) -> Any:
    """A literal of JSON or Python; the text itself if it is none."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return text
