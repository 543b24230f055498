"""``/openapi.json``: a valid document that describes what the server sends."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.helpers.server import RunningServer


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    return httpx.get(f"{server.url}/openapi.json").json()


@pytest.fixture(scope="module")
def operations(document: Any) -> list[tuple[str, str, Any]]:
    """Method, path and operation."""
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def check(document: Any, name: str, body: Any) -> None:
    """``body`` has the shape of a component of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def test_the_document_is_valid(document: Any, operations: list[Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(set(names)) == len(names) > 10
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
    assert "created" in document["components"]["schemas"]["Completion"]["required"]


def test_every_operation_exists_and_needs_its_key(server: RunningServer, operations: list[Any]) -> None:
    for method, path, operation in operations:
        url = server.url + path.replace("{name}", "other")
        statuses = {"401"} if "security" in operation else {"200"}
        assert {str(httpx.request(method, url).status_code)} == statuses & set(operation["responses"]), path


def test_errors_have_the_declared_shape(client: httpx.Client, document: Any) -> None:
    json = {"Content-Type": "application/json"}
    for status, response in (
        (400, client.post("/v1/completions", json={"prompt": 3})),
        (404, client.get("/nothing")),
        (405, client.put("/v1/completions")),
        (413, client.post("/tokenize", json={"prompt": "x" * 200_000})),
        (415, client.post("/v1/completions", content=b"prompt=x", headers={"Content-Type": "text/plain"})),
        (415, client.post("/v1/completions", content=b"", headers={**json, "Content-Encoding": "gzip"})),
    ):
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        check(document, "ErrorResponse", response.json())


def test_the_methods_of_a_path_are_in_its_refusal(client: httpx.Client, operations: list[Any]) -> None:
    for method, path, _ in operations:
        assert method in client.request("PATCH", path).headers["allow"]
