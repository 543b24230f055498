"""Which strings may be at a place in the JSON that a schema describes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
     "$defs", "definitions", "x-guidance")
)  # fmt: skip
_KEYWORDS = _NOTES | frozenset(
    ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "properties", "patternProperties", "additionalProperties", "required",
     "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems")
)  # fmt: skip
_CHOICES = ("anyOf", "oneOf")
_REPEATED = re.compile(r"\^(\.|\\[dswDSW]|\[(?:[^\[\]\\]|\\.)+\])(?:\{(\d+)(,?)(\d*)\}|([*+?]?))\$", re.DOTALL)
"""A pattern of any number of characters of one class."""
_QUANTIFIERS: Mapping[str, tuple[int, int | None]] = {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of ``least`` to ``most`` characters of a class, as a pattern writes it; empty: of any characters."""

    characters: str
    least: int
    most: int | None


class Place:
    """A place in a document: its value is under one of some schemas."""

    def __init__(self, root: Mapping[str, Any], options: Sequence[Mapping[str, Any]] | None, known: dict[Any, Place]):
        self._root, self._options, self._known = root, options, known
        self._rest: Place | None = None  # of items after the first ones
        self._properties: dict[str, Place] = {}  # of the schemas
        kinds = {_strings(option) for option in options or () if _allows(option, "string")}
        self.strings = kinds.pop() if len(kinds) == 1 else None
        """Those that the value can be, if it is a string; None: not known, or others."""

    @classmethod
    def root(cls, schema: Any) -> Place:
        return cls(schema, (), {})._find([schema])

    def property(self, name: str | None) -> Place:
        """The place of a property's value. None: its name is not known."""
        if self._options is None or name is None:
            return self._find(None)
        if name in self._properties:
            return self._properties[name]
        options = [option for option in self._options if _allows(option, "object")]
        place = self._find([_property(option, name) for option in options])
        if any(name in option.get("properties", ()) for option in options):
            self._properties[name] = place
        return place

    def item(self, index: int) -> Place:
        """The place of an array's item."""
        if self._options is None:
            return self._find(None)
        options = [option for option in self._options if _allows(option, "array")]
        if index < max((len(_first_items(option)) for option in options), default=0):
            return self._find([_item(option, index) for option in options])
        if self._rest is None:
            self._rest = self._find([_item(option, index) for option in options])
        return self._rest

    def _find(self, schemas: Sequence[Any] | None) -> Place:
        """The place that is under these schemas; equal ones are one object."""
        options: list[Mapping[str, Any]] | None = None if schemas is None else []
        for schema in schemas or ():
            if options is None or not self._expand(schema, options, 0):
                options = None
                break
        unique = None if options is None else {id(option): option for option in options}
        key = None if unique is None else frozenset(unique)
        if key not in self._known:
            self._known[key] = Place(self._root, None if unique is None else [*unique.values()], self._known)
        return self._known[key]

    def _expand(self, schema: Any, options: list[Mapping[str, Any]], depth: int) -> bool:
        """Append the alternatives of a schema. Returns whether all of it is understood."""
        if schema is False:
            return True
        if schema is True:
            schema = _ANY
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return False
        demands = schema.keys() - _NOTES
        if demands == {"$ref"}:
            return self._expand(_resolve(self._root, schema["$ref"]), options, depth + 1)
        if len(demands) == 1 and (choice := next(iter(demands))) in _CHOICES:
            return all(self._expand(part, options, depth + 1) for part in schema[choice])
        options.append(schema)
        return schema.keys() <= _KEYWORDS


_ANY: Mapping[str, Any] = {}
_UNKNOWN = None
"""No schema."""


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    """The schema that a pointer names. None: there is none, or it is no pointer."""
    names = reference.split("/")
    part: Any = root if names[0] == "#" else None
    for name in names[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def _allows(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in types if isinstance(types, list) else bool(kind == types)


def all_strings(part: Any) -> Iterator[Strings]:
    """All strings of all schemas in a schema, and some more."""
    if isinstance(part, dict):
        if _allows(part, "string") and (found := _strings(part)) is not None:
            yield found
        for child in part.values():
            yield from all_strings(child)
    elif isinstance(part, list):
        for child in part:
            yield from all_strings(child)


def _strings(schema: Mapping[str, Any]) -> Strings | None:
    """Those that are valid under a schema. None: they are no `Strings`."""
    if schema.keys() & {"enum", "const", "format"}:
        return None
    characters, least, most = "", 0, None
    if "pattern" in schema:
        match = _REPEATED.fullmatch(str(schema["pattern"]))
        if match is None:
            return None
        characters, fewest, comma, largest, quantifier = match.groups()
        if fewest is None:
            least, most = _QUANTIFIERS[quantifier]
        else:
            least = int(fewest)
            most = int(largest) if largest else None if comma else least
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(shortest, int) or not isinstance(longest, int | None):
        return None  # names of properties
    bounds = [bound for bound in (most, longest) if bound is not None]
    return Strings(characters, max(least, shortest), min(bounds, default=None))


def _property(schema: Mapping[str, Any], name: str) -> Any:
    others = schema.get("patternProperties", {})
    is_open = all(pattern == "^" and part in ({}, True) for pattern, part in others.items())
    if not is_open or schema.keys() & {"enum", "const"}:
        return _UNKNOWN
    default = True if others else schema.get("additionalProperties", True)
    return schema.get("properties", {}).get(name, default)


def _first_items(schema: Mapping[str, Any]) -> Sequence[Any]:
    items = schema.get("items")
    return items if isinstance(items, list) else schema.get("prefixItems", ())


def _item(schema: Mapping[str, Any], index: int) -> Any:
    if schema.keys() & {"enum", "const"}:
        return _UNKNOWN
    first = _first_items(schema)
    if index < len(first):
        return first[index]
    return schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
