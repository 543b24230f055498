"""Settings that are JSON objects: from text or a dictionary to the keywords of a frozen record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from fleetfoot.utils.validation import unknown_keyword


def checked_object(field: str, value: Any, record: type, advice: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The object in ``value``, whose keys are fields of ``record``.

    Args:
        field: the setting's name, for messages.
        advice: keys that the record does not have, each with what to do instead.

    Raises:
        ValueError: text that is not JSON, or that has a key twice. TypeError: no object, or a key that the record does
            not have.
    """
    value = json_object(field, value)
    known = [item.name for item in dataclasses.fields(record)]
    for key in value:
        check_key(field, key, known, advice)
    return value


def check_key(field: str, key: object, known: Collection[str], advice: Mapping[str, str] | None = None) -> None:
    """Raise TypeError unless ``key`` is one of ``known``; see `checked_object`."""
    if not isinstance(key, str):  # only a dictionary of Python has such keys
        raise TypeError(f"{field} has the key {key!r}, a {type(key).__name__}; keys must be strings")
    if key not in known:
        raise unknown_keyword(field, key, known, (advice or {}).get(key))


def json_object(field: str, value: Any) -> dict[str, Any]:
    """The object in ``value``, a dictionary or JSON text; ``field`` is the setting's name, for messages.

    Raises:
        ValueError: text that is not JSON, or that has a key twice. TypeError: no object.
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
    """Raise TypeError unless ``value`` is a string that is not empty, or None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"{field}: {name} is {value!r}; it must be a string that is not empty")


class _RepeatedKeyError(Exception):
    """An object in JSON text has a key twice; the argument is the key."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of the keys and values in an object: the parser by itself would let the last of equal keys win."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _RepeatedKeyError(key)
        value[key] = item
    return value
