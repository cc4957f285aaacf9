from __future__ import annotations

import json
from typing import Any

import pytest

from data.jsonl import Rejected
from data.readers.otel import read
from tests.data.readers.logs import lines, reason, rows

NANOS = 1_700_000_000_250_000_000
USAGE = {"gen_ai.usage.input_tokens": 97, "gen_ai.usage.output_tokens": 40}
CALL = {"type": "tool_call", "id": "c1", "name": "get_weather", "arguments": {"location": "Paris"}}
CONVERSATION = [
    {"role": "user", "parts": [{"type": "text", "content": "Weather "}, {"type": "text", "content": "in Paris?"}]},
    {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, CALL]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "rainy"}]},
]
AS_OPENAI = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"location": "Paris"}'}}
        ],
    },
    {"role": "tool", "content": "rainy", "tool_call_id": "c1"},
]


def any_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [any_value(item) for item in value]}}
        case dict():
            return {"kvlistValue": {"values": attributes(value)}}
    return {"stringValue": value}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in values.items()]


def span(values: dict[str, Any], *events: tuple[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": "eee19b7ec3c1b174",
        "name": "chat gpt-4",
        "kind": 3,
        "startTimeUnixNano": str(NANOS),
        "attributes": attributes({"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4"} | values),
        "events": [{"name": name, "attributes": attributes(told)} for name, told in events],
        "status": {},
    } | changes


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


@pytest.mark.parametrize("as_text", [True, False], ids=["JSON text", "structured"])
def test_a_span_of_the_current_conventions_is_the_chat_that_was_sent(as_text: bool) -> None:
    written = json.dumps if as_text else lambda value: value
    values = USAGE | {
        "gen_ai.conversation.id": "conv_1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 100,
        "gen_ai.request.max_tokens": 300,
        "gen_ai.request.stop_sequences": ["END"],
        "gen_ai.request.stream": True,
        "gen_ai.system_instructions": written([{"type": "text", "content": "be brief"}]),
        "gen_ai.input.messages": written(CONVERSATION),
        "gen_ai.tool.definitions": written([{"type": "function", "name": "get_weather", "parameters": {"a": 1}}]),
    }
    [row] = rows(read(lines(export(span(values)))))
    assert (row["t_s"], row["session_id"]) == (NANOS / 1e9, "conv_1")
    assert row["custom_id"] == "5b8efff798038103d269b633813fc60c/eee19b7ec3c1b174"
    assert row["body"] == {
        "model": "gpt-4",
        "messages": AS_OPENAI,
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"a": 1}}}],
        "temperature": 0.5,
        "seed": 100,
        "stop": ["END"],
        "stream": True,
        "max_tokens": 40,
    }


OLD = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "told",
    [
        span(
            USAGE,
            ("gen_ai.system.message", {"content": "be brief"}),
            ("gen_ai.user.message", {"content": "hello"}),
            ("gen_ai.choice", {"index": 0}),
        ),
        span(USAGE, ("gen_ai.content.prompt", {"gen_ai.prompt": json.dumps(OLD)})),
        span(
            {
                "gen_ai.usage.prompt_tokens": 97,
                "gen_ai.usage.completion_tokens": 40,
                "gen_ai.prompt.0.role": "system",
                "gen_ai.prompt.0.content": "be brief",
                "gen_ai.prompt.1.role": "user",
                "gen_ai.prompt.1.content": "hello",
            }
        ),
    ],
    ids=["message events", "content event", "indexed"],
)
def test_older_forms_tell_the_same(told: dict[str, Any]) -> None:
    [row] = rows(read(lines(export(told))))
    assert row["body"] == {"model": "gpt-4", "messages": OLD, "max_tokens": 40}


def test_content_may_stand_in_the_event_of_the_operation_and_in_a_log_record() -> None:
    event = "gen_ai.client.inference.operation.details"
    content = {"gen_ai.input.messages": CONVERSATION[:1]}
    record = {
        "eventName": event,
        "timeUnixNano": str(NANOS),
        "traceId": "t",
        "spanId": "s",
        "attributes": attributes({"gen_ai.operation.name": "chat"} | USAGE | content),
    }
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record, {"body": {"stringValue": "other"}}]}]}]}
    for row in rows(read(lines(export(span(USAGE, (event, content))), logs))):
        assert row["body"]["messages"] == AS_OPENAI[1:2]


def test_a_span_without_content_counts_by_its_lengths() -> None:
    [row] = rows(read(lines(export(span(USAGE)))))
    assert (row["shape"], row["body"]["max_tokens"]) == ({"prompt_tokens": 97}, 40)


def test_spans_of_other_operations_are_no_requests_and_one_line_may_hold_several() -> None:
    others = [span({"gen_ai.operation.name": name}) for name in ("execute_tool", "embeddings", "invoke_agent")]
    http = {"traceId": "t", "spanId": "h", "name": "GET /", "attributes": attributes({"http.request.method": "GET"})}
    found = rows(read(lines(export(span(USAGE), *others, http, span(USAGE, spanId="b")))))
    assert [row["custom_id"][-3:] for row in found] == ["174", "0c/b"[-3:]]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (export(span(USAGE | {"error.type": "timeout"})), "the request failed"),
        (export(span(USAGE, status={"code": 2})), "the request failed"),
        (export(span(USAGE, startTimeUnixNano="0")), "time of its start"),
        (export(span({})), "neither the tokens of the answer nor max_tokens"),
        (
            export(span(USAGE | {"gen_ai.input.messages": [{"role": "user", "parts": [{"type": "blob"}]}]})),
            "only text parts can be replayed, not 'blob'",
        ),
        ({"resourceSpans": [{"scopeSpans": [{"spans": ["x"]}]}]}, "no OTLP in JSON"),
        ({"resourceSpans": 3}, "no OTLP in JSON"),
        (export(span(USAGE, startTimeUnixNano="soon")), "no OTLP in JSON"),
    ],
)
def test_what_cannot_be_replayed_says_why(line: dict[str, Any], why: str) -> None:
    assert why in reason(read(lines(line)))


def test_a_broken_span_costs_itself_alone() -> None:
    broken = [span(USAGE | {"gen_ai.input.messages": 3}), span(USAGE, attributes=[{"value": {}}])]
    first, second, good = read(lines(export(*broken, span(USAGE))))
    assert [type(found) for found in (first, second)] == [Rejected, Rejected]
    assert [row["shape"] for row in rows([good])] == [{"prompt_tokens": 97}]
