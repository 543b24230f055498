"""Reads JSON schemas: the schemas in them, what references name, and what they say about values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

ANNOTATIONS = frozenset(("title", "description", "examples", "default", "$comment"))
NOTES = ANNOTATIONS | {"deprecated", "readOnly", "writeOnly", "$schema", "$defs", "definitions", "x-guidance"}
"""Keywords that demand nothing of a value."""
NEVER: dict[str, Any] = {"enum": []}
_MAX_REFERENCES = 32
_MAX_RESOLVED = 50_000  # parts of a schema: references can form trees of any size
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_ENDS = {"minimum": (math.ceil, 0), "exclusiveMinimum": (math.floor, 1)}, {
    "maximum": (math.floor, 0), "exclusiveMaximum": (math.ceil, -1),
}  # fmt: skip
"""The first and the last integer of bounds: how a bound is rounded, and what is added."""

Resolve = Callable[[Any], Any]
"""The schema that a schema without other keywords refers to; else itself."""


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """The schemas directly in a schema, each with its keyword, and its name or index there."""
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            yield from ((keyword, name, part) for name, part in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((keyword, index, part) for index, part in enumerate(value))
        elif keyword in _SINGLE:
            yield keyword, None, value


def mapped(schema: Any, change: Callable[[dict[str, Any]], Any], skipped: Collection[str] = ()) -> Any:
    """A schema with each schema in it changed, the innermost first, but for those of ``skipped`` keywords."""
    if not isinstance(schema, dict):
        return schema
    changed = {keyword: copy(value) for keyword, value in schema.items()}
    for keyword, name, part in subschemas(schema):
        if keyword in skipped:
            continue
        if name is None:
            changed[keyword] = mapped(part, change, skipped)
        else:
            changed[keyword][name] = mapped(part, change, skipped)
    return change(changed)


def pointer(keyword: str, name: str | int | None) -> str:
    """The part of a JSON pointer for one of `subschemas`."""
    return keyword if name is None else f"{keyword}/{str(name).replace('~', '~0').replace('/', '~1')}"


def find(root: Any, reference: Any) -> Any:
    """The part of a schema that a pointer of it names; None: there is none, or it is no pointer."""
    names = reference.split("/") if isinstance(reference, str) else [""]
    if names[0] != "#":
        return None
    for name in names[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def resolver(root: Any) -> Resolve:
    """A `Resolve` for the parts of a schema. Its results are None for references that lead nowhere, or on for too
    long."""
    left = iter(range(_MAX_RESOLVED))

    def resolve(part: Any) -> Any:
        if next(left, None) is None:
            return None
        for _ in range(_MAX_REFERENCES):
            if not isinstance(part, dict) or part.keys() - NOTES != {"$ref"}:
                return part
            part = find(root, part["$ref"])
        return None

    return resolve


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", dict: "object", list: "array"}
    return next((kind for type_, kind in kinds.items() if isinstance(value, type_)), "number")


def kinds_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types of the values of a schema, integers as numbers; None: any."""
    if (values := constants(schema)) is not None:
        return {kind_of(value) for value in values}
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return None
    return {"number" if kind == "integer" else kind for kind in kinds}


def constants(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def values_of(schema: Any, resolve: Resolve, most: int) -> list[Any] | None:
    """The values that are valid under a schema, if these are a few; None: others, or it is not clear. ``most``: of
    integers between bounds."""
    schema = resolve(schema)
    if not isinstance(schema, dict):
        return None
    kind, demands = schema.get("type"), schema.keys() - NOTES
    if demands == {"anyOf"} and isinstance(schema["anyOf"], list):
        found = [values_of(part, resolve, most) for part in schema["anyOf"]]
        return None if None in found else [value for values in found for value in values or ()]
    values = constants(schema)
    if values is not None and demands <= {"type", "enum", "const"}:
        types = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
        fits = kind is None or (isinstance(kind, str) and all(type(value) is types.get(kind) for value in values))
        return values if fits else None
    if demands == {"type"} and kind in ("boolean", "null"):
        return [False, True] if kind == "boolean" else [None]
    bounds = demands - {"type"}
    if kind != "integer" or not all(type(schema[name]) in (int, float) for name in bounds):
        return None
    ends = [[turn(schema[name]) + step for name, (turn, step) in end.items() if name in bounds] for end in _ENDS]
    if not bounds <= {*_ENDS[0], *_ENDS[1]} or not all(ends) or min(ends[1]) - max(ends[0]) >= most:
        return None
    return list(range(max(ends[0]), min(ends[1]) + 1))


def required_names(schema: Mapping[str, Any]) -> list[str]:
    """The properties that an object must have."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def first_items(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The schemas of an array's first items."""
    items = schema.get("items")
    return items if isinstance(items, list) else schema.get("prefixItems", ())
