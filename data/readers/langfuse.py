"""Langfuse export of observations: JSON Lines or one JSON array, from its blob storage export, UI or API.

Source of the form: "Blob Storage Export Field Reference" of langfuse/langfuse-docs. Used are `id`, `trace_id`,
`type`, `start_time`, `level`, `input`, `provided_model_name`, `model_parameters`, `usage_details`,
`tool_definitions`, `session_id`; the API spells them `traceId`, `startTime`, `model`, `modelParameters`. An
observation of another type than GENERATION is no request, and is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, count_of, first_of, json_lines, object_of, seconds, with_text

_TEXTUAL = {"stop", "response_format", "tool_choice"}  # parameters that are no numbers


def recognises(row: Mapping[str, Any]) -> bool:
    return "type" in row and ("trace_id" in row or "traceId" in row) and ("start_time" in row or "startTime" in row)


def read(lines: Iterable[Line]) -> Iterator[Found]:
    for found in json_lines(lines):
        if isinstance(found, Rejected):
            yield found
        elif found[1].get("type") == "GENERATION":
            yield _request(*found)


def _request(number: int, row: Mapping[str, Any]) -> Found:
    if row.get("level") == "ERROR":
        return Rejected(number, "the request failed")
    try:
        t_s = seconds(first_of(row, "start_time", "startTime"))
    except ValueError as error:
        return Rejected(number, f"start_time: {error}")
    usage = first_of(row, "usage_details", "usageDetails", "usage")
    usage = usage if isinstance(usage, dict) else {}
    prompt, output = count_of(usage.get("input")), count_of(usage.get("output"))
    model = first_of(row, "provided_model_name", "model") or "unknown"
    request = with_text({**_parameters(row), **_input(row)}, prompt, output, str(model))
    if isinstance(request, str):
        return Rejected(number, request)
    session = first_of(row, "session_id", "sessionId", "trace_id", "traceId")
    named = {"session_id": session} if session else {}
    return Recorded(number, {"custom_id": row.get("id"), "t_s": t_s, **named, **request}, prompt)


def _input(row: Mapping[str, Any]) -> dict[str, Any]:
    """Messages and tools: a list of messages, an object with `messages`, or the text of a user."""
    given = object_of(row.get("input"))
    tools = _tools(object_of(first_of(row, "tool_definitions", "toolDefinitions")))
    if isinstance(given, dict) and isinstance(given.get("messages"), list):
        tools = given.get("tools") or tools
        given = given["messages"]
    if isinstance(given, str) and given:
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        return {}
    return {"messages": given, **({"tools": tools} if tools else {})}


def _tools(definitions: Any) -> list[dict[str, Any]]:
    """Name to JSON of description and parameters, as OpenAI's `tools`."""
    if not isinstance(definitions, dict):
        return []
    parsed = {name: object_of(value) for name, value in definitions.items()}
    return [
        {"type": "function", "function": {"name": name, **(value if isinstance(value, dict) else {})}}
        for name, value in parsed.items()
    ]


def _parameters(row: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters; integrations write numbers as text and `Infinity` for no limit."""
    given = object_of(first_of(row, "model_parameters", "modelParameters"))
    if not isinstance(given, dict):
        return {}
    read = {name: value if name in _TEXTUAL else _number(value) for name, value in given.items()}
    return {name: value for name, value in read.items() if value is not None}


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and "." not in value else number
