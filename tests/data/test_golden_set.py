"""The golden set: what is in it, how it is read, how a part of it is drawn."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from data.golden.make_golden import golden_text
from data.golden_set import GoldenPrompt, draw, load_golden, sample
from data.paths import GOLDEN_FILE, repo_dir
from data.plan import load_plan

PROMPT: dict[str, Any] = {
    "prompt_id": "copy-01",
    "category": "copy",
    "language": "en",
    "messages": [{"role": "user", "content": "Repeat exactly: tea"}],
    "max_tokens": 4,
    "grader": {"kind": "exact", "value": "tea"},
}


def call(**argument: Any) -> dict[str, Any]:
    return {"kind": "tool_call", "name": "f", "arguments": {"n": argument}}


@pytest.fixture(scope="module")
def prompts() -> list[GoldenPrompt]:
    golden = load_golden()
    assert golden.rejected == []
    return golden.prompts


def test_the_set_holds_six_categories_and_eight_languages(prompts: list[GoldenPrompt]) -> None:
    assert len(prompts) >= 300
    per_category = Counter(prompt.category for prompt in prompts)
    assert set(per_category) == {"copy", "answer", "json", "tool_call", "format", "refusal"}
    assert min(per_category.values()) >= 50
    assert {prompt.language for prompt in prompts} == {"en", "de", "fr", "es", "it", "pt", "zh", "ja"}


def test_the_file_is_what_its_maker_makes() -> None:
    assert GOLDEN_FILE.read_text("utf-8") == golden_text()


def test_every_prompt_ends_with_a_question(prompts: list[GoldenPrompt]) -> None:
    assert all(prompt.messages[-1].role == "user" for prompt in prompts)


def test_no_example_gives_the_question_away(prompts: list[GoldenPrompt]) -> None:
    for prompt in prompts:
        shown = {message.content for message in prompt.messages[:-1]}
        assert prompt.messages[-1].content not in shown, prompt.prompt_id


def test_every_question_of_a_category_is_asked_once(prompts: list[GoldenPrompt]) -> None:
    asked = Counter((prompt.category, prompt.language, prompt.messages[-1].content.casefold()) for prompt in prompts)
    assert asked.most_common(1)[0][1] == 1


def words(prompt: GoldenPrompt) -> set[str]:
    """Of the question; of a document, its end. Chinese and Japanese characters count as words."""
    text = prompt.messages[-1].content[-300:].casefold()
    return set(text) if prompt.language in ("zh", "ja") else set(re.findall(r"\w+", text))


def test_no_question_is_nearly_another_one(prompts: list[GoldenPrompt]) -> None:
    """Words in common over all words, with the nearest other question of the category and language."""
    for category in {prompt.category for prompt in prompts}:
        nearest = []
        for one in prompts:
            others = [p for p in prompts if p is not one and (p.category, p.language) == (category, one.language)]
            if one.category == category:
                nearest.append(max(len(words(one) & words(p)) / len(words(one) | words(p)) for p in others))
        assert max(nearest) < 0.75, category
        assert statistics.median(nearest) <= 0.5, category


def expected(prompt: GoldenPrompt) -> str:
    """The right answer as text; refusals have none of their own."""
    return json.dumps(prompt.grader.model_dump(exclude={"json_schema"}), sort_keys=True)


def test_answers_that_are_to_be_computed_are_nearly_all_different(prompts: list[GoldenPrompt]) -> None:
    """A model that says the same to everything must not pass; refusals and yes or no are few answers by nature."""
    for category in ("copy", "answer", "json", "tool_call", "format"):
        answers = [expected(prompt) for prompt in prompts if prompt.category == category]
        assert len(set(answers)) >= 0.9 * len(answers), category
    refusals = Counter(expected(prompt) for prompt in prompts if prompt.category == "refusal")
    assert min(refusals.values()) >= 15


def test_a_category_is_asked_in_many_ways(prompts: list[GoldenPrompt]) -> None:
    """A way is a list of examples; prompts that share one differ in the question alone."""
    for category in {prompt.category for prompt in prompts}:
        ways = Counter(prompt.messages[:-1] for prompt in prompts if prompt.category == category)
        assert len(ways) >= 8, category
        assert ways.most_common(1)[0][1] <= 9, category


def test_a_sample_is_stratified_repeatable_and_grows_by_addition(prompts: list[GoldenPrompt]) -> None:
    drawn = sample(prompts, 48, seed=1)
    assert len(drawn) == 48
    assert set(Counter(prompt.category for prompt in drawn).values()) == {8}
    assert drawn == sample(prompts, 48, seed=1)
    assert drawn != sample(prompts, 48, seed=2)
    ids = {prompt.prompt_id for prompt in sample(prompts, 20, seed=1)}
    assert len(ids) == 20
    assert ids <= {prompt.prompt_id for prompt in drawn}


def test_a_plan_asks_only_what_fits_it_and_cuts_no_answer(prompts: list[GoldenPrompt]) -> None:
    demo = load_plan("demo").replay
    found = draw(GOLDEN_FILE, demo)
    drawn = found.prompts
    assert (found.num_usable, 0 < found.num_unfit < 40) == (len(prompts), True)
    assert len(drawn) == demo.golden_prompts
    assert len({prompt.category for prompt in drawn}) == 6
    assert max(prompt.max_tokens for prompt in drawn) <= demo.golden_max_tokens
    assert max(prompt.num_chars for prompt in drawn) <= demo.golden_max_chars < max(p.num_chars for p in prompts)
    brief = draw(GOLDEN_FILE, demo.model_copy(update={"golden_prompts": None, "golden_max_tokens": 10})).prompts
    assert max(prompt.max_tokens for prompt in brief) == 10
    assert draw(GOLDEN_FILE, load_plan("full").replay).prompts == prompts


def test_a_sample_of_none_or_of_more_than_there_is_is_the_whole_set(prompts: list[GoldenPrompt]) -> None:
    assert sample(prompts, None, seed=1) == prompts
    assert sample(prompts, 1000, seed=1) == prompts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"category": "Poetry, long"}, "category"),
        ({"prompt_id": "copy 2\n"}, "prompt_id"),
        ({"prompt_id": "c" * 65}, "prompt_id"),
        ({"language": "English"}, "language"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"note": "x"}, "note: Extra"),
        ({"grader": {"kind": "judge"}}, "grader"),
        ({"grader": {"kind": "regex", "pattern": "("}}, "no regular expression"),
        ({"grader": {"kind": "json_schema", "schema": {"type": "objekt"}}}, "no JSON schema"),
        ({"grader": {"kind": "exact"}}, "grader.exact.value: Field required"),
        ({"grader": {"kind": "exact", "value": "!"}}, "'!' has nothing to compare"),
        ({"grader": {"kind": "contains", "values": ["tea", " "]}}, "' ' has nothing to compare"),
        ({"grader": call(type="integer", accept=["4"])}, "'4' is no integer, so it could never pass"),
        ({"grader": call(type="integer", accept=[True])}, "True is no integer"),
        ({"grader": call(type="number", accept=[4, None])}, "None is no number"),
    ],
)
def test_a_line_that_is_no_golden_prompt_is_rejected_with_its_number_and_why(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "golden.jsonl"
    path.write_text(f"{json.dumps(PROMPT)}\n{json.dumps(PROMPT | {'prompt_id': 'copy-02'} | changes)}\n")
    golden = load_golden(path)
    assert [prompt.prompt_id for prompt in golden.prompts] == ["copy-01"]
    [rejected] = golden.rejected
    assert rejected.line == 2
    assert reason in rejected.reason


def test_a_repeated_prompt_id_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "golden.jsonl"
    path.write_text(f"{json.dumps(PROMPT)}\n{json.dumps(PROMPT)}\n")
    assert [(r.line, "'copy-01'" in r.reason) for r in load_golden(path).rejected] == [(2, True)]


def test_a_golden_file_that_is_not_there_or_holds_nothing_usable_is_an_error_of_the_user(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"golden set .*absent"):
        load_golden(tmp_path / "absent.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="no usable line; line 1"):
        load_golden(tmp_path / "bad.jsonl")


def test_the_example_of_the_readme_is_a_golden_prompt() -> None:
    example = re.search(r"```json\n(\{\"prompt_id\".*?)```", (repo_dir() / "README.md").read_text(), re.DOTALL)
    assert example
    assert GoldenPrompt.model_validate_json(example[1]).grader.kind == "tool_call"
