"""Spans of requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from tests.helpers.processes import HANG
from tests.helpers.server import RunningServer

pytest.importorskip("opentelemetry.sdk")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """The URL of a collector, and the spans that it gets, with the attributes of their resource."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: queue.Queue[Any] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put((self.path, values(resource.resource.attributes), span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


BODY = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5, "seed": 1, "ignore_eos": True}
LATENCIES = {"e2e", "time_to_first_token", "time_in_queue"}
LATENCIES |= {f"time_in_model_{part}" for part in ("prefill", "decode", "inference")}


def test_spans_have_vllms_names_and_the_clients_context() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    flags = "--served-model-name", "story", "--otlp-traces-endpoint"
    with (
        collector() as (url, spans),
        RunningServer(*flags, url, env={"OTEL_BSP_SCHEDULE_DELAY": "10"}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        client.post("/v1/completions", json=BODY, headers=headers).raise_for_status()
        path, resource, span = spans.get(timeout=HANG)
        assert (path, resource["service.name"], span.name) == ("/v1/traces", "fleetfoot", "llm_request")
        parents = span.trace_id.hex(), span.parent_span_id.hex()
        assert (*parents, span.kind) == (TRACE, PARENT, span.SPAN_KIND_SERVER)
        found = values(span.attributes)
        usage = [found[f"gen_ai.usage.{name}"] for name in ("prompt_tokens", "completion_tokens")]
        request = {name: found[f"gen_ai.request.{name}"] for name in ("id", "temperature", "max_tokens", "n")}
        assert (usage, found["gen_ai.response.model"]) == ([5, 5], "story")
        assert request == {"id": "mine", "temperature": 0.5, "max_tokens": 5, "n": 1}
        latencies = {name[15:]: value for name, value in found.items() if name.startswith("gen_ai.latency.")}
        assert latencies.keys() == LATENCIES and min(latencies.values()) >= 0
        assert not any("Once" in str(value) for value in found.values())

        client.post("/v1/completions", json={**BODY, "stream": True})
        streamed = spans.get(timeout=HANG)[2]
        assert values(streamed.attributes)["gen_ai.usage.completion_tokens"] == 5 and not streamed.parent_span_id

        client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]}).raise_for_status()
        batch = [values(spans.get(timeout=HANG)[2].attributes) for _ in range(2)]
        assert {one["gen_ai.request.id"][-2:] for one in batch} == {"-0", "-1"}
        for one in batch:  # the whole begins when the request is submitted, before its parts
            whole, *parts = (
                one[f"gen_ai.latency.{part}"] for part in ("e2e", "time_to_first_token", "time_in_model_decode")
            )
            assert whole >= sum(parts)

        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}) as stream:
            next(stream.iter_raw())
        aborted = spans.get(timeout=HANG)[2]
        assert (aborted.status.code, aborted.status.message) == (aborted.status.STATUS_CODE_ERROR, "aborted")


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector:4317", "http://"])
def test_an_endpoint_that_is_no_url_ends_the_start(url: str) -> None:
    with RunningServer("--otlp-traces-endpoint", url) as server:
        assert server.wait() == 2
        assert any("otlp_traces_endpoint" in line for line in server.log)
