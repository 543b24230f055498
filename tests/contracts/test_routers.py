"""Routers of other projects, unmodified, before two engines: what they send, and what they find there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from tests.helpers.routers import MODEL, Router, free_ports, sglang_router, vllm_router
from tests.helpers.server import RunningServer

pytestmark = pytest.mark.contracts

LONG = "Once upon a time there was a little house in the woods, and in it lived an old woman. " * 3
NAMES = ("kv-aware", "cache-aware", "sglang")


class Engines:
    """Two engines with KV events, and a router of each kind before both."""

    def __init__(self) -> None:
        ports = free_ports(4)
        self.endpoints = [tuple(f"tcp://127.0.0.1:{port}" for port in ports[two : two + 2]) for two in (0, 2)]
        self.servers = [self._server(*pair) for pair in self.endpoints]
        self.routers: dict[str, Router] = {}

    def _server(self, events: str, replays: str) -> RunningServer:
        config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replays}
        flags = "--served-model-name", MODEL, "--kv-events-config", json.dumps(config)
        return RunningServer(*flags, "--dtype", "float32")

    def router(self, name: str) -> Router:
        if name not in self.routers:
            self.routers[name] = self._made(name)
        return self.routers[name]

    def _made(self, name: str) -> Router:
        urls = [server.url for server in self.servers]
        if name == "sglang":
            return sglang_router(*urls, policy="cache_aware")
        if name == "cache-aware":
            return vllm_router("--policy", "cache_aware", "--worker-urls", *urls)
        sources = [
            flag
            for url, (events, replays) in zip(urls, self.endpoints, strict=True)
            for flag in ("--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replays}")
        ]
        policy = "--policy", "kv_aware", "--kv-event-model", MODEL, "--log-level", "debug"
        return vllm_router(*policy, *sources, "--worker-urls", *urls)

    def counts(self, name: str) -> list[int]:
        """The value of a counter in each engine."""
        lines = [server.stats().splitlines() for server in self.servers]
        return [int(float(line.split()[-1])) for one in lines for line in one if line.startswith(f"vllm:{name}{{")]

    def close(self) -> None:
        for router in self.routers.values():
            router.close()
        for server in self.servers:
            server.__exit__()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    try:
        yield made
    finally:
        made.close()


def answer(client: httpx.Client, prompt: str, **fields: object) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("name", NAMES)
def test_requests_through_a_router_are_answered_as_without(engines: Engines, name: str) -> None:
    router = engines.router(name)
    messages = [{"role": "user", "content": "Name three rivers."}]
    options = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    direct = openai.OpenAI(base_url=f"{engines.servers[0].url}/v1", api_key="none")
    routed = openai.OpenAI(base_url=f"{router.client.base_url}/v1", api_key="none")
    with direct, routed:
        expected = direct.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
        whole = routed.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == expected.choices[0].message.content
        assert whole.usage == expected.usage
        for stream in (
            routed.chat.completions.create(messages=messages, stream=True, **options),  # type: ignore[call-overload]
            routed.completions.create(prompt=LONG, stream=True, **options),  # type: ignore[call-overload]
        ):
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == direct.completions.create(prompt=LONG, **options).choices[0].text  # type: ignore[call-overload]
        assert [model.id for model in routed.models.list()] == [MODEL]
    refusal = router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "temperature": -1})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("name", NAMES)
def test_a_router_sends_a_prefix_where_it_is(engines: Engines, name: str) -> None:
    router = engines.router(name)
    assert answer(router.client, f"{name} {LONG}")
    before = engines.counts("prefix_cache_hits_total")
    for number in range(4):
        assert answer(router.client, f"{name} {LONG} {number}")
    found = [after - so_far for after, so_far in zip(engines.counts("prefix_cache_hits_total"), before, strict=True)]
    assert max(found) >= 4 * 64 and min(found) == 0
    if name == "kv-aware":  # by the events, and by token ids of the rendered prompt
        decisions = [line for line in router.log if "KV prefix decision" in line][-4:]
        assert all("missing_tokens" not in line for line in decisions), decisions


def test_an_engine_that_is_killed_is_one_less(engines: Engines) -> None:
    expected = {name: answer(engines.router(name).client, f"{name} {LONG}") for name in NAMES}
    victim = engines.servers[1].process
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait(60)
    for name in NAMES:
        for _ in range(3):
            assert answer(engines.router(name).client, f"{name} {LONG}") == expected[name]


QUERIED = {
    "the Gateway API's model-server protocol": (
        *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"),
    ),
    "dashboards of vLLM and llm-d": (
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "prompt_tokens_total"),
        *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
        *(f"request_{part}_time_seconds_bucket" for part in ("queue", "prefill", "decode", "inference")),
        *("generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "engine_sleep_state"),
        *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "request_success_total"),
        *("num_preemptions_total", "num_requests_waiting_by_reason", "prompt_tokens_by_source_total"),
    ),
    "production-stack": ("gpu_cache_usage_perc", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries_total"),
}


@pytest.mark.parametrize("reader", QUERIED)
def test_metrics_have_the_names_that_others_read(engines: Engines, reader: str) -> None:
    found = {line.partition("{")[0] for line in engines.servers[0].stats().splitlines()}
    assert [name for name in QUERIED[reader] if f"vllm:{name}" not in found] == []


def test_the_least_busy_engine_is_found(engines: Engines) -> None:
    """What SGLang's router reads of each worker, once a second."""
    get: Callable[[str], httpx.Response] = lambda path: httpx.get(f"{engines.servers[0].url}{path}")  # noqa: E731
    loads = get("/get_load").json()
    assert [set(load) for load in loads] == [{"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}]
    assert loads[0]["num_tokens"] >= 0 == loads[0]["num_reqs"]
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        assert get(path).json()["served_model_name"] == MODEL
