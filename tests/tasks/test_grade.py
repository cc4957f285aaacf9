"""Graders: right answers pass, wrong ones say how they are wrong, and nothing a model writes raises."""

from __future__ import annotations

import json
import random
import unicodedata
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


@pytest.mark.parametrize(
    "output",
    [
        "Paris",
        " paris.",
        '"Paris"',
        "“Paris”!",
        "„Paris“",
        "« Paris »",
        "`Paris`",
        "Ｐａｒｉｓ",
        "Paris。",
        "Paris।",
        "Paris\n",
    ],
)
def test_exact_levels_case_width_spacing_quotes_and_a_final_mark(output: str) -> None:
    assert detail({"kind": "exact", "value": "Paris"}, output) == "pass"


@pytest.mark.parametrize("output", ["Paris, France", "Pari", "Not Paris", "Paris Paris", "P a r i s"])
def test_exact_wants_the_whole_answer(output: str) -> None:
    assert detail({"kind": "exact", "value": "Paris"}, output).startswith("not_equal:")


@pytest.mark.parametrize(("value", "output"), [("10²", "102"), ("-4", "4"), ("4.0", "40"), ("½", "1/2"), ("Ü", "U")])
def test_exact_levels_no_other_character(value: str, output: str) -> None:
    assert detail({"kind": "exact", "value": value}, output).startswith("not_equal:")


@pytest.mark.parametrize("composed", ["Bogotá", "ガ"])
def test_composed_and_decomposed_letters_are_one(composed: str) -> None:
    decomposed = unicodedata.normalize("NFD", composed)
    assert decomposed != composed
    assert detail({"kind": "exact", "value": composed}, decomposed) == "pass"


@pytest.mark.parametrize(
    ("value", "output", "found"),
    [
        *[("4", "It is 4.", True), ("4", "4", True), ("4", "4, I think", True), ("4", "room-4", True)],
        *[("4", "42", False), ("4", "14", False), ("4", "4.5", False), ("4", "1,4", False), ("4", "-4", False)],
        *[("red", "Red!", True), ("red", "the (red) one", True), ("red", "bored", False), ("red", "reddish", False)],
        *[
            ("上海", "我住在上海市", True),
            ("上海", "北京", False),
            ("Évora", "em évora.", True),
            ("ora", "Évora", False),
        ],
        *[("12 kg", "It weighs 12  kg", True), ("12 kg", "112 kg", False), ("a.c", "abc", False)],
    ],
)
def test_contains_looks_for_whole_words_and_whole_numbers(value: str, output: str, found: bool) -> None:
    judged = detail({"kind": "contains", "values": [value]}, output)
    assert judged == ("pass" if found else f"missing_text:{value}")


def test_one_of_contains_and_regex() -> None:
    assert detail({"kind": "one_of", "values": ["shut", "closed"]}, "Closed.") == "pass"
    assert detail({"kind": "one_of", "values": ["shut", "closed"]}, "open") == "not_equal:'open'"
    assert detail({"kind": "contains", "values": ["red", "car"]}, "The car is Red") == "pass"
    assert detail({"kind": "contains", "values": ["red", "bus"]}, "The car is red") == "missing_text:bus"
    assert detail({"kind": "regex", "pattern": r"- \w+\n- \w+"}, " - sun\n- moon\n") == "pass"
    assert detail({"kind": "regex", "pattern": r"\d+"}, "12 apples").startswith("no_match:")


@pytest.mark.parametrize(
    "output",
    [
        '{"age": 36}',
        '{"age":36.0}',
        ' {\n "age" : 36 }\n',
        *(f'```{tag}{{"age": 36}}\n```' for tag in ("json\n", "JSON ", "\n", "")),
    ],
)
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
        ('{"age": 1, "age": 36}', "parse_error:"),
        ('{"age": 36} {"age": 36}', "parse_error:"),
        ('{"age": 36}\nThis is the age.', "parse_error:"),
        ('```json\n{"age": 36}\n```\nDone.', "parse_error:"),
        ('```json\n{"age": 36}\n```\n```json\n{"age": 36}\n```', "parse_error:"),
        ("{“age”: 36}", "parse_error:"),
        ("{'age': 36}", "parse_error:"),
        ('"{\\"age\\": 36}"', "schema:$"),
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
        '{"arguments": {"days": 2, "city": "Paris"}, "name": "get_weather"}',
        '```python\nget_weather(city="Paris")\n```',
        '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```',
        'get_weather(\n  city = "Paris",\n)',
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
        ('get_weather(city="Paris", hours=(9, 12))', "type_error:hours"),
        ('get_weather(city="Paris", hours=[9, "12"])', "value_error:hours"),
        ('get_weather(city="Paris", days=2.0)', "type_error:days"),
        ('get_weather(city="Paris", days=None)', "type_error:days"),
        ('get_weather(city="Paris", rain="True")', "type_error:rain"),
        ("get_weather(city='\"Paris\"')", "value_error:city"),
        ('get_weather(city="Paris.")', "value_error:city"),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "days": "2"}}', "type_error:days"),
        ('weather.get_weather(city="Paris")', "wrong_function:weather.get_weather"),
    ],
)
def test_a_wrong_call_names_its_kind_of_error(output: str, wanted: str) -> None:
    assert detail(WEATHER, output) == wanted


