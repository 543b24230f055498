"""Which strings may be at a place in the JSON that a schema describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetfoot.utils.json_schema import NOTES, find, first_items

_KEYWORDS = NOTES | frozenset(
    ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "properties", "patternProperties", "additionalProperties", "required",
     "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems")
)  # fmt: skip
_REPEATED = re.compile(r"\^(\.|\\[dswDSW]|\[(?:[^\[\]\\]|\\.)+\])(?:\{(\d+)(,?)(\d*)\}|([*+?]?))\$", re.DOTALL)
"""A pattern of any number of characters of one class."""
_QUANTIFIERS: Mapping[str, tuple[int, int | None]] = {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
_MAX_DEPTH = 64
_MAX_OPTIONS = 1 << 12


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of ``least`` to ``most`` characters of a class, as a pattern writes it; empty: of any characters."""

    characters: str
    least: int
    most: int | None


class Place:
    """A place in a document: its value is under one of some schemas. None: it is not known under which."""

    def __init__(self, root: Mapping[str, Any], options: Sequence[Mapping[str, Any]] | None, known: dict[Any, Place]):
        self._root, self._options, self._known = root, options, known
        self._names = {name for option in options or () for name in option.get("properties", ())}
        self._num_first = max((len(first_items(option)) for option in options or ()), default=0)
        self._parts: dict[str | int | None, Place] = {}  # by the name or index; None: of other names
        kinds = {_strings(option) for option in options or () if _allows(option, "string")}
        self.strings = kinds.pop() if len(kinds) == 1 else None
        """Those that the value can be, if it is a string; None: not known, or others."""

    @classmethod
    def root(cls, schema: Any) -> Place:
        return cls(schema, (), {})._find([schema])

    def property(self, name: str | None) -> Place:
        """The place of a property's value. None: its name is not known."""
        if name is None:
            return self._find([None])
        return self._part("object", name if name in self._names else None, _property)

    def item(self, index: int) -> Place:
        """The place of an array's item."""
        return self._part("array", min(index, self._num_first), _item)

    def _part(self, kind: str, key: str | int | None, part: Callable[[Any, Any], Any]) -> Place:
        if key not in self._parts:
            options = self._options
            schemas = [None] if options is None else [part(one, key) for one in options if _allows(one, kind)]
            self._parts[key] = self._find(schemas)
        return self._parts[key]

    def _find(self, schemas: Iterable[Any]) -> Place:
        """The place that is under these schemas; equal ones are one object."""
        options = self._expand(schemas)
        unique = None if options is None else {id(option): option for option in options}
        key = None if unique is None else frozenset(unique)
        if key not in self._known:
            self._known[key] = Place(self._root, None if unique is None else [*unique.values()], self._known)
        return self._known[key]

    def _expand(self, schemas: Iterable[Any], depth: int = 0) -> list[Mapping[str, Any]] | None:
        """The schemas without alternatives; None: one is not understood."""
        options: list[Mapping[str, Any]] = []
        for schema in schemas:
            if schema is False:
                continue
            schema = _ANY if schema is True else schema
            if not isinstance(schema, dict) or depth > _MAX_DEPTH or len(options) > _MAX_OPTIONS:
                return None
            found: list[Mapping[str, Any]] | None = [schema] if schema.keys() <= _KEYWORDS else None
            match [*(schema.keys() - NOTES)]:
                case ["$ref"]:
                    found = self._expand([find(self._root, schema["$ref"])], depth + 1)
                case ["anyOf" | "oneOf" as choice]:
                    found = self._expand(schema[choice], depth + 1)
            if found is None:
                return None
            options += found
        return options


_ANY: Mapping[str, Any] = {}


def _allows(schema: Mapping[str, Any], kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in types if isinstance(types, list) else bool(kind == types)


def all_strings(part: Any) -> Iterator[Strings]:
    """All strings of all schemas in a schema, and some more."""
    if isinstance(part, dict) and _allows(part, "string") and (found := _strings(part)) is not None:
        yield found
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
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


def _property(schema: Mapping[str, Any], name: str | None) -> Any:
    """The schema of a property; None: it is not clear."""
    others = schema.get("patternProperties", {})
    is_open = all(pattern == "^" and part in ({}, True) for pattern, part in others.items())
    if not is_open or schema.keys() & {"enum", "const"}:
        return None
    default = True if others else schema.get("additionalProperties", True)
    return schema.get("properties", {}).get(name, default)


def _item(schema: Mapping[str, Any], index: int) -> Any:
    """The schema of an item; None: it is not clear."""
    first = first_items(schema)
    if schema.keys() & {"enum", "const"}:
        return None
    other = schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items", True)
    return first[index] if index < len(first) else other
