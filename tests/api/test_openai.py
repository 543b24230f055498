"""Completions, chat completions and models with the `openai` client, and the bodies that it does not show."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fleetfoot import LLM, SamplingParams
from tests.helpers.server import RunningServer, refusal_of_full_queue

PROMPT = "Once upon a time"
VLLM_METRICS = (
    *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info", "engine_sleep_state"),
    *("gpu_cache_usage_perc", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_sum"),
    *("time_per_output_token_seconds_count", "request_time_per_output_token_seconds_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_inference_time_seconds_bucket", "prompt_tokens_total", "generation_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "external_prefix_cache_queries_total"),
    *("external_prefix_cache_hits_total", "request_success_total", "num_preemptions_total"),
    *("num_requests_waiting_by_reason", "prompt_tokens_by_source_total", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_max_num_generation_tokens_sum", "request_params_max_tokens_bucket"),
    *("request_params_n_bucket", "iteration_tokens_total_bucket"),
)
"""What the Gateway API, llm-d, production-stack and vLLM's dashboards read of an engine without drafts."""
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a crow."}]


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def greedy(story: LLM, prompt: Any, **fields: Any) -> Any:
    return story.generate(prompt, SamplingParams(temperature=0, **fields), use_tqdm=False)[0]


def test_a_chat_is_that_of_the_engine(api: openai.OpenAI, story: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = story.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    options: dict[str, Any] = {"model": "story-llama", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    message = api.chat.completions.create(**options).choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == expected.text
    assert not chunks[-1].choices and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs_of_both_dialects(api: openai.OpenAI, story: LLM) -> None:
    expected = greedy(story, PROMPT, max_tokens=4, logprobs=2, prompt_logprobs=2)
    tokens = [
        entry[token] for token, entry in zip(expected.outputs[0].token_ids, expected.outputs[0].logprobs, strict=True)
    ]
    options: dict[str, Any] = {"model": "story", "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "logprobs": 2}
    logprobs = api.completions.create(**options).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([token.logprob for token in tokens])
    assert "".join(logprobs.tokens or ()) == expected.outputs[0].text
    assert [len(top) for top in logprobs.top_logprobs or ()] == [2] * 4
    echoed = api.completions.create(**options, echo=True).choices[0]
    assert echoed.text == PROMPT + expected.outputs[0].text
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None
    prompt_logprobs = [
        entry and entry[token].logprob
        for token, entry in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)
    ]
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[1:5] == pytest.approx(prompt_logprobs[1:])
    alone = api.completions.create(model="story", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert alone.text == PROMPT and alone.logprobs is not None
    assert alone.logprobs.token_logprobs is not None and len(alone.logprobs.token_logprobs) == 5
    chat = api.chat.completions.create(
        model="story", messages=MESSAGES, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None
    for one in content.content:
        assert one.bytes == list(one.token.encode())
        assert one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_of_tokens_that_are_parts_of_characters(client: httpx.Client, stream: bool) -> None:
    """Each offset is where the token's text is, or where its character is."""
    prompt = "An é and 🙂 are here"
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 0, "stream": stream}
    body["guided_choice"] = ["é"]
    response = client.post("/v1/completions", json=body)
    if stream:
        events = [json.loads(event[6:]) for event in response.text.split("\n\n") if event.startswith("data: {")]
    else:
        events = [response.json()]
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert text == prompt + "é" and tokens[-2:] == ["\ufffd"] * 2
    whole = [(token, offset) for token, offset in zip(tokens[1:], offsets[1:], strict=True) if "\ufffd" not in token]
    assert len(whole) > 3 and all(text[offset:].startswith(token) for token, offset in whole)
    parts = [text[offset] for token, offset in zip(tokens, offsets, strict=True) if "\ufffd" in token]
    assert parts == ["é"] * 2 + ["🙂"] * 4 + ["é"] * 2


def test_the_example_of_the_readme(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from openai .*?)```", page, re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000", server.url).replace('"none"', '"secret"'), {})
    assert len(capsys.readouterr().out) > 100


REFUSED = [
    ({"prompt": PROMPT, "nonsense": 1}, "nonsense"),
    ({"prompt": PROMPT, "temperature": "hot"}, "temperature"),
    ({"prompt": PROMPT, "top_p": 2}, "top_p"),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
    ({"prompt": PROMPT, "n": 0}, "n"),
    ({"prompt": PROMPT, "vllm_xargs": {"unknown": 1}}, "vllm_xargs"),
    ({"prompt": PROMPT, "vllm_xargs": {"unknown": 2**64}}, "vllm_xargs"),
    ({"prompt": PROMPT, "stream": True, "n": 2, "temperature": 1, "vllm_xargs": {"unknown": 2**64}}, "vllm_xargs"),
    ({"prompt": PROMPT, "best_of": 3}, "best_of"),
    ({"prompt": PROMPT, "suffix": "end"}, "suffix"),
    ({"prompt": PROMPT, "guided_choice": []}, "guided_choice"),
    ({"prompt": PROMPT, "guided_regex": "("}, "guided_regex"),
    ({"prompt": PROMPT, "use_beam_search": 0}, "use_beam_search"),
    ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": PROMPT, "stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"prompt": PROMPT, "guided_choice": ["a"], "allowed_token_ids": [5, 6]}, "allowed_token_ids"),
    ({"prompt": PROMPT, "n": 2049, "temperature": 1}, "n"),
    ({"prompt": [PROMPT] * 2049}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["text", 4]}, "prompt[1]"),
    ({"max_tokens": 3}, "prompt"),
    ({"prompt": PROMPT, "stop": ["x"] * 100}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"messages": MESSAGES, "verbosity": "huge"}, "verbosity"),
    ({"messages": MESSAGES, "chat_template": "{{ messages }}"}, "chat_template"),
]


@pytest.mark.parametrize(
    ("body", "field"), REFUSED, ids=[f"{field}-{index}" for index, (_, field) in enumerate(REFUSED)]
)
def test_a_refusal_names_the_field(client: httpx.Client, body: dict[str, Any], field: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (
        error["param"] == field
        and error["type"] == "invalid_request_error"
        and re.split(r"[.[]", field)[0] in error["message"]
    )


def test_bounds_of_more_than_64_bits(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 9}
    schema = {"type": "integer", "minimum": 5, "maximum": 2**64}
    answers = [client.post("/v1/completions", json={**body, "guided_json": {**schema, "maximum": 2**60}})]
    answers += [
        client.post("/v1/completions", json={**body, "guided_json": given}) for given in (schema, json.dumps(schema))
    ]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] and texts == texts[:1] * 3


def test_statuses(client: httpx.Client, server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    statuses = {
        401: httpx.post(f"{server.url}/v1/completions", json=body),
        404: client.post("/v1/completions", json={**body, "model": "other"}),
        405: client.get("/v1/completions"),
        413: client.post("/v1/completions", json={"prompt": "x" * 200_000}),
        429: refusal_of_full_queue(client),
        400: client.post("/v1/completions", content=b"{"),
    }
    for status, response in statuses.items():
        assert response.status_code == status and response.json()["error"]["message"], response.text
    assert statuses[429].headers["retry-after"] == "1"
    assert client.get("/nothing").json()["error"]["code"] == "unknown_url"
    assert client.get("/v1/models/{name:path}").json()["error"]["code"] == "model_not_found"
    assert "secret" not in "".join(server.log)
    too_long = client.post("/v1/completions", json={"prompt": "word " * 5000}).json()["error"]
    assert too_long["code"] == "context_length_exceeded"


def test_state_needs_no_key(server: RunningServer, client: httpx.Client) -> None:
    assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200
    text = server.stats()
    assert 'fleetfoot:request_success_total{engine="0",finished_reason="length",model_name="story"}' in text
    missing = [name for name in VLLM_METRICS if f"\nvllm:{name}{{" not in text]
    assert missing == []


def test_tokenize_and_detokenize(client: httpx.Client, story: LLM) -> None:
    expected = story.get_tokenizer().encode(PROMPT)
    answer = client.post("/tokenize", json={"prompt": PROMPT}).json()
    assert (answer["tokens"], answer["count"]) == (expected, len(expected))
    assert PROMPT in client.post("/detokenize", json={"tokens": expected}).json()["prompt"]
    assert client.post("/tokenize", json={"messages": MESSAGES}).json()["count"] > 5
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    for fields in ({"add_generation_prompt": False}, {"chat_template_kwargs": {}}, {"tools": []}):
        response = client.post("/tokenize", json={"prompt": PROMPT, **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(fields))


def test_more_tokens_than_there_is_room_for(client: httpx.Client) -> None:
    """The model has room for 2,048 tokens of prompt and output."""
    ids, messages = [5] * 2040, [{"role": "user", "content": "word " * 800}]
    for path, body, field, value in (
        ("/v1/completions", {"prompt": ids}, "max_tokens", 9),
        ("/v1/completions/render", {"prompt": ids}, "max_tokens", 9),
        ("/v1/completions", {"prompt": ["a", "b"]}, "max_tokens", 2**70),
        ("/v1/chat/completions", {"messages": messages}, "max_tokens", 2000),
        ("/v1/chat/completions", {"messages": messages}, "max_completion_tokens", 2000),
        ("/v1/chat/completions/render", {"messages": messages}, "max_completion_tokens", 2000),
        ("/v1/responses", {"input": messages}, "max_output_tokens", 2000),
        ("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 9}}, "max_tokens", 9),
    ):
        sent = body if "sampling_params" in body else {**body, field: value}
        response = client.post(path, json={"model": "story", **sent})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded"), error
        assert "this model's maximum context length is 2048 tokens" in error["message"]  # clients look for it
    for fields, most in (({"max_tokens": 8}, 8), ({}, 8), ({"truncate_prompt_tokens": -1, "max_tokens": 20}, 20)):
        body = {"prompt": ids, "ignore_eos": True, **fields}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == most
    (rendered,) = client.post("/v1/completions/render", json={"prompt": ids}).json()
    assert rendered["sampling_params"]["max_tokens"] == 8
    answer = client.post("/v1/messages", json={"model": "story", "messages": messages, "max_tokens": 2000})
    assert answer.status_code == 200


def test_tokens_in_and_out(client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True},
    }
    whole = client.post("/inference/v1/generate", json=body).json()
    (choice,) = whole["choices"]
    assert len(choice["token_ids"]) == 4 == whole["usage"]["completion_tokens"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]
    lines = client.post("/inference/v1/generate", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    refused = [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"features": {"a": 1}}, "features"),
        ({"sampling_params": {"extra_args": {}}}, "sampling_params.extra_args"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ]
    for fields, param in refused:
        response = client.post("/inference/v1/generate", json={**body, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_many_streams_at_once_and_some_that_leave(server: RunningServer) -> None:
    async def one(api: openai.AsyncOpenAI, leaves: bool) -> str:
        stream = await api.completions.create(
            model="story", prompt=PROMPT, temperature=0, max_tokens=30 if not leaves else 1500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves:
                await stream.close()
                break
        return text

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as api:
            return await asyncio.gather(*(one(api, index % 3 == 0) for index in range(24)))

    texts = asyncio.run(run())
    assert len({text for index, text in enumerate(texts) if index % 3}) == 1
    # those that left were aborted: another request is alone, so the server is idle behind it
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers={"x-api-key": "secret"}
    )
    assert answer.status_code == 200
    assert 'finished_reason="abort"' in server.stats()
