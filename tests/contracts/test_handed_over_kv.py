"""Prompts of one engine, and answers of another, as other projects' routers hand KV over between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from tests.helpers.prefill_decode import nixl
from tests.helpers.routers import MODEL, vllm_router
from tests.helpers.server import RunningServer

pytestmark = pytest.mark.contracts

PROMPT = "Once upon a time there was a little house in the woods, and in it lived an old woman. " * 3
FIELDS = {"model": MODEL, "temperature": 0, "max_tokens": 12}
BODIES = {
    "/v1/completions": {**FIELDS, "prompt": PROMPT},
    "/v1/chat/completions": {**FIELDS, "messages": [{"role": "user", "content": PROMPT}]},
}
SIDECAR = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
"""What llm-d's sidecar (nixlv2) and vllm-router send besides the two switches."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RunningServer, RunningServer]]:
    """A prefill and a decode engine."""
    with ExitStack() as stack:
        flags = "--enable-kv-offers", "--served-model-name", MODEL, "--dtype", "float32", "--kv-transfer-config"
        roles = "kv_producer", "kv_consumer"
        servers = [stack.enter_context(RunningServer(*flags, json.dumps(nixl(role)))) for role in roles]
        yield servers[0], servers[1]


def num_loaded(server: RunningServer) -> int:
    name = "vllm:external_prefix_cache_hits_total{"
    return sum(int(float(line.split()[-1])) for line in server.stats().splitlines() if line.startswith(name))


def text_of(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed(response: httpx.Response) -> str:
    """The text of a stream."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


@pytest.mark.parametrize("path", BODIES)
def test_an_exchange_of_the_sidecar(pair: tuple[RunningServer, RunningServer], path: str) -> None:
    """Its requests, one after the other: the answer is that of one engine, from KV of the other. Nothing is accepted
    twice, changed, or with an address."""
    prefill, decode = (httpx.Client(base_url=server.url, timeout=60) for server in pair)
    with prefill, decode:
        expected = prefill.post(path, json=BODIES[path]).json()
        switches = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {"max_tokens": 1, "stream": False, "kv_transfer_params": {**switches, **SIDECAR}}
        params = [prefill.post(path, json={**BODIES[path], **first}).json()["kv_transfer_params"] for _ in range(2)]
        before = num_loaded(pair[1])
        answer = decode.post(path, json={**BODIES[path], "kv_transfer_params": params[0], "stream": True})
        assert answer.status_code == 200 and streamed(answer) == text_of(expected)
        assert num_loaded(pair[1]) - before >= 64
        address = {**params[1], "remote_host": "192.0.2.1"}
        forged = {**params[1], "offer": params[1]["offer"][:-8] + "AAAAAAAA"}
        for wrong, field in ((params[0], "offer"), (address, ""), (forged, "offer")):
            refusal = decode.post(path, json={**BODIES[path], "kv_transfer_params": wrong})
            param = refusal.json()["error"]["param"]
            assert (refusal.status_code, param) == (400, f"kv_transfer_params.{field}".rstrip("."))


def test_vllm_router_hands_kv_over(pair: tuple[RunningServer, RunningServer]) -> None:
    router = vllm_router("--vllm-pd-disaggregation", "--prefill", pair[0].url, "--decode", pair[1].url)
    try:
        for number, (path, body) in enumerate(BODIES.items()):
            own = json.loads(json.dumps(body).replace("Once", f"{number}: once"))
            expected = text_of(httpx.post(f"{pair[0].url}{path}", json=own, timeout=60).json())
            before = num_loaded(pair[1])
            assert text_of(router.client.post(path, json=own).json()) == expected
            assert num_loaded(pair[1]) - before >= 64
            assert streamed(router.client.post(path, json={**own, "stream": True})) == expected
    finally:
        router.close()
