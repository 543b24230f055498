"""What a JSON schema does not take, as a schema of supported keywords: for ``not``, ``if`` and ``oneOf``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Resolve = Callable[[Any], Any]
"""The schema that a schema without other keywords refers to; else itself."""

NOTES = {"title", "description", "default", "examples", "$comment"}
NEVER: dict[str, Any] = {"enum": []}
_SCOPE = {"$schema", "$defs", "definitions"}
_KINDS = ("null", "boolean", "string", "number", "array", "object")
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_LENGTHS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_ANY = r"[\s\S]"
_MAX_DEPTH = 8
MAX_TEXT = 2000
"""Characters of constants, of which the others are a regular expression."""


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", dict: "object", list: "array"}
    return next((kind for type_, kind in kinds.items() if isinstance(value, type_)), "number")


def negated(schema: Any, resolve: Resolve, depth: int = 0) -> Any:
    """A schema that takes no value of another one; None: there is none. It may leave out values."""
    schema = resolve(schema)
    if isinstance(schema, bool):
        return NEVER if schema else {}
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if depth == 0 and schema.get("type") == "integer":  # of numbers, none are left out but within others
        return None
    demands = {keyword: value for keyword, value in schema.items() if keyword not in NOTES and keyword not in _SCOPE}

    def negate(part: Any) -> Any:
        return negated(part, resolve, depth + 1)

    try:
        options = [_negated_keyword(keyword, value, negate) for keyword, value in demands.items()]
    except (TypeError, AttributeError):  # it is invalid; the compiler has the reason
        return None
    return None if None in options else _any_of(options)


def _any_of(options: list[Any]) -> Any:
    options = [option for option in options if option != NEVER]
    return {"anyOf": options} if len(options) > 1 else options[0] if options else NEVER


def _negated_keyword(keyword: str, value: Any, negate: Callable[[Any], Any]) -> Any:
    """What does not fit one keyword; None: there is no schema for it."""
    if keyword == "not":
        return value
    if keyword in ("const", "enum"):
        return _other_values([value] if keyword == "const" else value)
    if keyword == "type":
        kinds = {value} if isinstance(value, str) else set(value)
        kinds = {"number" if kind == "integer" else kind for kind in kinds}
        return {"type": [kind for kind in _KINDS if kind not in kinds]} if kinds < set(_KINDS) else NEVER
    if keyword in _BOUNDS:
        return None if isinstance(value, bool) else {"type": "number", _BOUNDS[keyword]: value}
    if keyword in _LENGTHS and isinstance(value, int):
        kind, opposite, step = _LENGTHS[keyword]
        return {"type": kind, opposite: value + step} if value + step >= 0 else NEVER
    if keyword == "required":
        return _any_of([{"type": "object", "properties": {name: NEVER}} for name in value])
    if keyword == "properties":
        parts = {name: negate(part) for name, part in value.items()}
        objects = [
            {"type": "object", "properties": {name: part}, "required": [name]}
            for name, part in parts.items()
            if part != NEVER
        ]
        return None if None in parts.values() else _any_of(objects)
    if keyword in ("anyOf", "allOf"):
        found = [negate(part) for part in value]
        return None if None in found else {"allOf": found} if keyword == "anyOf" else _any_of(found)
    return NEVER if keyword == "additionalProperties" and value in (True, {}) else None


def _other_values(values: list[Any]) -> Any:
    """All values but these, and no objects or lists if there is one of them."""
    kinds = {kind_of(value) for value in values}
    options: list[Any] = [{"type": [kind for kind in _KINDS if kind not in kinds]}] if kinds < set(_KINDS) else []
    options += [{"const": flag} for flag in (True, False) if "boolean" in kinds and not any(v is flag for v in values)]
    texts = {value for value in values if isinstance(value, str)}
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
