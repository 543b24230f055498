"""``/openapi.json``: a valid document that describes what the server sends."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel, ValidationError

from tests.helpers.openapi import Document
from tests.helpers.server import RunningServer, refusal_of_full_queue


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Document:
    return Document(server.url)


def test_the_document_is_valid(document: Document) -> None:
    OpenAPIV31SpecValidator(document.content).validate()
    names = [operation["operationId"] for _, _, operation in document.operations]
    assert len(set(names)) == len(names) > 10
    schemas = document.content["components"]["schemas"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert "created" in schemas["Completion"]["required"]


def test_every_operation_exists_and_needs_its_key(server: RunningServer, document: Document) -> None:
    for method, path, operation in document.operations:
        url = server.url + path.replace("{name}", "other")
        statuses = {"401"} if "security" in operation else {"200"}
        assert {str(httpx.request(method, url).status_code)} == statuses & set(operation["responses"]), path


PROMPT = {"prompt": ["Once upon a time", "The crow"], "max_tokens": 4, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
VLLM = {"return_token_ids": True, "prompt_logprobs": 1}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def check_type(kind: type[BaseModel], body: Any) -> None:
    """``body`` has the types of the client, which do not have the nulls of completions: no end yet, and no logprob of
    the first token."""
    try:
        kind.model_validate(body, strict=True)
    except ValidationError as error:
        places = [problem["loc"][2:] for problem in error.errors() if problem["input"] is None]
        assert kind is Completion and len(places) == error.error_count()
        nulls = {("finish_reason",), ("logprobs", "token_logprobs", 0), ("logprobs", "top_logprobs", 0)}
        assert nulls.issuperset(places)


@pytest.mark.parametrize(
    ("path", "body", "whole", "chunk"),
    [
        ("/v1/completions", {**PROMPT, "n": 2}, Completion, Completion),
        ("/v1/completions", {**PROMPT, "echo": True, **VLLM}, Completion, Completion),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}, Completion, Completion),
        ("/v1/chat/completions", CHAT, ChatCompletion, ChatCompletionChunk),
        ("/v1/chat/completions", {**CHAT, **LOGPROBS, **VLLM, "n": 2}, ChatCompletion, ChatCompletionChunk),
    ],
    ids=["completion", "echo", "echo only", "chat", "chat with logprobs"],
)
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"stream": True, "stream_options": USAGE}], ids=str)
def test_bodies_and_events(
    client: httpx.Client, document: Document, path: str, body: Any, whole: Any, chunk: Any, options: Any
) -> None:
    content = document.check(client.post(path, json={**body, **options}))
    for one in content if options else [content]:
        check_type(chunk if options else whole, one)
    if options:
        assert len({one["id"] for one in content}) == 1
        assert len(content[-1]["choices"]) == (0 if len(options) > 1 else 1)


def test_other_bodies(client: httpx.Client, document: Document) -> None:
    models = document.check(client.get("/v1/models"))
    for card in [*models["data"], document.check(client.get("/v1/models/story"))]:
        Model.model_validate(card, strict=True)
    for path, body in (
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [5, 6]}),
    ):
        document.check(client.post(path, json=body))
    for path in ("/health", "/ready", "/version", "/load"):
        document.check(client.get(path))


def test_errors(client: httpx.Client, document: Document) -> None:
    json = {"Content-Type": "application/json"}
    for status, response in (
        (400, client.post("/v1/completions", json={"prompt": 3})),
        (404, client.post("/v1/completions", json={"prompt": "a", "model": "other"})),
        (413, client.post("/tokenize", json={"prompt": "x" * 200_000})),
        (415, client.post("/v1/completions", content=b"prompt=x", headers={"Content-Type": "text/plain"})),
        (415, client.post("/v1/completions", content=b"", headers={**json, "Content-Encoding": "gzip"})),
        (401, client.post("/v1/completions", headers={"Authorization": "Bearer other"})),
        (429, refusal_of_full_queue(client)),
    ):
        assert response.status_code == status, response.text
        document.check(response)


def test_the_methods_of_a_path_are_in_its_refusal(client: httpx.Client, document: Document) -> None:
    for method, path, _ in document.operations:
        assert method in client.request("PATCH", path).headers["allow"]
