"""Settings that are JSON objects: from text or a dictionary to the keywords of a frozen record."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fleetfoot.utils.suggest import unknown_keyword


def checked_object(field: str, value: Any, record: type) -> dict[str, Any]:
    """The object in ``value``, whose keys are fields of ``record``.

    Args:
        field: the setting's name, for messages.

    Raises:
        ValueError: text that is not JSON. TypeError: no object, or a key that the record does not have.
    """
    value = json_object(field, value)
    known = [item.name for item in dataclasses.fields(record)]
    for key in value:
        if key not in known:
            raise unknown_keyword(field, key, known)
    return value


def json_object(field: str, value: Any) -> dict[str, Any]:
    """The object in ``value``, a dictionary or JSON text; ``field`` is the setting's name, for messages.

    Raises:
        ValueError: text that is not JSON. TypeError: no object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{field} is not JSON ({error}): {value!r}") from error
    if not isinstance(value, dict):
        raise TypeError(f"{field} is {value!r}; it must be a JSON object or a dictionary")
    return value


def string_field(field: str, name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a string that is not empty, or None."""
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"{field}: {name} is {value!r}; it must be a string that is not empty")
