"""OpenTelemetry GenAI spans: OTLP in JSON, one export request a line (the collector's file exporter).

Source of the form: OTLP's JSON encoding and the GenAI semantic conventions (gen-ai-spans, gen-ai-events, the
JSON schema of input messages). Read are spans, and log records of the event
`gen_ai.client.inference.operation.details`. A prompt is looked for in the order of the conventions' age:

    gen_ai.input.messages, gen_ai.system_instructions    current; on the span, on its event, on the log record
    span events gen_ai.{system,user,assistant,tool}.message                            1.28 to 1.36
    span event gen_ai.content.prompt with gen_ai.prompt                                1.27 and before
    gen_ai.prompt.<i>.{role,content}                                                   OpenLLMetry

Content is opt-in: a span without it counts by its lengths. A span of another operation is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, count_of, first_of, json_lines, object_of, with_text

_DETAILS_EVENT = "gen_ai.client.inference.operation.details"
_OPERATIONS = {"chat", "text_completion", "generate_content", "completion"}  # the last is OpenLLMetry's
_MESSAGE_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_INDEXED = re.compile(r"gen_ai\.prompt\.(\d+)\.(role|content)")
_PARAMETERS = {  # name in the conventions -> OpenAI's
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_sequences": "stop",
    "choice.count": "n",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stream": "stream",
}


def recognises(row: Mapping[str, Any]) -> bool:
    return bool({"resourceSpans", "resourceLogs"} & row.keys())


def read(lines: Iterable[Line]) -> Iterator[Found]:
    for found in json_lines(lines):
        if isinstance(found, Rejected):
            yield found
            continue
        number, row = found
        try:
            spans = [*_nested(row, "resourceSpans", "scopeSpans", "spans")]
            records = [*_nested(row, "resourceLogs", "scopeLogs", "logRecords")]
        except (AttributeError, TypeError) as error:
            yield Rejected(number, f"no OTLP in JSON: {error}")
            continue
        for of, held in ((_of_span, spans), (_of_record, records)):
            yield from _each(number, of, held)


def _each(number: int, of: Callable[[int, Any], Found | None], held: Iterable[Any]) -> Iterator[Found]:
    """A line holds hundreds of spans: one that is broken costs itself alone."""
    for one in held:
        try:
            request = of(number, one)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            yield Rejected(number, f"no OTLP in JSON: {error}")
            continue
        if request is not None:
            yield request


def _of_span(number: int, span: Mapping[str, Any]) -> Found | None:
    events = span.get("events") or ()
    attributes = _attributes(span)
    for event in events:
        if event.get("name") == _DETAILS_EVENT:
            attributes = {**attributes, **_attributes(event)}
    if not _is_request(attributes):
        return None
    return _request(number, span, span.get("startTimeUnixNano"), attributes, events)


def _of_record(number: int, record: Mapping[str, Any]) -> Found | None:
    attributes = _attributes(record)
    if _DETAILS_EVENT not in (record.get("eventName"), attributes.get("event.name")) or not _is_request(attributes):
        return None
    moment = first_of(record, "timeUnixNano", "observedTimeUnixNano")
    return _request(number, record, moment, attributes, ())


def _nested(row: Mapping[str, Any], outer: str, inner: str, innermost: str) -> Iterator[Any]:
    for resource in row.get(outer) or ():
        for scope in resource.get(inner) or ():
            yield from scope.get(innermost) or ()


def _is_request(attributes: Mapping[str, Any]) -> bool:
    operation = first_of(attributes, "gen_ai.operation.name", "gen_ai.request.type", "llm.request.type")
    return operation in _OPERATIONS


def _request(
    number: int, span: Mapping[str, Any], nanos: Any, attributes: Mapping[str, Any], events: Iterable[Any]
) -> Found:
    if "error.type" in attributes or (span.get("status") or {}).get("code") in (2, "STATUS_CODE_ERROR"):
        return Rejected(number, "the request failed")
    t_s = int(nanos or 0) / 1e9
    if not t_s:
        return Rejected(number, "the time of its start is not recorded")
    try:
        messages = _messages(attributes, events)
    except ValueError as error:
        return Rejected(number, str(error))
    body = _parameters(attributes)
    if messages:
        body["messages"] = messages
        if tools := object_of(attributes.get("gen_ai.tool.definitions")):
            body["tools"] = [_tool(tool) for tool in tools]
    prompt = count_of(first_of(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"))
    output = count_of(first_of(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"))
    model = str(first_of(attributes, "gen_ai.request.model", "gen_ai.response.model") or "unknown")
    request = with_text(body, prompt, output, model)
    if isinstance(request, str):
        return Rejected(number, request)
    trace, own = span.get("traceId") or "", span.get("spanId") or f"line-{number}"
    session = first_of(attributes, "gen_ai.conversation.id") or trace
    named = {"session_id": session} if session else {}
    return Recorded(number, {"custom_id": f"{trace}/{own}", "t_s": t_s, **named, **request}, prompt)


def _parameters(attributes: Mapping[str, Any]) -> dict[str, Any]:
    named = {ours: attributes.get(f"gen_ai.request.{theirs}") for theirs, ours in _PARAMETERS.items()}
    kind = attributes.get("gen_ai.output.type")
    return {
        **{name: value for name, value in named.items() if value is not None},
        **({"response_format": {"type": "json_object"}} if kind == "json" else {}),
    }


def _messages(attributes: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as OpenAI messages, from the first generation of the conventions that has it."""
    if given := object_of(attributes.get("gen_ai.input.messages")):
        told = object_of(attributes.get("gen_ai.system_instructions")) or []
        system = [{"role": "system", "content": _text(told)}] if told else []
        return [*system, *(part for message in given for part in _message(message))]
    spoken = [(found[1], _attributes(e)) for e in events if (found := _MESSAGE_EVENT.fullmatch(e.get("name", "")))]
    if messages := [{"role": role, "content": said["content"]} for role, said in spoken if "content" in said]:
        return messages
    for event in events:
        if event.get("name") == "gen_ai.content.prompt":
            prompt = object_of(_attributes(event).get("gen_ai.prompt"))
            return prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    indexed: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if found := _INDEXED.fullmatch(key):
            indexed.setdefault(int(found[1]), {})[found[2]] = value
    return [{"role": "user", **indexed[index]} for index in sorted(indexed) if "content" in indexed[index]]


