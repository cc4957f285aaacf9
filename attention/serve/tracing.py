"""OpenTelemetry spans of requests, with the attributes of the GenAI semantic conventions.

A span a request (kind SERVER, child of the request's `traceparent`), and in it `queue`, `prefill` and `decode` with the
times of the generation: written when the request has ended, so that serving waits for nothing. Beside `gen_ai.*` stand
the fingerprint and the backends that the execution layer confirmed. Off unless the standard variable
OTEL_EXPORTER_OTLP_ENDPOINT (or _TRACES_ENDPOINT) names a collector and the exporter is installed; nothing is sent
anywhere else. The variable is often set for a whole cluster: an instance without the exporter serves, and says so.

Convention: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attention.scheduler import Generation
from attention.serve.log import event
from attention.serve.request_log import RequestRow

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

#: Told of a request that has ended: its row, its generation, its `traceparent`.
Trace = Callable[[RequestRow, Generation, str | None], None]


def no_trace(row: RequestRow, generation: Generation, traceparent: str | None) -> None:
    """Tracing that is off."""


def tracing(*, model: str, instance: str) -> Trace:
    """What the environment asks for; off, with a line in the log, where it asks for what is not installed."""
    asked = [name for name in _ENDPOINTS if os.environ.get(name)]
    if not asked:
        return no_trace
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found, unused-ignore]
            OTLPSpanExporter,
        )
    except ImportError:
        text = f"{asked[0]} is set, and no trace is sent: pip install opentelemetry-exporter-otlp-proto-http"
        event("tracing_off", severity="warning", message=text)
        return no_trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "attention", "service.instance.id": instance}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return traced(provider, model=model)


def traced(provider: TracerProvider, *, model: str) -> Trace:
    """Spans by that provider."""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = provider.get_tracer("attention.serve")

    def trace(row: RequestRow, generation: Generation, traceparent: str | None) -> None:
        # Taken anew: the wall clock is set now and then, the other one never.
        offset_ns = time.time_ns() - time.perf_counter_ns()

        def wall(perf_s: float) -> int:
            return int(1e9 * perf_s) + offset_ns

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})
        operation = _OPERATIONS.get(row.endpoint, row.endpoint)
        began = generation.submitted
        span = tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=wall(began),
            attributes=_attributes(row, generation, operation, model),
        )
        if row.status >= 500:
            span.set_status(Status(StatusCode.ERROR, row.error))
        inside = set_span_in_context(span)
        for name, start, end in _parts(generation):
            tracer.start_span(name, context=inside, start_time=wall(start)).end(wall(end))
        span.end(wall(began + row.e2e_s))

    return trace


def _parts(generation: Generation) -> list[tuple[str, float, float]]:
    """Name, begin and end of what a request went through, as far as it came."""
    last = generation.last_token if len(generation.output_ids) > 1 else None  # one token needs no decode
    marks = (generation.submitted, generation.admitted, generation.first_token, last)
    names = ("queue", "prefill", "decode")
    return [
        (name, start, end)
        for name, start, end in zip(names, marks, marks[1:], strict=False)
        if start is not None and end is not None
    ]


def _attributes(row: RequestRow, generation: Generation, operation: str, model: str) -> dict[str, Any]:
    params = generation.params
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "attention-release",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stream": row.stream or None,
        "gen_ai.conversation.id": row.session_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (row.finish_reason,),
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.num_reused or None,
        "http.response.status_code": row.status,
        "error.type": str(row.status) if row.status >= 500 else None,
        "attention.request_id": row.request_id,
        "attention.fingerprint": row.fingerprint_id,
        "attention.fallback": row.fallback,
        "attention.fallback.reason": row.fallback_reason,
        **{f"attention.backend.{phase}": backend for phase, backend in generation.confirmed.items()},
    }
    return {name: value for name, value in found.items() if value is not None}
