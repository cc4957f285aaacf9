"""The golden set: what is in it, how it is read, how a part of it is drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from data.golden_set import GoldenPrompt, load_golden, sample

PROMPT: dict[str, Any] = {
    "prompt_id": "copy-01",
    "category": "copy",
    "language": "en",
    "messages": [{"role": "user", "content": "Repeat exactly: tea"}],
    "max_tokens": 4,
    "grader": {"kind": "exact", "value": "tea"},
}


@pytest.fixture(scope="module")
def prompts() -> list[GoldenPrompt]:
    golden = load_golden()
    assert golden.rejected == []
    return golden.prompts


def test_the_set_covers_six_categories_evenly_and_eight_languages(prompts: list[GoldenPrompt]) -> None:
    assert set(Counter(prompt.category for prompt in prompts).values()) == {16}
    assert len({prompt.category for prompt in prompts}) == 6
    assert {prompt.language for prompt in prompts} == {"en", "de", "fr", "es", "it", "pt", "zh", "ja"}


def test_every_prompt_ends_with_a_question_and_fits_the_demo(prompts: list[GoldenPrompt]) -> None:
    assert all(prompt.messages[-1].role == "user" for prompt in prompts)
    assert max(prompt.max_tokens for prompt in prompts) <= 16


def test_no_two_prompts_are_the_same(prompts: list[GoldenPrompt]) -> None:
    assert len({prompt.messages for prompt in prompts}) == len(prompts)


def test_a_sample_is_stratified_repeatable_and_grows_by_addition(prompts: list[GoldenPrompt]) -> None:
    drawn = sample(prompts, 48, seed=1)
    assert set(Counter(prompt.category for prompt in drawn).values()) == {8}
    assert drawn == sample(prompts, 48, seed=1)
    assert drawn != sample(prompts, 48, seed=2)
    ids = {prompt.prompt_id for prompt in sample(prompts, 20, seed=1)}
    assert len(ids) == 20
    assert ids <= {prompt.prompt_id for prompt in drawn}


def test_a_sample_of_none_or_of_more_than_there_is_is_the_whole_set(prompts: list[GoldenPrompt]) -> None:
    assert sample(prompts, None, seed=1) == prompts
    assert sample(prompts, 1000, seed=1) == prompts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"category": "poetry"}, "category"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"note": "x"}, "note: Extra"),
        ({"grader": {"kind": "judge"}}, "grader"),
        ({"grader": {"kind": "regex", "pattern": "("}}, "no regular expression"),
        ({"grader": {"kind": "json_schema", "schema": {"type": "objekt"}}}, "no JSON schema"),
        ({"grader": {"kind": "exact"}}, "grader.exact.value: Field required"),
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
