"""Typed reads from a JSON object, so that every complaint names the file, the field, the value and what would work."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any


class ConfigError(ValueError):
    """A model's ``config.json`` is missing, unreadable, or asks for something that the engine does not do."""


class Fields:
    """A JSON object with the defaults of its kind.

    A field that is absent reads as its default, and so does one that is null, unless null says something of its own.
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
        """``source`` is the file and ``prefix`` the path of this object in it, both for messages only.

        ``nullable``: the fields whose null is not their default.
        """
        self._content = content
        self._defaults = defaults
        self.source = source
        self._prefix = prefix
        self._nullable = nullable

    def raw(self, name: str) -> Any:
        """The value as it stands, or the default."""
        value = self._content.get(name)
        if value is None and not (name in self._content and name in self._nullable):
            return self._defaults.get(name)
        return value

    def error(self, name: str, expected: str) -> ConfigError:
        """The complaint about one field; ``expected`` says what would work."""
        value = self.raw(name)
        found = "missing" if value is None else repr(value)
        return ConfigError(f"{self.source}: {self._prefix}{name} is {found}; {expected}")

    def integer(self, name: str, *, minimum: int = 1) -> int:
        value = self.raw(name)
        # bool is an int to Python, but `true` is no size.
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
