"""Responses against the document that the server makes of itself."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema


class Document:
    """``/openapi.json`` of a server."""

    def __init__(self, url: str) -> None:
        self.content = httpx.get(f"{url}/openapi.json").json()

    @property
    def operations(self) -> list[tuple[str, str, Any]]:
        """Method, path and operation."""
        return [
            (method.upper(), path, operation)
            for path, methods in self.content["paths"].items()
            for method, operation in methods.items()
        ]

    def check(self, response: httpx.Response) -> Any:
        """Assert that a response is as the document describes it. Returns its body; of a stream, its events."""
        method, path = response.request.method, response.request.url.path
        (operation,) = [
            operation
            for other_method, other, operation in self.operations
            if method == other_method and re.fullmatch(re.sub(r"{\w+}", "[^/]+", other), path)
        ]
        media_type = response.headers["content-type"].partition(";")[0]
        schema = operation["responses"][str(response.status_code)]["content"][media_type]["schema"]
        if media_type != "text/event-stream":
            body = response.json()
            self._validate(schema, body)
            return body
        events = sse_data(response.text)
        for event in events:
            self._validate(schema, {"data": event})
        assert events.pop() == "[DONE]"
        bodies = [json.loads(event) for event in events]
        for body in bodies:
            self._validate(schema["properties"]["data"]["anyOf"][0]["contentSchema"], body)
        return bodies

    def _validate(self, schema: Any, body: Any) -> None:
        jsonschema.Draft202012Validator({**schema, "components": self.content["components"]}).validate(body)


def sse_data(text: str) -> list[str]:
    """The data of each event of a whole stream, which has nothing else but comments."""
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    assert blocks.pop() == ""
    assert all(re.fullmatch(r"data: [^\n\r]+", block) for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]
