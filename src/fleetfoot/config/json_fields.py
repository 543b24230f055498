"""Checked reads of JSON: fields of a model's ``config.json``, and settings that are JSON objects.

Every error names the file or setting, the field, the value, and what would work.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from fleetfoot.utils.validation import unknown_keyword


class ConfigError(ValueError):
    """A model's ``config.json`` is missing, unreadable, or needs something that is not supported."""


class Fields:
    """A JSON object with default values.

    An absent field reads as its default, and so does null, unless the field is nullable.
    """

    __slots__ = ("_content", "_defaults", "_nullable", "_prefix", "source")

    def __init__(
        self,
        content: Mapping[str, Any],
        defaults: Mapping[str, Any],
        source: str,
        prefix: str = "",
        nullable: Collection[str] = (),
    ) -> None:
        """
        Args:
            content: the object.
            defaults: values of absent fields.
            source: the file, for messages.
            prefix: the path of this object in the file, for messages.
            nullable: fields for which null differs from their default.
        """
        self._content = content
        self._defaults = defaults
        self.source = source
        self._prefix = prefix
        self._nullable = nullable

    def raw(self, name: str) -> Any:
        """The unchecked value, or the default."""
        value = self._content.get(name)
        if value is None and not (name in self._content and name in self._nullable):
            return self._defaults.get(name)
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        """An error about one field; ``expected`` states what would work."""
        value = self.raw(name)
        found = "missing" if value is None else repr(value)
        return ConfigError(f"{self.source}: {self._prefix}{name} is {found}; {expected}")

    def integer(self, name: str, *, minimum: int = 1) -> int:
        value = self.raw(name)
        # bool is a subclass of int, but `true` is not a size
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"expected an integer of at least {minimum}")
        return value

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        return None if self.raw(name) is None else self.integer(name, minimum=minimum)

    def number(self, name: str, *, above: float = 0.0) -> float:
        value = self.raw(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= sys.float_info.max:
            raise self.error(name, f"expected a finite number above {above:g}")
        return float(value)

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


# --- settings that are JSON objects ---------------------------------------------------------------------------------


class JSONSettings:
    """Base of a frozen dataclass that is made from a dictionary or JSON text."""

    __slots__ = ()
    setting: ClassVar[str]
    """Name of the setting, for messages."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Unsupported keys, each with what to do instead."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From a dictionary or JSON text; an instance is returned as it is.

        Raises:
            TypeError, ValueError: it is neither, or has an unknown key or an invalid value; names it.
        """
        return value if isinstance(value, cls) else cls(**checked_object(cls.setting, value, cls, cls.advice))


def checked_object(field: str, value: Any, record: type, advice: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Check that ``value`` is an object whose keys are fields of ``record``, and return it.

    Args:
        field: the setting's name, for messages.
        value: a dictionary or JSON text.
        record: a dataclass.
        advice: unsupported keys, each with what to do instead.

    Raises:
        ValueError: text that is not JSON, or with a duplicate key.
        TypeError: not an object, or an unknown key.
    """
    value = json_object(field, value)
    known = [item.name for item in dataclasses.fields(record)]
    for key in value:
        check_key(field, key, known, advice)
    return value


def check_key(field: str, key: object, known: Collection[str], advice: Mapping[str, str] | None = None) -> None:
    """Raise TypeError unless ``key`` is one of ``known``; see `checked_object`."""
    if not isinstance(key, str):  # possible in a Python dictionary only
        raise TypeError(f"{field} has the key {key!r}, a {type(key).__name__}; keys must be strings")
    if key not in known:
        raise unknown_keyword(field, key, known, (advice or {}).get(key))


def json_object(field: str, value: Any) -> dict[str, Any]:
    """The object in ``value``, a dictionary or JSON text; ``field`` is the setting's name, for messages.

    Raises:
        ValueError: text that is not JSON, or with a duplicate key.
        TypeError: not an object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_object_of)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{field} is not JSON ({error}): {value!r}; it must be an object, in a shell between single quotes: "
                '\'{"key": "value"}\''
            ) from error
        except _RepeatedKeyError as error:
            raise ValueError(f"{field} has the key {error.args[0]!r} twice; leave one out") from error
    if not isinstance(value, dict):
        raise TypeError(f"{field} is {value!r}; it must be a JSON object or a dictionary")
    return value


def string_field(field: str, name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is None or a non-empty string."""
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"{field}: {name} is {value!r}; it must be a string that is not empty")


class _RepeatedKeyError(Exception):
    """An object in JSON text has a duplicate key, which is the argument."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its pairs. By default the parser would silently keep the last of equal keys."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _RepeatedKeyError(key)
        value[key] = item
    return value
