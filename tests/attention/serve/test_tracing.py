"""Spans of requests: times, parents, attributes; and nothing at all unless it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from attention.serve.tracing import no_trace, traced, tracing
from tests.attention.fake_runner import FakeRunner
from tests.attention.serve.fake_instance import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def provider(spans: InMemorySpanExporter) -> TracerProvider:
    found = TracerProvider()
    found.add_span_processor(SimpleSpanProcessor(spans))
    return found


def test_a_request_is_a_span_with_its_parts(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    runner = FakeRunner(num_pages=256, seconds=0.01, eos_token_ids=frozenset())
    with serving(tmp_path, runner, trace=traced(provider(spans), model="fake-1m")) as running:
        body = {"prompt": "a secret", "max_tokens": 4, "temperature": 0, "seed": 7}
        running.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        running.wait_until(lambda: len(spans.get_finished_spans()) == 4)
    named = {span.name: span for span in spans.get_finished_spans()}
    whole: Any = named["text_completion fake-1m"]
    assert (whole.kind, f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (
        SpanKind.SERVER, TRACE, PARENT,
    )  # fmt: skip
    attributes = dict(whole.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == 8 and attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["attention.backend.decode"] == "torch_sdpa:math"
    assert attributes["attention.fingerprint"] == "f1f2f3" and attributes["attention.fallback"] is False
    assert not any("secret" in str(value) for value in attributes.values())
    queue, prefill, decode = (named[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    assert whole.start_time == queue.start_time <= queue.end_time == prefill.start_time < prefill.end_time
    assert prefill.end_time == decode.start_time < decode.end_time <= whole.end_time
    assert decode.end_time - decode.start_time >= 3 * 10_000_000


def test_a_failure_is_an_error(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    runner = FakeRunner(num_pages=256)
    with serving(tmp_path, runner, trace=traced(provider(spans), model="m")) as running:
        runner.fail_steps = {runner.num_steps + 1}
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
        running.wait_until(lambda: len(spans.get_finished_spans()) >= 1)
    whole = spans.get_finished_spans()[-1]
    assert not whole.status.is_ok
    assert whole.attributes is not None and whole.attributes["error.type"] == "500"


def test_one_token_needs_no_decode_and_a_broken_parent_is_none(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with serving(tmp_path, FakeRunner(num_pages=256), trace=traced(provider(spans), model="m")) as running:
        body = {"prompt": "x", "max_tokens": 1}
        running.post("/v1/completions", body, traceparent="00-zz", x_session_id="s1")
        running.wait_until(lambda: len(spans.get_finished_spans()) == 3)
    named = {span.name: span for span in spans.get_finished_spans()}
    assert set(named) == {"queue", "prefill", "text_completion m"}
    whole = named["text_completion m"]
    assert whole.parent is None
    assert whole.attributes is not None and whole.attributes["gen_ai.conversation.id"] == "s1"


def test_a_parent_that_is_not_sampled_is_not_traced(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with serving(tmp_path, FakeRunner(num_pages=256), trace=traced(provider(spans), model="m")) as running:
        running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-00")
        running.wait_until(lambda: running.service.num_open == 0)
    assert spans.get_finished_spans() == ()


def test_it_is_off_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracing(model="m", instance="i") is no_trace


def test_without_the_exporter_it_is_off_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing(model="m", instance="i") is no_trace
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install opentelemetry-exporter-otlp-proto-http" in line
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set" in line
