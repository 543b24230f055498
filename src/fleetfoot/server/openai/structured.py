"""Structured output in OpenAI's and vLLM's fields, as parameters of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fleetfoot.parsers.grammar import closed
from fleetfoot.records.structured_outputs import StructuredOutputsParams, as_structured_outputs
from fleetfoot.server.http import invalid
from fleetfoot.utils.validation import FieldError, shown

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FIELDS = ("response_format", "structured_outputs", *_GUIDED)
"""Fields of a body; at most one of them is given."""
_ENGINE_NAME = "structured_outputs"
"""The engine's name of all of them."""


def structured_outputs(body: Any) -> StructuredOutputsParams | None:
    """What a body has in one of the fields. Raises ApiError."""
    constraints = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    if "response_format" in constraints:
        constraints["response_format"] = read_format("response_format", body.response_format)
        if constraints["response_format"] is None:  # text is no constraint
            del constraints["response_format"]
    if len(constraints) > 1:
        raise invalid(list(constraints)[1], f"{' and '.join(constraints)} exclude each other; give one")
    pattern = body.guided_whitespace_pattern
    if pattern is not None and not constraints.keys() & {"response_format", *_GUIDED}:
        advice = "it needs response_format or a guided field; structured_outputs has a whitespace_pattern of its own"
        raise invalid("guided_whitespace_pattern", f"guided_whitespace_pattern is {shown(pattern)}; {advice}")
    for name, value in constraints.items():
        with _naming(name):
            if name == "structured_outputs":
                return as_structured_outputs(value)
            if name == "response_format":
                return dataclasses.replace(value, whitespace_pattern=pattern)
            return StructuredOutputsParams(**{name.removeprefix("guided_"): value}, whitespace_pattern=pattern)
    return None


def read_format(place: str, value: Any) -> StructuredOutputsParams | None:
    """A ``response_format``; None for text. Raises ApiError that names the field within it."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "structural_tag":
        with _naming(place):
            return StructuredOutputsParams(structural_tag={key: part for key, part in value.items() if key != "type"})
    if kind not in ("text", "json_object", "json_schema"):
        kinds = "'text', 'json_object', 'json_schema' or 'structural_tag'"
        raise invalid(f"{place}.type", f"{place}.type is {shown(kind)}; it must be {kinds}")
    _check_keys(place, value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
    form = value.get("json_schema")
    if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping | bool):
        found = form.get("schema") if isinstance(form, Mapping) else form
        text = f"{place}.json_schema.schema is {shown(found)}; it must be a JSON schema"
        raise invalid(f"{place}.json_schema.schema", text)
    _check_keys(f"{place}.json_schema", form, ("name", "description", "schema", "strict"))
    with _naming(place):
        return schema_constraint(form["schema"], is_strict=form.get("strict") is True)


def _check_keys(place: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises ApiError for a key that would have no effect."""
    for name in value:
        if name not in known:
            message = f"{place}.{name} is unknown; {place} takes {', '.join(known)}"
            raise invalid(f"{place}.{name}", message, "unknown_field")


def schema_constraint(schema: Any, *, is_strict: bool) -> StructuredOutputsParams:
    """JSON of a schema. If it ``is_strict``, objects with named properties have no others, as in OpenAI's API."""
    return StructuredOutputsParams(json=closed(schema) if is_strict else schema)


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    try:
        yield
    except FieldError as error:
        raise _named(error, field) from None


@contextlib.contextmanager
def naming_constraint(body: Any) -> Iterator[None]:
    """An error about the constraint names the field of the body that it comes from."""
    try:
        yield
    except FieldError as error:
        given = [name for name in FIELDS if getattr(body, name, None) is not None]
        raise (_named(error, given[-1]) if given else error) from None


def _named(error: FieldError, field: str) -> FieldError:
    """An error about a constraint as one of the field of the body that has it."""
    engine_name, *parts = error.field.split(".")
    if engine_name != _ENGINE_NAME or field == _ENGINE_NAME:
        return error
    return error.at(".".join([field, *parts[1:]]))
