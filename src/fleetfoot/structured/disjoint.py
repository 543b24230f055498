"""Whether JSON schemas exclude each other: options of ``oneOf`` that do are those of ``anyOf``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from fleetfoot.structured.negation import Resolve, kind_of

MAX_COMPARED = 1 << 16
"""Pairs of options, or of constants. With more, the compiler decides whether they exclude each other."""
MAX_REFERENCES = 32


def all_disjoint(options: Sequence[Any], resolve: Resolve) -> bool:
    """Whether no value is valid under two of the schemas, as far as it can be seen."""
    return all(_are_disjoint(one, other, resolve) for one, other in combinations(options, 2))


def _are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether no value is valid under both of two schemas, as far as types, constants and properties show."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_REFERENCES:
        return False
    values, others = constants(one), constants(other)
    if values is not None and others is not None:
        is_small = len(values) * len(others) <= MAX_COMPARED
        return is_small and not any(value == another for value in values for another in others)
    for listed, pattern in ((values, other.get("pattern")), (others, one.get("pattern"))):
        if listed is not None and isinstance(pattern, str) and not any(_may_fit(value, pattern) for value in listed):
            return True
    kinds, other_kinds = _kinds(one), _kinds(other)
    if kinds is None or other_kinds is None:
        return False
    if not kinds & other_kinds:
        return True
    return kinds == other_kinds == {"object"} and any(
        _are_disjoint(_property(one, name), _property(other, name), resolve, depth + 1)
        for name in {*required_names(one), *required_names(other)}
    )


def _may_fit(value: Any, pattern: str) -> bool:
    """Whether a value fits a pattern, as far as it can be evaluated here."""
    try:
        return not isinstance(value, str) or re.search(pattern, value, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """The types of the values of a schema; None: any."""
    if (values := constants(schema)) is not None:
        return {kind_of(value) for value in values}
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return None
    return {"number" if kind == "integer" else kind for kind in kinds}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """What a schema demands of a property; parts that patterns of names demand are left out."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return {} if schema.get("patternProperties") else schema.get("additionalProperties", {})


def required_names(schema: Mapping[str, Any]) -> Iterable[str]:
    """The properties that an object must have."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def constants(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
