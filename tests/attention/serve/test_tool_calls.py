"""Calls of tools in an answer's text: found in whatever pieces it comes, and what is no call stays text."""

from __future__ import annotations

import json
import random

import pytest

from attention.serve.tool_calls import CallParser, Form, ToolCall, form_of

WEATHER = ToolCall("weather", '{"city": "Zürich"}')
NOW = ToolCall("now", "{}")
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TAGGED_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def parse(form: Form, text: str, size: int = 1_000_000) -> list[str | ToolCall]:
    """The answer in pieces of `size` characters; neighbouring texts joined."""
    parser = CallParser(form, ("weather", "now"))
    parts = [part for i in range(0, len(text), size) for part in parser.push(text[i : i + size])]
    joined: list[str | ToolCall] = []
    for part in [*parts, *parser.finish()]:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


CASES: list[tuple[Form, str, list[str | ToolCall]]] = [
    ("tagged", "no call here", ["no call here"]),
    ("tagged", "  kept \n", ["  kept \n"]),
    ("tagged", TAGGED, [WEATHER]),
    ("tagged", f"I look.\n\n{TAGGED}", ["I look.", WEATHER]),
    ("tagged", f"{TAGGED}\n{TAGGED_NOW}\n", [WEATHER, NOW]),
    ("tagged", f"{TAGGED} and then {TAGGED_NOW} done", [WEATHER, "and then", NOW, "done"]),
    ("tagged", '<tool_call>{"name": "weather", "argum', ['<tool_call>{"name": "weather", "argum']),
    ("tagged", "<tool_call>{broken}</tool_call> x", ["<tool_call>{broken}</tool_call> x"]),
    ("tagged", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    ("tagged", f"a < b <tool {TAGGED_NOW}", ["a < b <tool", NOW]),
    ("tagged", '{"name": "now", "arguments": {}}', ['{"name": "now", "arguments": {}}']),
    ("json", '{"name": "weather", "parameters": {"city": "Zürich"}}', [WEATHER]),
    ("json", '\n{"name": "weather", "arguments": "{\\"city\\": \\"Zürich\\"}"} ', [WEATHER]),
    ("json", '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', [NOW, NOW]),
    ("json", '{"name": "nobody", "parameters": {}}', ['{"name": "nobody", "parameters": {}}']),
    ("json", '{"name": "now", "parameters": {}', ['{"name": "now", "parameters": {}']),
    ("json", '{"answer": 4}', ['{"answer": 4}']),
    ("json", '[{"name": "now", "arguments": {}}, 4]', ['[{"name": "now", "arguments": {}}, 4]']),
    ("json", 'Well: {"name": "now", "arguments": {}}', ['Well: {"name": "now", "arguments": {}}']),
    ("json", "[]", ["[]"]),
    ("json", "", []),
    ("json", " \n", [" \n"]),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=[f"{form} {text[:40]}" for form, text, _ in CASES])
def test_calls_are_found_in_whatever_pieces_the_answer_comes(
    form: Form, text: str, expected: list[str | ToolCall], size: int
) -> None:
    assert parse(form, text, size) == expected


def test_text_is_not_held_back_longer_than_it_may_still_be_a_call() -> None:
    parser = CallParser("tagged", ())
    assert parser.push("hello") == ["hello"]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [" <toolbox>"]
    plain = CallParser("json", ())
    assert plain.push("a {") == ["a {"]
    assert plain.push('"name"') == ['"name"']


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_added_but_calls_and_the_white_space_beside_them(seed: int) -> None:
    rng = random.Random(seed)
    parts = ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', "<tool", " ", "text", "\n", "{"]
    text = "".join(rng.choice(parts) for _ in range(30))
    found = parse("tagged", text, rng.randint(1, 9))
    written = "".join(TAGGED_NOW if isinstance(part, ToolCall) else part for part in found)
    assert "".join(written.split()) == "".join(text.split())
    assert found == parse("tagged", text)


def test_deep_nesting_is_text_and_no_crash() -> None:
    deep = "[" * 100_000
    assert parse("json", deep) == [deep]


def test_arguments_are_json_text() -> None:
    [call] = parse("tagged", TAGGED)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"city": "Zürich"}


def test_the_chat_templates_own_text_chooses_the_form() -> None:
    assert form_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert form_of("{% if tools %}# Tools ... <tool_call></tool_call>{% endif %}") == "tagged"
    assert form_of('{% if tools %}Respond with {"name": ..., "parameters": ...}{% endif %}') == "json"
