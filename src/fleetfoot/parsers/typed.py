"""Values of arguments that are no JSON, by the schema of a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fleetfoot.parsers.base import Tool
from fleetfoot.parsers.literals import python_literal
from fleetfoot.utils.json_schema import find

MAX_DEPTH = 200
"""Brackets around a value. Readers of JSON have such a limit, too."""
_CHECKS: dict[str, Any] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


Variant = tuple[dict[str, Mapping[str, Any]], set[str]]
"""The schemas of an object's properties, and the names of the required ones."""
_MAX_VARIANTS = 16
_MAX_PARTS = 400
"""Parts of a schema that are read for the arguments of a tool."""


def property_schema(tool: Tool | None, name: str) -> Mapping[str, Any]:
    """The schema of an argument, with what it refers to; empty if it has none."""
    found = [
        properties[name] for properties, _ in argument_variants(tool.parameters if tool else {}) if name in properties
    ]
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def argument_variants(schema: Mapping[str, Any]) -> list[Variant]:
    """The alternatives of an object, of which a schema may have several at its top."""
    variants = _variants(schema, schema, iter(range(_MAX_PARTS)))
    for properties, required in variants:
        properties.update({name: {} for name in sorted(required - set(properties))})
    return variants


def _variants(schema: Any, root: Mapping[str, Any], parts: Iterator[int]) -> list[Variant]:
    schema = _resolved(schema, root, parts)
    named, required = schema.get("properties"), schema.get("required")
    named = named if isinstance(named, Mapping) else {}
    required = required if isinstance(required, list) else []
    properties = {name: _resolved(one, root, parts) for name, one in named.items()}
    variants: list[Variant] = [(properties, {name for name in required if isinstance(name, str)})]
    alternatives = {name: schema[name] for name in _ALTERNATIVES if isinstance(schema.get(name), list)}
    groups = [[one] for one in alternatives.pop("allOf", ())] + list(alternatives.values())
    for group in groups:
        added = [variant for one in group for variant in _variants(one, root, parts)][:_MAX_VARIANTS]
        if added:
            variants = [({**first, **other}, one | two) for first, one in variants for other, two in added]
            variants = variants[:_MAX_VARIANTS]
    return variants


def _resolved(schema: Any, root: Mapping[str, Any], parts: Iterator[int]) -> Mapping[str, Any]:
    """A schema without a reference in itself and in its alternatives. After so many ``parts`` schemas are empty:
    references may be circular."""
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = find(root, reference) if next(parts, None) is not None else None
    if not isinstance(schema, Mapping) or next(parts, None) is None:
        return {}
    lists = {name: schema[name] for name in _ALTERNATIVES if isinstance(schema.get(name), list)}
    resolved = {name: value for name, value in schema.items() if name not in _ALTERNATIVES}
    return {**resolved, **{name: [_resolved(one, root, parts) for one in options] for name, options in lists.items()}}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names; empty if it names none."""
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind if isinstance(kind, list) else ())
    for name in _ALTERNATIVES:
        for one in schema.get(name) or ():
            found |= types_of(one) if isinstance(one, Mapping) else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list):
        found = {_type_name(value) for value in values}
    if not found and "properties" in schema:
        found = {"object"}
    return found


def _type_name(value: Any) -> str:
    return next((name for name, check in _CHECKS.items() if check(value)), "string")


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is a string, as it stands."""
    types = types_of(schema)
    return not types or types == {"string"}


def typed_json(text: str, schema: Mapping[str, Any], *, is_any: bool = False) -> str:
    """The JSON text of a value that is written without quotes, in that type of the schema that fits; else a string.

    Args:
        is_any: whether a value without types in the schema can have any.
    """
    types, value = types_of(schema) or set(_CHECKS if is_any else ()), text.strip()
    if types - {"string"}:
        parsed = python_value(value)
        for kind, fits in _CHECKS.items():
            if kind in types and fits(parsed):
                return json_text(int(parsed) if kind == "integer" else parsed)
    return json_text(text)


def python_value(text: str) -> Any:
    """A literal of JSON or Python; the text itself if it is none."""
    try:
        return literal(text, is_code=False)
    except ValueError:
        return text.strip()


def literal(text: str, *, is_code: bool = True) -> Any:
    """A literal of JSON or Python. Raises ValueError if it is none. ``is_code``: as of `python_literal`."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = python_literal(text, is_code=is_code)
    _check_depth(value, MAX_DEPTH - 1)
    return value


def _check_depth(value: Any, most: int) -> None:
    if isinstance(value, list | dict):
        if not most:
            raise ValueError("too deep")
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, most - 1)


def json_text(value: Any) -> str:
    """A value as JSON, without halves of characters, which no text can have."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
