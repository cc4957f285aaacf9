from __future__ import annotations

import json
from typing import Any

import pytest

from data.readers.litellm import read
from tests.data.readers.logs import lines, reason, rows

BODY = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "who is it"}],
    "temperature": 0.7,
    "seed": 3,
    "max_completion_tokens": 900,
    "stream": True,
    "metadata": {"user_api_key": "x"},
    "litellm_call_id": "1",
    "top_p": None,
}


def spent(**changes: Any) -> dict[str, Any]:
    """A row of LiteLLM_SpendLogs with the content stored."""
    return {
        "request_id": "chatcmpl-935b8dad",
        "call_type": "acompletion",
        "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05df778539800c9f1243fe6b4b",
        "spend": 0.004803,
        "total_tokens": 329,
        "prompt_tokens": 11,
        "completion_tokens": 318,
        "startTime": "2025-05-30T03:17:06.703+00:00",
        "endTime": "2025-05-30T03:17:11.894+00:00",
        "model": "openai/gpt-4o",
        "session_id": "a96757c4",
        "cache_hit": "False",
        "messages": {},
        "response": {},
        "proxy_server_request": BODY,
    } | changes


def test_the_posted_body_is_replayed_with_the_length_of_its_answer() -> None:
    [row] = rows(read(lines(spent())))
    assert (row["custom_id"], row["session_id"], row["url"]) == (
        "chatcmpl-935b8dad",
        "a96757c4",
        "/v1/chat/completions",
    )
    assert row["t_s"] == pytest.approx(1748575026.703)
    assert row["body"] == {
        "model": "gpt-4o",
        "messages": BODY["messages"],
        "temperature": 0.7,
        "seed": 3,
        "stream": True,
        "max_tokens": 318,
    }


def test_content_may_be_json_in_text_or_stand_in_messages_alone() -> None:
    texts = spent(proxy_server_request=json.dumps(BODY))
    alone = spent(request_id="b", proxy_server_request="{}", messages=json.dumps(BODY["messages"]))
    for row in rows(read(lines(texts, alone))):
        assert row["body"]["messages"] == BODY["messages"]


@pytest.mark.parametrize(
    "content",
    [
        {"messages": {}, "proxy_server_request": {}},
        {"messages": None, "proxy_server_request": None},
        {
            "proxy_server_request": {
                "messages": [{"role": "user", "content": "a... (litellm_truncated 900 chars) ...b"}]
            }
        },
    ],
)
def test_a_row_without_its_whole_content_counts_by_its_lengths(content: dict[str, Any]) -> None:
    [row] = rows(read(lines(spent(**content))))
    assert row["shape"] == {"prompt_tokens": 11}
    assert (row["url"], row["body"]["max_tokens"]) == ("/v1/completions", 318)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"call_type": "aembedding"}, "call_type 'aembedding' is no chat or text completion"),
        ({"cache_hit": "True"}, "from its cache"),
        ({"status": "failure"}, "the request failed"),
        ({"startTime": "yesterday"}, "startTime"),
        ({"startTime": None}, "startTime: a time is needed"),
        ({"completion_tokens": 0, "proxy_server_request": {}}, "neither the tokens of the answer nor max_tokens"),
        ({"prompt_tokens": 0, "proxy_server_request": {}}, "neither a prompt nor its length"),
    ],
)
def test_what_no_engine_could_replay_says_why(changes: dict[str, Any], why: str) -> None:
    assert why in reason(read(lines(spent(**changes))))
