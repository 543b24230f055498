"""Prompts of one engine, and answers of another, as other projects' routers hand KV over between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
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


_TIMES = "queue", "prefill", "decode", "inference"
READ_BY_OTHERS = {
    # the Gateway API's model servers
    *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info", "lora_requests_info"),
    # boards of vLLM and llm-d
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", *(f"request_{name}_time_seconds" for name in _TIMES)),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits", "num_preemptions", "engine_sleep_state"),
    *(
        "num_requests_waiting_by_reason",
        "prompt_tokens_by_source",
        "iteration_tokens_total",
        "request_prefill_kv_computed_tokens",
    ),
    *("nixl_xfer_time_seconds", "nixl_post_time_seconds", "nixl_bytes_transferred", "nixl_num_descriptors"),
    *("nixl_num_failed_transfers", "nixl_num_failed_notifications", "nixl_num_kv_expired_reqs"),
    # production-stack
    *("gpu_cache_usage_perc", "gpu_prefix_cache_hits", "gpu_prefix_cache_queries"),
}
"""Families without ``vllm:``; counters end in ``_total`` besides. With a drafter there is ``spec_decode_*``."""


def test_metrics_that_others_read_are_there(pair: tuple[RunningServer, RunningServer]) -> None:
    for number in range(2):
        body = {**FIELDS, "prompt": f"{number}: {PROMPT}"}
        given = {"do_remote_decode": True}
        for server in pair:
            answer = httpx.post(
                f"{server.url}/v1/completions", json={**body, "kv_transfer_params": given}, timeout=60
            ).json()
            given = answer.get("kv_transfer_params")
    families = {one.name.removeprefix("vllm:"): one for one in text_string_to_metric_families(pair[1].stats())}
    assert READ_BY_OTHERS - {*families} == set()
    for name in READ_BY_OTHERS:
        assert all(sample.labels.keys() >= {"model_name", "engine"} for sample in families[name].samples), name
    values = {sample.name: sample.value for one in families.values() for sample in one.samples}
    assert values["vllm:nixl_bytes_transferred_sum"] >= 2 * 64 * 1024
    assert 0 < values["vllm:request_prefill_kv_computed_tokens_sum"] < values["vllm:request_prompt_tokens_sum"] / 2
    assert values["vllm:nixl_xfer_time_seconds_sum"] >= values["vllm:nixl_post_time_seconds_sum"] > 0
    assert values["vllm:nixl_num_descriptors_count"] == values["vllm:nixl_xfer_time_seconds_count"] >= 2
    adapters = families["lora_requests_info"].samples[0].labels
    assert (adapters["max_lora"], adapters["running_lora_adapters"]) == ("0", "")
