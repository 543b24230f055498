"""What a JSON schema does not take: as a schema of supported keywords, for ``not``, ``if`` and ``oneOf``; and whether
schemas exclude each other, so that options of ``oneOf`` are those of ``anyOf``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fleetfoot.utils.json_schema import NEVER, NOTES, Resolve, constants, kind_of, kinds_of, required_names

MAX_COMPARED = 1 << 16  # pairs of options, or of constants; with more, the compiler decides if they exclude each other
MAX_TEXT = 2000  # characters of constants, of which the others are a regular expression
_KINDS = ("null", "boolean", "string", "number", "array", "object")
_OPPOSITES = {  # the type that a keyword is about, the keyword of the values that it excludes, and how that differs
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_ANY = r"[\s\S]"
_MAX_DEPTH = 8


def negated(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """A schema that takes no value of another one; None: there is none. It may leave out values."""
    schema = resolve(schema)
    if isinstance(schema, bool):
        return NEVER if schema else {}
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if depth == 0 and schema.get("type") == "integer":  # of numbers, none are left out but within others
        return None

    def negate(part: Any) -> Any:
        return negated(part, resolve, depth + 1)

    try:
        options = [_negated_keyword(name, value, negate) for name, value in schema.items() if name not in NOTES]
    except (TypeError, AttributeError):  # it is invalid; the compiler has the reason
        return None
    return _any_of(options)


def _any_of(options: list[Any]) -> Any:
    """One of some schemas, if there is each."""
    if None in options:
        return None
    options = [option for option in options if option != NEVER]
    return {"anyOf": options} if len(options) > 1 else options[0] if options else NEVER


def _negated_keyword(keyword: str, value: Any, negate: Callable[[Any], Any]) -> Any:
    """What does not fit one keyword; None: there is no schema for it."""
    match keyword:
        case "not":
            return value
        case "const" | "enum":
            return _other_values([value] if keyword == "const" else value)
        case "type":
            kinds = kinds_of({"type": value})
            return None if kinds is None else _other_kinds(kinds)
        case "required":
            return _any_of([{"type": "object", "properties": {name: NEVER}} for name in value])
        case "properties":
            parts = {name: negate(part) for name, part in value.items()}
            one_of = {name: part for name, part in parts.items() if part != NEVER}
            objects = [{"type": "object", "properties": {name: one_of[name]}, "required": [name]} for name in one_of]
            return None if None in parts.values() else _any_of(objects)
        case "anyOf":
            found = [negate(part) for part in value]
            return None if None in found else {"allOf": found}
        case "allOf":
            return _any_of([negate(part) for part in value])
        case "additionalProperties" if value in (True, {}):
            return NEVER
    if keyword not in _OPPOSITES or type(value) not in (int, float):
        return None
    kind, opposite, step = _OPPOSITES[keyword]
    return {"type": kind, opposite: value + step} if not step or value + step >= 0 else NEVER


def _other_kinds(kinds: Collection[str]) -> Any:
    others = [kind for kind in _KINDS if kind not in kinds]
    return {"type": others} if others else NEVER


def _other_values(values: list[Any]) -> Any:
    """All values but these, and no objects or lists if there is one of them."""
    options = [_other_kinds({kind_of(value) for value in values})]
    flags = [value for value in values if isinstance(value, bool)]
    options += [{"const": flag} for flag in (True, False) if flags and flag not in flags]
    texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    if sum(map(len, texts)) > MAX_TEXT:
        return None
    if texts:
        options.append({"type": "string", "pattern": f"^{other_texts(texts)}$"})
    numbers = sorted({value for value in values if kind_of(value) == "number"})
    for above, below in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": above, "exclusiveMaximum": below}
        options.append({"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None})
    return _any_of(options)


def other_texts(texts: Collection[str]) -> str:
    """A regular expression of all texts but these."""
    first = {text[0]: [other[1:] for other in texts if other[:1] == text[0]] for text in texts if text}
    options = [] if "" in texts else [""]
    options += [f"{_character(letter)}{other_texts(rests)}" for letter, rests in first.items()]
    others = f"[^{''.join(map(_character, first))}]" if first else _ANY
    options.append(f"{others}{_ANY}*")
    return f"({'|'.join(options)})"


def _character(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Whether no value is valid under both of two schemas, as far as types, constants, patterns and properties show."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
        return False
    values, others = constants(one), constants(other)
    if values is not None and others is not None:
        is_small = len(values) * len(others) <= MAX_COMPARED
        return is_small and not any(value == another for value in values for another in others)
    for listed, pattern in ((values, other.get("pattern")), (others, one.get("pattern"))):
        if listed is not None and isinstance(pattern, str) and not any(_may_fit(value, pattern) for value in listed):
            return True
    kinds, other_kinds = kinds_of(one), kinds_of(other)
    if kinds is None or other_kinds is None:
        return False
    if not kinds & other_kinds:
        return True
    return kinds == other_kinds == {"object"} and any(
        are_disjoint(_property(one, name), _property(other, name), resolve, depth + 1)
        for name in {*required_names(one), *required_names(other)}
    )


def _may_fit(value: Any, pattern: str) -> bool:
    """Whether a value fits a pattern, as far as it can be evaluated here."""
    try:
        return not isinstance(value, str) or re.search(pattern, value, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """What a schema demands of a property; parts that patterns of names demand are left out."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return {} if schema.get("patternProperties") else schema.get("additionalProperties", {})
