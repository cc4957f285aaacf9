"""Calls of tools in the text of an answer: found, taken out, written as OpenAI's `tool_calls`.

Models say calls as text, in the form that their chat template taught them. Two forms are read:

- `tagged`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text around them (Hermes, Qwen);
- `json`: the whole answer is one such object, or a list of them; `parameters` may stand for `arguments` (Llama 3).

What looks like a call and is none (malformed, cut off, a tool that was not offered in the `json` form) stays text,
as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["tagged", "json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON text, as OpenAI gives it."""

    name: str
    arguments: str


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None for one without a place for tools."""
    if "tools" not in template:
        return None
    return "tagged" if _OPEN in template else "json"


class CallParser:
    """Splits an answer, as its text comes, into text and whole calls, in order.

    White space beside a call is dropped. Text that may still become a call is held back.
    """

    def __init__(self, form: Form, names: Collection[str]) -> None:
        """`names` are the tools that were offered."""
        self._form = form
        self._names = frozenset(names)
        self._held = ""
        self._plain = False  # json form: the answer did not begin as JSON
        self._called = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Take text; what became final."""
        self._held += text
        return self._push_tagged() if self._form == "tagged" else self._push_json()

    def finish(self) -> list[str | ToolCall]:
        """What is left once no text follows."""
        held, self._held = self._held, ""
        if self._form == "json" and not self._plain:
            calls = _calls_in(held)
            if calls and all(call.name in self._names for call in calls):
                return list(calls)
        return self._texts(held)

    def _push_tagged(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while True:
            before, tag, rest = self._held.partition(_OPEN)
            if not tag:
                keep = len(before) - _safe(before)
                found += self._texts(before[: len(before) - keep])
                self._held = before[len(before) - keep :]
                return found
            inner, closed, after = rest.partition(_CLOSE)
            if not closed:
                # What stands before the tag is final, but for the white space that a call would take with it.
                found += self._texts(before.rstrip())
                self._held = self._held[len(before.rstrip()) :]
                return found
            if calls := _calls_in(inner):
                found += [*self._texts(before.rstrip()), *calls]
                self._called = True
            else:
                found += self._texts(before + tag + inner + closed)
            self._held = after

    def _push_json(self) -> list[str | ToolCall]:
        begin = self._held.lstrip()
        self._plain = self._plain or (bool(begin) and begin[0] not in "{[")
        if not self._plain:
            return []
        text, self._held = self._held, ""
        return [text] if text else []

    def _texts(self, text: str) -> list[str | ToolCall]:
        """Text as a list, empty for none; without the white space that follows a call."""
        if self._called:
            text = text.lstrip()
            if not text:
                return []
            self._called = False
        return [text] if text else []


def _safe(text: str) -> int:
    """How much of a text cannot be part of a call: without trailing white space and the beginning of a tag."""
    end = len(text)
    for size in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if _OPEN.startswith(text[-size:]):
            end -= size
            break
    return len(text[:end].rstrip())


def _calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls that a JSON text holds; empty when it is not JSON or any part of it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    return tuple(call for call in calls if call is not None) if None not in calls else ()


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
