"""Fields of bodies that reach addresses, paths, programs or an engine's memory: off unless an operator enables them."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from msgspec import inspect

from fleetfoot.server.admin import admin_endpoints
from fleetfoot.server.app import make_endpoints
from fleetfoot.server.openai.responses import responses_endpoints
from fleetfoot.server.openapi import Endpoint
from tests.helpers.prefill_decode import nixl
from tests.helpers.server import RunningServer

TEXTS = {
    *("bad_words", "cache_salt", "content", "data_1", "data_2", "description", "documents", "input", "instructions"),
    *(
        "messages",
        "prompt",
        "queries",
        "query",
        "stop",
        "stop_sequences",
        "suffix",
        "system",
        "text",
        "text_1",
        "text_2",
    ),
    "chat_template_kwargs",  # values in a sandboxed template; none is a keyword of the renderer
}
"""Texts that are tokenized, hashed or compared."""
NAMES = {
    *(
        "after",
        "model",
        "name",
        "names",
        "previous_response_id",
        "prompt_name",
        "request_id",
        "request_ids",
        "mode",
        "tags",
    ),
    *("tool_choice", "task_budget"),
}
"""Names that are compared, or looked up among those in memory."""
GRAMMARS = {
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "parameters"),
    *("response_format", "schema", "structured_outputs", "tools"),
}
"""Compiled to grammars; their references are within themselves."""
NUMBERS = {"logit_bias"}
WITHOUT_EFFECT = {
    *("guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "user", "user_id", "user_profile_id", "workspace_id"),
}
UNSUPPORTED = {
    *("audio", "container", "context_management", "conversation", "diagnostics", "function_call", "functions"),
    *(
        "inference_geo",
        "length_penalty",
        "mcp_servers",
        "mm_processor_kwargs",
        "modalities",
        "moderation",
        "prediction",
    ),
    *("speed", "thread", "use_beam_search", "web_search_options"),
}
"""Refused unless neutral."""
GUARDED = {
    "chat_template": "{{ messages }}",
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"kv_transfer_params": {"do_remote_decode": True}},
}
"""Refused unless a flag of the server enables them; with a value each."""
ADMIN = {
    *("args", "init_info", "kwargs", "method", "overrides", "patches", "profile_prefix", "update_info", "weights_path"),
}
"""Of routes that `--enable-admin-routes` adds, with a key of their own: addresses, paths and methods of workers."""
PROMPT = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
RERANK = {"query": "a", "documents": ["b"]}
TEXT_PAIR = {"text_1": "a", "text_2": "b"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT,
    "/v1/completions/render": PROMPT,
    "/v1/chat/completions/render": CHAT,
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"model": "story", "max_tokens": 1, **CHAT},
    "/v1/messages/count_tokens": {"model": "story", **CHAT},
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": TEXT_PAIR,
    "/v1/score": TEXT_PAIR,
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
}
"""Path -> a body of it."""


def endpoints(*, is_admin: bool = False) -> list[Endpoint]:
    service = MagicMock()
    service.engine.facts.pooling = None
    return admin_endpoints(service) if is_admin else make_endpoints(service) + responses_endpoints(service, MagicMock())


def open_fields(kind: Any, name: str = "") -> set[str]:
    """Names of the fields of a body, and of objects in it, that hold texts or values of any form."""
    if isinstance(kind, inspect.StructType):
        return set().union(*(open_fields(field.type, field.encode_name) for field in kind.fields))
    if isinstance(kind, inspect.UnionType):
        return set().union(*(open_fields(one, name) for one in kind.types))
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return open_fields(kind.item_type, name)
    closed = inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.NoneType, inspect.LiteralType
    return set() if isinstance(kind, closed) else {name}


def bodies_of(rows: list[Endpoint]) -> dict[str, set[str]]:
    """Path -> the open fields of its body and its query."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for kind in (row.request, row.query):
            if kind is not None:
                found.setdefault(row.path, set()).update(open_fields(inspect.type_info(kind)))
    return found


def test_every_field_is_known_here() -> None:
    """A new field must be put into one of the sets above: ask where its value goes. What reaches an address, a path, a
    template, a class, a module or a pickle is off unless a flag enables it."""
    public, admin = bodies_of(endpoints()), bodies_of(endpoints(is_admin=True))
    harmless = TEXTS | NAMES | GRAMMARS | NUMBERS | WITHOUT_EFFECT | UNSUPPORTED
    assert not (set().union(*public.values()) & ADMIN)
    assert set().union(*public.values(), *admin.values()) == harmless | GUARDED.keys() | ADMIN
    assert BODIES.keys() == {row.path for row in endpoints() if row.request is not None and "{" not in row.path}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", GUARDED)
def test_guarded_fields_are_refused_by_name(client: httpx.Client, path: str, field: str) -> None:
    response = client.post(path, json={**BODIES[path], field: GUARDED[field]})
    error = response.json()["error"]
    assert (response.status_code, field in error["message"]) == (400, True), error
    if "messages" not in path.split("/"):  # Anthropic's envelope has no param
        assert error["param"] == field


ADDRESSES: list[Any] = [
    {"do_remote_prefill": True, "offer": "x"},
    {"do_remote_prefill": True, "remote_addresses": ["192.0.2.1:9"], "remote_lease": "x"},
    {"remote_host": "192.0.2.1"},
    {},
]


@pytest.mark.parametrize("params", ADDRESSES)
def test_no_form_of_kv_transfer_params_is_accepted(client: httpx.Client, params: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        response = client.post(path, json={**BODIES[path], "kv_transfer_params": params})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
    response = client.post("/v1/completions", json={**PROMPT, "vllm_xargs": {"kv_transfer_params": params}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "vllm_xargs")


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/schema", "file:///etc/hostname", "/etc/hostname"])
def test_references_of_schemas_reach_nothing(client: httpx.Client, reference: str) -> None:
    response = client.post("/v1/completions", json={**PROMPT, "guided_json": {"$ref": reference}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")


def test_offers_of_clients_that_the_operator_allows() -> None:
    """A server that hands in KV to itself: an offer is accepted once, for its prompt, and in this form alone."""
    flags = ["--enable-kv-offers", "--kv-transfer-config", json.dumps(nixl("kv_both")), "--no-enable-prefix-caching"]
    prompt = "Once upon a time there was a little house in the woods, and in it lived an old woman"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
    with RunningServer(*flags, "--dtype", "float32", "--device", "cpu") as server:
        with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:

            def post(params: Any = None, **fields: Any) -> httpx.Response:
                return client.post("/completions", json={**body, "kv_transfer_params": params, **fields})

            alone = post().json()
            assert "kv_transfer_params" not in alone
            first = post({"do_remote_decode": True}, max_tokens=1).json()["kv_transfer_params"]
            assert first.keys() == {"do_remote_decode", "do_remote_prefill", "offer"}
            refused = [post(first, prompt=f"{prompt}."), post({**first, "offer": f"A{first['offer'][1:]}"})]
            loaded = post(first)
            assert loaded.status_code == 200
            assert loaded.json()["choices"][0]["text"] == alone["choices"][0]["text"]
            assert loaded.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            refused += [post(first), *map(post, ADDRESSES[:3])]
            refused.append(post(vllm_xargs={"kv_transfer_params": first}))
        params = [(response.status_code, response.json()["error"]["param"]) for response in refused]
        offers, fields = [(400, "kv_transfer_params.offer")] * 4, [(400, "kv_transfer_params")] * 2
        assert params == [*offers, *fields, (400, "vllm_xargs")]
