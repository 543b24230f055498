"""The table of endpoints, which the router reads, and ``/openapi.json``, which is made of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import inspect

from fleetfoot._version import __version__
from fleetfoot.server.http import OPEN_PATHS, ErrorResponse, Handler

READS = (400, 404, 408, 413, 415)
"""Statuses of an endpoint that reads a body which names a model."""
RUNS = (*READS, 429, 500, 503)
"""Statuses of an endpoint that runs requests of the engine."""
_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row: a method of a path."""

    method: str
    path: str
    """As of Starlette's routes: ``{name}`` or ``{name:path}`` is a parameter."""
    handler: Handler
    summary: str
    request: Any = None
    """The type that the body is decoded as; None: there is no body."""
    response: Any = None
    """The type of what is encoded with status 200; None: there is no body."""
    events: Any = None
    """The type of the JSON in each server-sent event, for a body with ``stream`` true."""
    ends_with_done: bool = False
    """Whether the data of the last event is ``[DONE]``."""
    query: type[msgspec.Struct] | None = None
    """The parameters in the query."""
    errors: tuple[int, ...] = ()
    """Its statuses besides 200 and 401."""
    media_type: str = "application/json"
    """The media type of ``response``."""
    is_body_optional: bool = False
    is_admin: bool = False
    """Whether it changes the engine, and has a key of its own."""
    envelope: type[Any] = ErrorResponse
    """The type of errors. Its method ``of`` makes one of an `ApiError`."""


def openapi_document(endpoints: Sequence[Endpoint], *, has_keys: bool, root_path: str = "") -> dict[str, Any]:
    """The document, of OpenAPI 3.1.

    Args:
        has_keys: clients need a key, except for `OPEN_PATHS`.
        root_path: the path of the application behind a proxy.
    """
    schemas = _Schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r":[a-z]+}", "}", endpoint.path)
        needs_key = endpoint.is_admin or (has_keys and endpoint.path not in OPEN_PATHS)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas, needs_key=needs_key)
    components: dict[str, Any] = {"schemas": schemas.components}
    if has_keys or any(endpoint.is_admin for endpoint in endpoints):
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fleetfoot", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, schemas: _Schemas, *, needs_key: bool) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", f"{endpoint.method} {endpoint.path}".lower()).strip("_")
    operation: dict[str, Any] = {"operationId": name, "summary": endpoint.summary}
    parameters = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for one in re.findall(r"{([a-z_]+)", endpoint.path)
    ]
    if endpoint.query is not None:
        fields = schemas.components[endpoint.query.__name__]
        parameters += [
            {"name": one, "in": "query", "required": one in fields.get("required", ()), "schema": schema}
            for one, schema in fields["properties"].items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.request is not None:
        content = {"application/json": {"schema": schemas.of(endpoint.request)}}
        operation["requestBody"] = {"required": not endpoint.is_body_optional, "content": content}
    success: dict[str, Any] = {"description": "OK"}
    if endpoint.response is not None:
        success["content"] = {endpoint.media_type: {"schema": schemas.of(endpoint.response)}}
    if endpoint.events is not None:
        data = {"anyOf": [schemas.of(endpoint.events), schemas.of(endpoint.envelope)]}
        success["content"]["text/event-stream"] = {"schema": _event(data, ends_with_done=endpoint.ends_with_done)}
    operation["responses"] = {"200": success}
    error = {"application/json": {"schema": schemas.of(endpoint.envelope)}}
    for status in sorted({*endpoint.errors, *([401] if needs_key else [])}):
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": error}
        if status == 429:
            response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
        operation["responses"][str(status)] = response
    if needs_key:
        operation["security"] = [{"bearer": []}, {"header": []}]
    return operation


def _event(schema: dict[str, Any], *, ends_with_done: bool) -> dict[str, Any]:
    """The schema of each server-sent event.

    Args:
        schema: of its data.
    """
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    if ends_with_done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    description = "Each event. Comments keep the connection alive. An error after the first event is an event, too."
    return {"type": "object", "description": description, "properties": {"data": data}, "required": ["data"]}


class _Schemas:
    """JSON schemas of the types of endpoints."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        rows = list(endpoints)
        requests = [one for row in rows for one in (row.request, row.query) if one is not None]
        responses = [one for row in rows for one in (row.response, row.events, row.envelope) if one is not None]
        types = list(dict.fromkeys([*requests, *responses, *_structs(responses)]))
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REF)
        self._schemas = dict(zip(types, schemas, strict=True))
        for struct in _structs(responses) - _structs(requests):
            name = self._schemas[struct]["$ref"].rpartition("/")[2]
            self.components[name]["required"] = _always_encoded(struct)
        for request in requests:
            properties = self.components[self._schemas[request]["$ref"].rpartition("/")[2]]["properties"]
            for field, neutral in getattr(request, "unsupported", {}).items():
                if field in properties:
                    properties[field] = {"enum": [None, *neutral], "description": "Not supported."}

    def of(self, kind: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self._schemas[kind]
        return schema


def _always_encoded(struct: type[msgspec.Struct]) -> list[str]:
    """The fields that every encoded object has."""
    if struct.__struct_config__.omit_defaults:
        return [field.encode_name for field in msgspec.structs.fields(struct) if field.required]
    tag = struct.__struct_config__.tag_field
    fields = [field.encode_name for field in msgspec.structs.fields(struct) if field.default is not msgspec.UNSET]
    return [*([tag] if tag else []), *fields]


def _structs(types: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """The Structs among types and what they hold."""
    found: set[type[msgspec.Struct]] = set()

    def visit(entry: Any) -> None:
        if isinstance(entry, inspect.StructType):
            if entry.cls in found:
                return
            found.add(entry.cls)
        for child in _children(entry):
            visit(child)

    for entry in inspect.multi_type_info(types):
        visit(entry)
    return found


def _children(entry: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(entry, inspect.StructType):
        yield from [field.type for field in entry.fields]
        return
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        yield from [one for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, inspect.Type)]
