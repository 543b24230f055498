"""Requests that are malformed, huge or hostile: each is refused with a status of its own, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fleetfoot.server.template_process import render_apart

BIG = 10**30
PROMPT: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TEXT = b'{"max_tokens": 1, "prompt": '

PROPERTIES = {f"p{number}": {"type": "string"} for number in range(1001)}
WIDE = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]

RAW = {
    "empty": b"",
    "cut off": b'{"prompt": "a"',
    "null": b"null",
    "list": b"[]",
    "deep objects": TEXT + b'"a", "metadata": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5000 + b"}",
    "deep lists": TEXT + b"[" * 5000 + b"]" * 5000 + b"}",
    "not a number": TEXT + b'"a", "temperature": NaN}',
    "infinity": TEXT + b'"a", "temperature": 1e999}',
    "digits": TEXT + b'"a", "seed": ' + b"9" * 50000 + b"}",
    "lone surrogate": TEXT + b'"\\ud800"}',
    "invalid UTF-8": TEXT + b'"\xff\xfe"}',
    "UTF-16": json.dumps(PROMPT).encode("utf-16"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_not_json(client: httpx.Client, name: str) -> None:
    response = client.post("/v1/completions", content=RAW[name])
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "\\ud800"}', "prompt"),
        ("/v1/completions", b'{"stop": ["\\\\ud800", "\\ud83d\\ude00", "x\\udc00y"], "prompt": "a"}', "stop[2]"),
        (
            "/v1/chat/completions",
            b'{"messages": [{}, {"content": [{"text": "\\ud83d\\n"}]}]}',
            "messages[1].content[0].text",
        ),
        ("/v1/responses", b'{"a\\"b": [1, {}], "metadata": {"c": "\\udfff"}}', "metadata.c"),
        ("/v1/completions", b'{"user": "x", "\\ud800": 1}', None),
        ("/v1/completions", b'{"prompt": [' + b'"a", ' * 2000 + b'"\\ud800"]}', "prompt[2000]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_half_a_character_is_named(client: httpx.Client, path: str, body: bytes, param: str | None) -> None:
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert f"{param or 'the body'} has \\ud" in error["message"] and "half of a character" in error["message"]


@pytest.mark.parametrize(("depth", "status"), [(256, 200), (257, 400), (3000, 400)])
def test_arguments_that_are_too_deep_are_named(client: httpx.Client, depth: int, status: int) -> None:
    call = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
    ]
    items = [
        {"type": "function_call", "call_id": "1", **call},
        {"type": "function_call_output", "call_id": "1", "output": ""},
    ]
    chat = client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    response = client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
    assert (chat.status_code, response.status_code) == (status, status)
    if status == 400:
        for answer, place in ((chat, "messages[1].tool_calls[0].function.arguments"), (response, "input[0].arguments")):
            assert answer.json()["error"]["param"] == place
            assert answer.json()["error"]["message"].endswith("is nested deeper than 256 levels, which is the limit")


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((field, {**PROMPT, field: BIG}) for field in ("n", "seed", "logprobs", "prompt_logprobs", "priority")),
    *((field, {**PROMPT, field: -7}) for field in ("max_tokens", "n", "top_k", "min_tokens", "truncate_prompt_tokens")),
    *(
        (field, {**PROMPT, field: 1e300})
        for field in ("temperature", "top_p", "repetition_penalty", "presence_penalty")
    ),
    *((field, {**PROMPT, field: [BIG]}) for field in ("stop_token_ids", "allowed_token_ids")),
    *((field, {**PROMPT, field: ["x"] * 5000}) for field in ("stop", "bad_words")),
    ("bad_words", {**PROMPT, "prompt": ["a"] * 9, "bad_words": ["x" * 300] * 100}),
    ("bad_words", {**PROMPT, "n": 100, "bad_words": ["x" * 30] * 100}),
    ("prompt_logprobs", {**PROMPT, "prompt": ["~" * 1100] * 50, "prompt_logprobs": 20}),
    ("tools", {**CHAT, "tools": WIDE, "tool_choice": "required"}),
    ("prompt", {**PROMPT, "prompt": [-1]}),
    ("prompt", {**PROMPT, "prompt": [BIG]}),
    ("prompt", {**PROMPT, "prompt": [1] * 5000}),
    ("prompt", {**PROMPT, "prompt": ["a"] * 65}),  # more than the queue holds
    ("prompt", {**PROMPT, "prompt": ["a"] * 2049}),
    ("prompt", {**PROMPT, "prompt": ["a"] * 20_000}),
    ("tools", {**CHAT, "tools": [{}] * 1025}),
    ("messages", {**CHAT, "messages": [{}] * 16_385}),
    ("messages", {**CHAT, "messages": [{"role": "user", "content": [1] * 16_385}]}),
    ("guided_choice", {**PROMPT, "guided_choice": ["a"] * 16_385}),
    ("prompt[1]", {**PROMPT, "prompt": [[1], []]}),
    ("stop_token_ids", {**PROMPT, "stop_token_ids": [1] * 5000}),
    ("logit_bias", {**PROMPT, "logit_bias": {str(BIG): 1}}),
    ("logit_bias[1]", {**PROMPT, "logit_bias": {"1": 1e300}}),
    ("request_id", {**PROMPT, "request_id": "a" * 129}),
    ("request_id", {**PROMPT, "request_id": "line\nbreak"}),
    ("cache_salt", {**PROMPT, "cache_salt": ""}),
    ("x" * 200, {**PROMPT, "x" * 90_000: 1}),
    ("chat_template_kwargs", {**CHAT, "chat_template_kwargs": {"self": 1, "return_dict": True}}),
    ("messages[0].role", {"messages": [{"role": [], "content": "a"}]}),
]


@pytest.mark.parametrize(("field", "body"), REFUSED, ids=[f"{field[:20]}-{n}" for n, (field, _) in enumerate(REFUSED)])
def test_a_value_beyond_limits(client: httpx.Client, field: str, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert len(response.content) < 5000


def test_numbers_above_all_that_matter(client: httpx.Client) -> None:
    body = {
        **PROMPT,
        "stop_token_ids": list(range(1000)),
        "truncate_prompt_tokens": BIG,
        "top_k": BIG,
    }
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_small_request_waits_for_no_request_of_many_sequences(client: httpx.Client) -> None:
    many = {**PROMPT, "n": 1500, "temperature": 1, "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        begin = time.perf_counter()
        answer = pool.submit(client.post, "/v1/completions", json=many)
        while client.get("/load", timeout=10).json()["server_load"] == 0:
            time.sleep(0.01)
        small_begin = time.perf_counter()
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        small_s = time.perf_counter() - small_begin
        assert len(answer.result().json()["choices"]) == 1500
    assert small_s < 0.5 * (time.perf_counter() - begin)


def test_nesting_that_a_template_gets(client: httpx.Client) -> None:
    content = json.dumps(CHAT)[:-1].encode() + b', "chat_template_kwargs": {"x": ' + b"[" * 900 + b"]" * 900 + b"}}"
    response = client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template_kwargs"


def test_duplicate_request_ids(client: httpx.Client) -> None:
    body = {**PROMPT, "prompt": ["a", "b"], "max_tokens": 60, "ignore_eos": True, "stream": True, "request_id": "same"}
    with client.stream("POST", "/v1/completions", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        assert client.post("/v1/completions", json={**PROMPT, "request_id": "same"}).json()["id"] == "same"
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "not been rendered after"),
        ("{{ 9 ** (9 ** 9) }}", "not been rendered after"),
        ("{{ 'a' * 10000000000 }}", "MemoryError"),
        ("{{ 'a' * 20000000 }}", "makes 20000000 characters"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "nested too deeply"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
    ids=["loop", "power", "memory", "long", "nested", "error"],
)
def test_a_template_of_a_request_has_limits(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        asyncio.run(render_apart(source, [CHAT["messages"]], {}, seconds=1.0 if "rendered" in problem else 60.0))


def test_a_template_of_a_request() -> None:
    options = {"variables": {"bos_token": "<s>"}, "add_generation_prompt": False}
    (text,) = asyncio.run(render_apart("{{ bos_token }}{{ messages[0].content }}", [CHAT["messages"]], options))
    assert text == "<s>a"


def test_the_headers_are_counted(client: httpx.Client) -> None:
    few = {f"x-{number}": "a" for number in range(80)}
    assert client.get("/health", headers=few).status_code == 200
    response = client.get("/health", headers=few | {f"y-{number}": "a" for number in range(80)})
    assert response.status_code == 431
    assert client.get("/health").status_code == 200


def test_large_requests_that_are_within_the_limits(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(200)]
    body = {**CHAT, "messages": CHAT["messages"] * 2000, "tools": tools, "truncate_prompt_tokens": 20}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == 20
    text = "the little fox ran. " * 4500
    response = client.post("/v1/completions", json={**PROMPT, "prompt": text, "truncate_prompt_tokens": 30})
    assert response.json()["usage"]["prompt_tokens"] == 30
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens[1:9000]}).json()["prompt"] in text
    answer = client.post("/v1/completions", json={**PROMPT, "prompt": tokens[-30:], "temperature": 0}).json()
    body = {**PROMPT, "prompt": text, "truncate_prompt_tokens": 30, "temperature": 0}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == answer["choices"][0]["text"]
