"""Checked reads of JSON: fields of a model's ``config.json``, and settings that are JSON objects.

Every error names the file or setting, the field, the value, and what would work.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from fleetfoot.utils.validation import FieldError, FieldTypeError, unknown_keyword


class ConfigError(ValueError):
    """A model's ``config.json`` is missing, unreadable, or needs something that is not supported."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with default values.

    An absent field reads as its default, and so does null, unless the field is nullable.
    """

    content: Mapping[str, Any]
    defaults: Mapping[str, Any]
    source: str
    """The file, for messages."""
    prefix: str = ""
    """The path of this object in the file, for messages."""
    nullable: Collection[str] = ()
    """Fields for which null differs from their default."""
    read: set[str] = dataclasses.field(default_factory=set)
    """Names that were looked up."""

    def raw(self, name: str) -> Any:
        """The unchecked value, or the default."""
        self.read.add(name)
        value = self.content.get(name)
        if value is None and not (name in self.content and name in self.nullable):
            return self.defaults.get(name)
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        """An error about one field; ``expected`` states what would work."""
        value = self.raw(name)
        found = "missing" if value is None else repr(value)
        return ConfigError(f"{self.source}: {self.prefix}{name} is {found}; {expected}")

    def integer(self, name: str, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.raw(name)
        # bool is a subclass of int, but `true` is not a size
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"expected an integer of at least {minimum}, at most {maximum}")
        return value

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        return None if self.raw(name) is None else self.integer(name, minimum=minimum)

    def number(self, name: str, *, above: float = 0.0) -> float:
        value = self.raw(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= sys.float_info.max:
            raise self.error(name, f"expected a finite number above {above:g}")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` finite numbers above 0."""
        values = self.raw(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"expected a list of {count} numbers")
        each = [Fields({name: value}, {}, self.source, self.prefix) for value in values]
        return tuple(field.number(name) for field in each)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self.error(name, "expected true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "expected an object")
        return value

    def refuse(self, *names: str, because: str) -> None:
        """Raise if one of the fields is set: neither absent, null, false nor an empty list or object."""
        for name in names:
            value = self.raw(name)
            if value is not None and value is not False and value != [] and value != {}:
                raise self.error(name, because)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a setting can have."""

    words: str
    """``it must ...``"""
    least: float = -math.inf
    most: float = sys.float_info.max


ABOVE_ZERO = math.ulp(0.0)
"""The smallest positive number."""

_KINDS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": (int | float, "a number"),
    "Mapping[str, Any]": (Mapping, "an object"),
}
"""By annotations; all others are strings."""


def check_fields(settings: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass by their annotations, and by their metadata: ``choices``, ``bounds`` (`Bounds`),
    ``if_empty`` (what to do instead of giving an empty string). Fields with a ``record`` are not checked.

    Args:
        prefix: of names in messages, for fields that come from JSON.

    Raises:
        TypeError: a value of the wrong type. A bool is no int; an int is a valid float.
        ValueError: any other value that is not allowed; for JSON, also a number or a bool of the wrong type.
    """
    for item in dataclasses.fields(settings):
        name, value, annotation = prefix + item.name, getattr(settings, item.name), str(item.type)
        bounds, choices = item.metadata.get("bounds"), item.metadata.get("choices")
        if "record" in item.metadata or (value is None and annotation.endswith("None")):
            continue
        if choices is not None and value not in choices:
            raise FieldError(name, f"is {value!r}; it can be {', '.join(choices)}", value)
        kind, words = _KINDS.get(annotation.removesuffix(" | None"), (str, "a string that is not empty"))
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not prefix:
            if not is_right:
                raise FieldTypeError(name, f"is {value!r}, a {type(value).__name__}; it must be {annotation}", value)
            if isinstance(value, float) and not math.isfinite(value):
                raise FieldTypeError(name, f"is {value!r}; it must be a finite number", value)
        elif bounds is None and (not is_right or (value == "" and annotation.endswith("None"))):
            error = FieldTypeError if kind in (str, Mapping) else FieldError
            raise error(name, f"is {value!r}; it must be {words}", value)
        if bounds is not None and not (is_right and bounds.least <= value <= bounds.most):
            raise FieldError(name, f"is {value!r}; it must {bounds.words}", value)
        if value == "" and "if_empty" in item.metadata:
            raise FieldError(name, f"is an empty string; {item.metadata['if_empty']}", value)


class JSONSettings:
    """Base of a frozen dataclass that is made from a dictionary or JSON text."""

    __slots__ = ()
    setting: ClassVar[str]
    """Name of the setting, for messages."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Values of unsupported keys that change nothing, beside None and False."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Unsupported keys, each with what to do instead of a value other than null and false."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From a dictionary or JSON text; an instance is returned as it is. Raises TypeError, ValueError: it is
        neither, or has an unknown key or an invalid value; names it."""
        if isinstance(value, cls):
            return value
        content = json_object(cls.setting, value)
        content = {
            key: item
            for key, item in content.items()
            if key not in cls.advice or item not in (None, False, cls.neutral.get(key))
        }
        for key in content:
            check_key(cls.setting, key, [item.name for item in dataclasses.fields(cls)], cls.advice)  # type: ignore[arg-type]
        return cls(**content)

    def __post_init__(self) -> None:
        check_fields(self, f"{self.setting}: ")


def check_key(field: str, key: object, known: Collection[str], advice: Mapping[str, str] | None = None) -> None:
    """Raise TypeError unless ``key`` is one of ``known``. ``field``: the setting's name, for messages; ``advice``:
    unsupported keys, each with what to do instead."""
    if not isinstance(key, str):  # possible in a Python dictionary only
        raise TypeError(f"{field} has the key {key!r}, a {type(key).__name__}; keys must be strings")
    if key not in known:
        raise unknown_keyword(field, key, known, (advice or {}).get(key))


def read_json_object(path: Path, error: type[Exception] = ConfigError) -> dict[str, Any]:
    """The object in a JSON file. Raises ``error``: the file cannot be read, or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{path} cannot be read as JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise error(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def json_object(field: str, value: Any) -> dict[str, Any]:
    """The object in ``value``, a dictionary or JSON text; ``field`` is the setting's name, for messages.

    Raises:
        ValueError: text that is not JSON, or with a duplicate key.
        TypeError: not an object.
    """

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):  # by default the parser keeps the last of equal keys
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{field} has the key {twice!r} twice; leave one out")
        return content

    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=object_of)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"{field} is not JSON ({error}): {value!r}; it must be an object, in a shell between single quotes: "
                '\'{"key": "value"}\''
            ) from error
    if not isinstance(value, dict):
        raise TypeError(f"{field} is {value!r}; it must be a JSON object or a dictionary")
    return value
