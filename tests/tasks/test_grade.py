"""Graders: right answers pass, wrong ones say how they are wrong, and nothing a model writes raises."""

from __future__ import annotations

from typing import Any

import pytest

from data.golden_set import GoldenPrompt
from tasks.grade import grade

WEATHER = {
    "kind": "tool_call",
    "name": "get_weather",
    "arguments": {
        "city": {"type": "string", "accept": ["Paris", "Paris, France"]},
        "days": {"type": "integer", "accept": [1, 2], "required": False},
        "rain": {"type": "boolean", "accept": [True], "required": False},
        "hours": {"type": "array", "accept": [[9, 12]], "required": False},
    },
}
SCHEMA = {
    "kind": "json_schema",
    "schema": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]},
    "equals": {"age": 36},
}
ALL: list[dict[str, Any]] = [
    WEATHER,
    SCHEMA,
    {"kind": "exact", "value": "tea"},
    {"kind": "one_of", "values": ["tea"]},
    {"kind": "contains", "values": ["tea"]},
    {"kind": "regex", "pattern": "tea"},
    {"kind": "refusal", "expected": True},
]


def prompt(grader: dict[str, Any]) -> GoldenPrompt:
    return GoldenPrompt.model_validate(
        {
            "prompt_id": "p",
            "category": "answer",
            "language": "en",
            "messages": [{"role": "user", "content": "?"}],
            "max_tokens": 8,
            "grader": grader,
        }
    )


def detail(grader: dict[str, Any], output: str) -> str:
    """The detail of a failed grade, `pass` for a pass."""
    judged = grade(prompt(grader), output)
    assert judged.grader == grader["kind"]
    assert judged.passed == (judged.detail == "")
    return judged.detail or "pass"


@pytest.mark.parametrize("output", ["Paris", " paris.", '"Paris"', "“Paris”!", "Ｐａｒｉｓ", "Paris\n"])
def test_exact_levels_case_width_spacing_quotes_and_a_final_mark(output: str) -> None:
    assert detail({"kind": "exact", "value": "Paris"}, output) == "pass"


@pytest.mark.parametrize("output", ["Paris, France", "Pari", "", "Not Paris"])
def test_exact_wants_the_whole_answer(output: str) -> None:
    assert detail({"kind": "exact", "value": "Paris"}, output).startswith("not_equal:")


def test_one_of_contains_and_regex() -> None:
    assert detail({"kind": "one_of", "values": ["shut", "closed"]}, "Closed.") == "pass"
    assert detail({"kind": "one_of", "values": ["shut", "closed"]}, "open") == "not_equal:'open'"
    assert detail({"kind": "contains", "values": ["red", "car"]}, "The car is Red") == "pass"
    assert detail({"kind": "contains", "values": ["red", "bus"]}, "The car is red") == "missing_text:bus"
    assert detail({"kind": "regex", "pattern": r"- \w+\n- \w+"}, " - sun\n- moon\n") == "pass"
    assert detail({"kind": "regex", "pattern": r"\d+"}, "12 apples").startswith("no_match:")


@pytest.mark.parametrize("output", ['{"age": 36}', '{"age":36.0}', '```json\n{"age": 36}\n```'])
def test_json_is_compared_by_meaning(output: str) -> None:
    assert detail(SCHEMA, output) == "pass"


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ('{"age": 36', "parse_error:"),
        ('Sure! {"age": 36}', "parse_error:"),
        ('{"age": NaN}', "parse_error:"),
        ('{"age": 1e999}', "parse_error:"),
        ("[" * 5000, "parse_error:"),
        ('{"age": "36"}', "schema:$.age"),
        ("[36]", "schema:$"),
        ('{"age": true}', "schema:$.age"),
        ('{"age": 37}', "not_equal:"),
        ('{"age": 36, "name": "x"}', "not_equal:"),
    ],
)
def test_a_wrong_json_answer_says_at_which_step_it_failed(output: str, kind: str) -> None:
    assert detail(SCHEMA, output).startswith(kind)


def test_true_is_not_one_in_json() -> None:
    assert detail({"kind": "json_schema", "schema": {}, "equals": {"a": [1]}}, '{"a": [true]}') != "pass"


@pytest.mark.parametrize(
    "output",
    [
        'get_weather(city="Paris")',
        "get_weather(days=2, city='paris')",
        'get_weather(city="Paris", rain=True, hours=[9, 12])',
        '{"name": "get_weather", "arguments": {"city": "Paris, France"}}',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}\n</tool_call>',
    ],
)
def test_a_right_call_passes_in_either_notation(output: str) -> None:
    assert detail(WEATHER, output) == "pass"


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ('get_wether(city="Paris")', "wrong_function:get_wether"),
        ("get_weather()", "missing_argument:city"),
        ('get_weather(city="Paris", unit="C")', "unexpected_argument:unit"),
        ("get_weather(city=3)", "type_error:city"),
        ('get_weather(city="Paris", days="2")', "type_error:days"),
        ('get_weather(city="Paris", days=True)', "type_error:days"),
        ('get_weather(city="Paris", rain=1)', "type_error:rain"),
        ('get_weather(city="Rome")', "value_error:city"),
        ('get_weather(city="Paris", days=3)', "value_error:days"),
        ('get_weather(city="Paris", hours=[9])', "value_error:hours"),
    ],
)
def test_a_wrong_call_names_its_kind_of_error(output: str, wanted: str) -> None:
    assert detail(WEATHER, output) == wanted


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Paris",
        'get_weather("Paris")',
        "get_weather(**x)",
        "get_weather(city=open('x'))",
        'get_weather(city="Paris"',
        'get_weather(city="Paris"); get_weather(city="Paris")',
        '{"name": "get_weather"}',
        '[{"name": "get_weather", "arguments": {}}]',
        '{"name": "get_weather", "arguments": {"city": "Paris"}, "id": 3}',
    ],
)
def test_what_is_no_single_call_of_literals_is_a_parse_error(output: str) -> None:
    assert detail(WEATHER, output).startswith("parse_error:")


def test_a_refusal_is_told_by_fixed_words_and_the_opposite_can_be_wanted() -> None:
    yes, no = {"kind": "refusal", "expected": True}, {"kind": "refusal", "expected": False}
    assert detail(yes, "I can’t help with that.") == "pass"
    assert detail(yes, "Das kann ich nicht sagen.") == "pass"
    assert detail(yes, "抱歉,不行。") == "pass"
    assert detail(yes, "First, take a brick.").startswith("no_refusal:")
    assert detail(no, "Boil the water first.") == "pass"
    assert detail(no, "I cannot help with that.").startswith("refused:")
    assert detail(yes, " ") == detail(no, "\n") == "empty"


@pytest.mark.parametrize("grader", ALL, ids=lambda grader: str(grader["kind"]))
@pytest.mark.parametrize(
    "output",
    [
        *("\0", "\ud800", "9" * 5000, "\N{REPLACEMENT CHARACTER}", '{"name": 1, "arguments": []}'),
        *("(" * 20_000, "a(" + "[" * 20_000, '{"a":' * 20_000, "f(x=-" + "-" * 20_000 + "1)"),
        *("f(x=" + "9" * 5000 + ")", "f(x='\\d')", "f(x=1e999)"),
    ],
)
def test_no_output_makes_a_grader_raise(grader: dict[str, Any], output: str) -> None:
    assert not grade(prompt(grader), output).passed
