"""Spans of requests for OpenTelemetry (the extra ``otel``), with vLLM's names, under the client's W3C trace context.

A prompt's span is made when it ends, from the times that its output has: while a request runs, nothing is traced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fleetfoot.outputs import RequestMetrics
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

_FLUSH_MS = 2000
"""Milliseconds that the server's end waits for a collector."""


class Tracing:
    """No tracing."""

    def span(self, headers: Mapping[str, str], name: str, params: Any, begin: float) -> RequestSpan | None:
        """The span of a prompt that the engine has accepted; None: it is not traced.

        Args:
            headers: of the HTTP request.
            name: the prompt's id.
            params: of sampling or pooling.
            begin: when the prompt was submitted, in seconds since the epoch: before it was tokenized.
        """
        return None

    def close(self) -> None:
        """Send what has not been sent."""


class RequestSpan:
    """The span of one prompt; it ends once."""

    def __init__(self, tracer: Any, context: Any, attributes: dict[str, Any], begin: float) -> None:
        self._tracer, self._context, self._attributes, self._begin = tracer, context, attributes, begin

    def end(self, output: Any) -> None:
        """The prompt's last output has come."""
        attributes = dict(self._attributes)
        attributes["gen_ai.usage.prompt_tokens"] = len(output.prompt_token_ids)
        metrics: RequestMetrics | None = getattr(output, "metrics", None)
        if metrics is not None and metrics.first_token_ts:
            attributes["gen_ai.usage.completion_tokens"] = metrics.num_generation_tokens
            attributes["gen_ai.response.finish_reasons"] = [str(one.finish_reason) for one in output.outputs]
            for part, seconds in (
                ("time_to_first_token", metrics.first_token_ts - metrics.queued_ts),
                ("time_in_queue", metrics.scheduled_ts - metrics.queued_ts),
                ("time_in_model_prefill", metrics.first_token_ts - metrics.scheduled_ts),
                ("time_in_model_decode", metrics.last_token_ts - metrics.first_token_ts),
                ("time_in_model_inference", metrics.last_token_ts - metrics.scheduled_ts),
            ):
                attributes[f"gen_ai.latency.{part}"] = seconds
        self._emit(attributes)

    def fail(self, cause: str) -> None:
        """It has ended with an error, or was aborted."""
        self._emit(dict(self._attributes), cause)

    def _emit(self, attributes: dict[str, Any], cause: str = "") -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time()
        attributes["gen_ai.latency.e2e"] = end - self._begin
        options = {"context": self._context, "kind": SpanKind.SERVER, "attributes": attributes}
        span = self._tracer.start_span("llm_request", start_time=int(self._begin * 1e9), **options)
        if cause:
            span.set_status(Status(StatusCode.ERROR, cause))
        span.end(int(end * 1e9))


class OpenTelemetryTracing(Tracing):
    """Sends spans to a collector, by OTLP over HTTP, from a thread.

    Args:
        endpoint: of the collector; without a path ``/v1/traces`` is added.
        model: the name in spans.

    Raises:
        FieldError: the endpoint is no URL, or the extra ``otel`` is not installed.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            text = f"is {endpoint!r}; it must be the URL of a collector, such as http://127.0.0.1:4318"
            raise FieldError("otlp_traces_endpoint", text, endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            text = f"needs a package that is missing ({error.name}): pip install 'fleetfoot[otel]'"
            raise FieldError("otlp_traces_endpoint", text, endpoint) from error
        resource = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "fleetfoot"}))
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("fleetfoot")
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    def span(self, headers: Mapping[str, str], name: str, params: Any, begin: float) -> RequestSpan:
        attributes = {"gen_ai.request.id": name, "gen_ai.response.model": self._model}
        for key in ("top_p", "max_tokens", "temperature", "n"):
            if (value := getattr(params, key, None)) is not None:
                attributes[f"gen_ai.request.{key}"] = value
        return RequestSpan(self._tracer, self._propagator.extract(headers), attributes, begin)

    def close(self) -> None:
        if not self._provider.force_flush(_FLUSH_MS):
            logger.warning("the collector of traces does not answer; the last spans are lost")
        self._provider.shutdown()


def make_tracing(endpoint: str | None, model: str) -> Tracing:
    """Tracing to a collector; without an ``endpoint``, none. Raises FieldError as `OpenTelemetryTracing`."""
    return Tracing() if endpoint is None else OpenTelemetryTracing(endpoint, model)
