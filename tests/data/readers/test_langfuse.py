from __future__ import annotations

import json
from typing import Any

import pytest

from data.readers.langfuse import read
from tests.data.readers.logs import lines, reason, rows

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def generation(**changes: Any) -> dict[str, Any]:
    """A row of observations_v2, as the blob storage export writes it."""
    return {
        "id": "o1",
        "trace_id": "t1",
        "session_id": "",
        "type": "GENERATION",
        "start_time": "2024-05-29 13:46:19.963000",
        "level": "DEFAULT",
        "input": json.dumps(MESSAGES),
        "output": "hi",
        "provided_model_name": "gpt-4o",
        "model_parameters": '{"temperature":"0.7","max_tokens":"Infinity","top_p":"1","stream":"true","seed":4}',
        "usage_details": {"input": 20, "output": 7, "total": 27},
        "tool_definitions": {},
    } | changes


def test_a_generation_of_the_blob_export_is_a_chat() -> None:
    [row] = rows(read(lines(generation())))
    assert (row["custom_id"], row["session_id"]) == ("o1", "t1")
    assert row["t_s"] == pytest.approx(1716990379.963)
    assert row["body"] == {
        "model": "gpt-4o",
        "messages": MESSAGES,
        "temperature": 0.7,
        "top_p": 1,
        "stream": True,
        "seed": 4,
        "max_tokens": 7,
    }


def test_the_names_of_the_api_are_read_too() -> None:
    row = {
        "id": "o2",
        "traceId": "t2",
        "sessionId": "s2",
        "type": "GENERATION",
        "startTime": "2024-05-29T13:46:19.963Z",
        "input": {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "model": "m",
        "modelParameters": {"max_tokens": 50},
        "usage": {"input": 20, "output": 0},
    }
    [read_row] = rows(read(lines(row)))
    assert (read_row["session_id"], read_row["body"]["max_tokens"]) == ("s2", 50)
    assert read_row["body"]["tools"] == [{"type": "function", "function": {"name": "f"}}]


def test_tool_definitions_become_tools() -> None:
    definitions = {"find": json.dumps({"description": "d", "parameters": {"type": "object"}})}
    [row] = rows(read(lines(generation(tool_definitions=definitions))))
    function = {"name": "find", "description": "d", "parameters": {"type": "object"}}
    assert row["body"]["tools"] == [{"type": "function", "function": function}]


def test_text_is_what_a_user_says_and_no_input_counts_by_its_lengths() -> None:
    said, silent = rows(read(lines(generation(input="{curly, no JSON"), generation(id="o2", input=""))))
    assert said["body"]["messages"] == [{"role": "user", "content": "{curly, no JSON"}]
    assert silent["shape"] == {"prompt_tokens": 20}


def test_other_observations_are_no_requests() -> None:
    assert list(read(lines(generation(type="SPAN"), generation(type="EVENT")))) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"level": "ERROR"}, "the request failed"),
        ({"start_time": ""}, "start_time: a time is needed"),
        ({"usage_details": {}}, "neither the tokens of the answer nor max_tokens"),
    ],
)
def test_what_cannot_be_replayed_says_why(changes: dict[str, Any], why: str) -> None:
    assert why in reason(read(lines(generation(**changes))))