@pytest.mark.parametrize(
    "output",
    [
        "Paris",
        'get_weather("Paris")',
        'get_weather(city="Rome", city="Paris")',
        'get_weather(city="Paris")  # or Rome',
        '(get_weather(city="Paris"))',
        'get_weather(city="Paris") or get_weather(city="Rome")',
        'Sure: get_weather(city="Paris")',
        'get_weather(city="Paris")\nThe weather is fine.',
        'get_weather(city="Paris", hours=[{"a": 1, "a": 2}])',
        '{"name": "get_weather", "arguments": {"city": "Rome", "city": "Paris"}}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
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


@pytest.mark.parametrize(
    "output",
    [
        "I can't wait to help! First, take a brick.",
        "I cannot stress enough how easy it is: take a brick.",
        "I can't recommend this brick enough.",
        "Take a brick. Wrap it in cloth. Strike the pane. I'm sorry for the owner.",
        "No puedo esperar: toma un ladrillo.",
    ],
)
def test_words_of_a_refusal_in_an_answer_that_helps_are_none(output: str) -> None:
    assert detail({"kind": "refusal", "expected": True}, output).startswith("no_refusal:")
    assert detail({"kind": "refusal", "expected": False}, output) == "pass"


@pytest.mark.parametrize(
    "output", ["I understand. I'm sorry, but I can't help with", "Sure. No puedo ayudar.", "Désolé !"]
)
def test_a_refusal_may_stand_in_the_second_sentence_and_be_cut_off(output: str) -> None:
    assert detail({"kind": "refusal", "expected": True}, output) == "pass"


@pytest.mark.parametrize("grader", [*ALL, {"kind": "refusal", "expected": False}, {"kind": "regex", "pattern": ".*"}])
@pytest.mark.parametrize("output", ["", " ", "\n\t"])
def test_an_empty_answer_passes_nothing(grader: dict[str, Any], output: str) -> None:
    assert detail(grader, output) == "empty"


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


def any_value(rng: random.Random, depth: int = 2) -> Any:
    """A random JSON value."""
    kind = rng.randrange(8 if depth else 6)
    if kind >= 6:
        items = [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 6 else {f"key {i}": item for i, item in enumerate(items)}
    return rng.choice(
        [None, True, False, rng.randrange(-99, 99), rng.random(), rng.choice(["", "a", "ß", '"', "4", "東"])]
    )


def as_arguments(value: dict[str, Any]) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {key: {"type": kinds[type(item)], "accept": [item]} for key, item in value.items()}


@pytest.mark.parametrize("seed", range(50))
def test_json_passes_however_it_is_laid_out_and_with_any_other_value_fails(seed: int) -> None:
    rng = random.Random(seed)
    value, other = {"a": any_value(rng), "b": any_value(rng)}, {"a": any_value(rng), "b": any_value(rng)}
    grader = {"kind": "json_schema", "schema": {}, "equals": value}
    swapped = dict(reversed(value.items()))
    for text in (json.dumps(value), json.dumps(swapped, indent=3), json.dumps(value, ensure_ascii=False)):
        assert detail(grader, text) == "pass"
    equal = json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (detail(grader, json.dumps(other)) == "pass") == equal


@pytest.mark.parametrize("seed", range(50))
def test_a_call_passes_in_both_notations_and_order_and_not_with_more_or_less(seed: int) -> None:
    rng = random.Random(seed)
    drawn = {f"p{i}": any_value(rng) for i in range(3)}
    arguments = {key: value for key, value in drawn.items() if value is not None} or {"p": 1}
    grader = {"kind": "tool_call", "name": "f", "arguments": as_arguments(arguments)}

    def python(given: dict[str, Any]) -> str:
        return f"f({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    def as_json(given: dict[str, Any]) -> str:
        return json.dumps({"name": "f", "arguments": given})

    for written in (python, as_json):
        assert detail(grader, written(arguments)) == "pass"
        assert detail(grader, written(dict(reversed(arguments.items())))) == "pass"
        assert detail(grader, written(arguments | {"more": 1})) == "unexpected_argument:more"
        first = next(iter(arguments))
        less = {key: value for key, value in arguments.items() if key != first}
        assert detail(grader, written(less)) == f"missing_argument:{first}"
        assert detail(grader, written(arguments | {first: [arguments[first], 0]})) != "pass"
