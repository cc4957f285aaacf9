"""LiteLLM proxy: rows of its table `LiteLLM_SpendLogs`, as JSON Lines or as the array that `/spend/logs` answers.

Source of the form: `schema.prisma` and docs/proxy/ui_logs of BerriAI/litellm. Used are `request_id`, `call_type`,
`startTime`, `prompt_tokens`, `completion_tokens`, `model`, `session_id`, `cache_hit`, `status`, `messages` and
`proxy_server_request`, the body that the client posted. The last two are empty unless the proxy runs with
`store_prompts_in_spend_logs`, and long texts in them are cut with a mark: such a row counts by its lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.jsonl import Rejected
from data.readers.record import Found, Line, Recorded, count_of, first_of, json_lines, object_of, seconds, with_text

_GENERATES = {"completion", "acompletion", "text_completion", "atext_completion"}
_CUT = "litellm_truncated"
# What the proxy adds to a body for itself; no engine sees it.
_OF_THE_PROXY = {"metadata", "litellm_metadata", "litellm_call_id", "litellm_logging_obj", "proxy_server_request"}


def recognises(row: Mapping[str, Any]) -> bool:
    return "request_id" in row and "startTime" in row and ("call_type" in row or "spend" in row)


def read(lines: Iterable[Line]) -> Iterator[Found]:
    for found in json_lines(lines):
        yield found if isinstance(found, Rejected) else _request(*found)


def _request(number: int, row: Mapping[str, Any]) -> Found:
    call = row.get("call_type") or "acompletion"
    if call not in _GENERATES:
        return Rejected(number, f"call_type {call!r} is no chat or text completion")
    if str(row.get("cache_hit")).lower() == "true":
        return Rejected(number, "the proxy answered it from its cache, so that no engine saw it")
    if row.get("status") == "failure":
        return Rejected(number, "the request failed")
    try:
        t_s = seconds(row.get("startTime"))
    except ValueError as error:
        return Rejected(number, f"startTime: {error}")
    prompt, output = count_of(row.get("prompt_tokens")), count_of(row.get("completion_tokens"))
    request = with_text(_body(row), prompt, output, str(row.get("model") or "unknown"))
    if isinstance(request, str):
        return Rejected(number, request)
    session = first_of(row, "session_id")
    named = {"session_id": session} if session else {}
    return Recorded(number, {"custom_id": row.get("request_id"), "t_s": t_s, **named, **request}, prompt)


def _body(row: Mapping[str, Any]) -> dict[str, Any]:
    """The posted body; empty if the log holds none or not all of it."""
    body = object_of(row.get("proxy_server_request"))
    body = {key: value for key, value in body.items() if key not in _OF_THE_PROXY} if isinstance(body, dict) else {}
    messages = object_of(row.get("messages"))
    if not body.get("messages") and not body.get("prompt") and messages and isinstance(messages, list):
        body["messages"] = messages
    return {} if _CUT in json.dumps(body) else body