def _message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One message of the conventions; each tool response in it is a message of its own at OpenAI."""
    parts = message.get("parts")
    if not isinstance(parts, list):  # some write OpenAI's own form
        yield dict(message)
        return
    calls = [_call(part) for part in parts if part.get("type") == "tool_call"]
    texts = [part for part in parts if part.get("type") not in ("tool_call", "tool_call_response", "reasoning")]
    if texts or calls:
        content = _text(texts)
        yield {"role": message.get("role"), "content": content, **({"tool_calls": calls} if calls else {})}
    for part in parts:
        if part.get("type") == "tool_call_response":
            answer = first_of(part, "response", "result")
            text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
            yield {"role": "tool", "content": text, **({"tool_call_id": part["id"]} if part.get("id") else {})}


def _text(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    for part in parts:
        if part.get("type") != "text":
            raise ValueError(f"only text parts can be replayed, not {part.get('type')!r}")
    return "".join(str(part.get("content", "")) for part in parts)


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": part.get("name"), "arguments": text}
    return {**({"id": part["id"]} if part.get("id") else {}), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {one["key"]: _value(one.get("value") or {}) for one in holder.get("attributes") or ()}


def _value(value: Mapping[str, Any]) -> Any:
    """An AnyValue: exactly one of its fields is set; 64-bit numbers are text."""
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "arrayValue":
            return [_value(item) for item in content.get("values") or ()]
        if kind == "kvlistValue":
            return {item["key"]: _value(item.get("value") or {}) for item in content.get("values") or ()}
        return content
    return None
