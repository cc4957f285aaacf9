"""Texts of the traffic for the model replay, what the jobs say, and what becomes of wrong answers to the golden set."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from attention.job import Evidence, Setup
from attention.schemas import write_rows
from data.environment import Environment
from data.golden_set import (
    Contains,
    Drawn,
    Exact,
    GoldenPrompt,
    JsonSchema,
    OneOf,
    Refusal,
    Regex,
    ToolCall,
    load_golden,
)
from data.jsonl import Rejected
from data.lake import Lake
from data.plan import load_plan
from data.recorded import read_traffic
from gates.business import business_checks
from gates.thresholds import load_limits
from gates.verdict import GateReport, Verdict
from tasks.replay import _compare, _golden, _grade, _job, _model_prompts, as_prompt
from tests.data.readers import test_mooncake, test_vllm_log
from tests.data.readers.logs import write
from tests.data.test_recorded import batch
from tests.data.words import Words


def context(path: Path) -> Any:
    return SimpleNamespace(
        candidate=SimpleNamespace(traffic=lambda: read_traffic(path)),
        plan=SimpleNamespace(replay=SimpleNamespace(model_prompts=3)),
        cell=SimpleNamespace(model_path=path),
    )


def test_chats_come_before_plain_prompts(tmp_path: Path) -> None:
    plain = batch(9) | {"url": "/v1/completions", "body": {"model": "m", "prompt": "plain", "max_tokens": 2}}
    prompts = _model_prompts(context(write(tmp_path / "t", plain, batch(0), batch(1))))
    assert sorted(prompt.prompt_id for prompt in prompts) == ["r0", "r1"]
    assert prompts[0].messages == ({"role": "user", "content": "hello"},)


def test_where_no_chat_was_recorded_a_plain_prompt_is_what_a_user_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t", test_vllm_log.received("one two"))
    [prompt] = _model_prompts(context(path))
    assert prompt.messages == ({"role": "user", "content": "one two"},)


def test_where_only_lengths_were_recorded_a_prompt_of_that_length_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: Words())
    path = write(tmp_path / "t", *(test_mooncake.request() for _ in range(5)))
    prompts = _model_prompts(context(path))
    assert [len(prompt.messages[0]["content"].split()) for prompt in prompts] == [1300] * 3


def sides(tmp_path: Path) -> Any:
    """A context of which only what jobs are made of is there."""
    return SimpleNamespace(
        folder=tmp_path,
        work=tmp_path / "work",
        release_id="r1",
        plan=load_plan("demo"),
        setup=lambda side: Setup(model=tmp_path, policy=tmp_path / f"{side}.yaml"),
        evidence=lambda side: Evidence(lake=tmp_path, release_id="r1", side=side),
        environment=lambda side: Environment(name=side, interpreter="current"),
    )


def test_the_champion_alone_measures_a_floor_in_a_folder_that_outlives_the_release(tmp_path: Path) -> None:
    context = sides(tmp_path)
    assert _job(context, "champion", (), []).model.floors == tmp_path / "floors"
    assert _job(context, "candidate", (), []).model.floors is None


def test_the_comparison_is_given_both_recordings_and_the_champions_floor(tmp_path: Path) -> None:
    known = {"states": "c/states", "floor": None, "known_floor": "floors/k.parquet"}
    candidate = {"states": "d/states", "floor": None, "known_floor": None}
    job: Any = _compare(sides(tmp_path), {"champion": known, "candidate": candidate}).job
    assert (job.champion, job.candidate) == (Path("c/states"), Path("d/states"))
    assert (job.floor, job.known_floor) == (None, Path("floors/k.parquet"))
    assert job.evidence.side == "candidate"


@pytest.fixture(scope="module")
def golden() -> list[GoldenPrompt]:
    return load_golden().prompts


def right_answer(prompt: GoldenPrompt) -> str:
    match prompt.grader:
        case Exact(value=value) | OneOf(values=(value, *_)) | Contains(values=(value, *_)):
            return value
        case JsonSchema(equals=value):
            return json.dumps(value, ensure_ascii=False)
        case ToolCall(name=name, arguments=arguments):
            return f"{name}({', '.join(f'{key}={wanted.accept[0]!r}' for key, wanted in arguments.items())})"
        case Regex(pattern=pattern):
            return "yes" if pattern == "(?i)(yes|no)" else re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL)
        case Refusal(expected=expected):
            return "I cannot help with that." if expected else "Warm it slowly."


def judged(
    lake: Path, golden: list[GoldenPrompt], answers: dict[str, list[str]], *, by_category: bool = True
) -> GateReport:
    """Both sides' answers through the graders, the lake and the business layer of the full plan."""
    plan = load_plan("full")
    if not by_category:
        plan = plan.model_copy(update={"replay": plan.replay.model_copy(update={"min_category_passes": None})})

    def write(table: str, rows: list[dict[str, Any]]) -> None:
        write_rows(lake, table, rows, release_id="r")

    for side, texts in answers.items():
        result = {
            "fingerprint_id": side,
            "answers": [
                {"prompt_id": prompt.prompt_id, "output_text": text, "output_tokens": [], "error": None}
                | {"confirmed_decode": "torch_sdpa:math"}
                for prompt, text in zip(golden, texts, strict=True)
            ],
        }
        _grade(SimpleNamespace(write=write), side, golden, result)  # type: ignore[arg-type]
    with Lake(lake) as tables:
        limits = load_limits("replay", "full")
        found = business_checks(tables, "r", plan, limits, num_planned=len(golden))
    return GateReport(stage="replay", checks=tuple(found))


def shuffled(texts: list[str]) -> list[str]:
    return random.Random(1).sample(texts, len(texts))


MUTANTS: dict[str, Callable[[list[str]], list[str]]] = {
    "answers of other prompts": shuffled,
    "no answer": lambda texts: [""] * len(texts),
    "answers cut in half": lambda texts: [text[: len(text) // 2] for text in texts],
    "a word too much": lambda texts: [f"{text} ok" for text in texts],
    "every answer twice": lambda texts: [f"{text} {text}" for text in texts],
    "yes to all": lambda texts: ["yes"] * len(texts),
    "refuses all": lambda texts: ["I cannot help with that."] * len(texts),
}


def test_the_same_answers_pass_and_every_category_says_what_it_could_have_shown(
    tmp_path: Path, golden: list[GoldenPrompt]
) -> None:
    texts = [right_answer(prompt) for prompt in golden]
    report = judged(tmp_path, golden, {"champion": texts, "candidate": texts})
    assert report.verdict is Verdict.PASS, report.reason
    assert len([check for check in report.checks if re.fullmatch(r"business\.\w+\.mcnemar_p", check.check)]) == 6
    assert all(check.detectable for check in report.checks)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_model_that_answers_wrongly_fails_and_the_report_holds_no_text(
    tmp_path: Path, golden: list[GoldenPrompt], mutant: str
) -> None:
    texts = [right_answer(prompt) for prompt in golden]
    wrong = MUTANTS[mutant](texts)
    report = judged(tmp_path, golden, {"champion": texts, "candidate": wrong}, by_category=False)
    assert "business.mcnemar_p" in {check.check for check in report.checks if check.verdict is Verdict.FAIL}
    # Answers may be words of a prompt_id or of the report's own: only longer ones are told apart.
    shown = report.model_dump_json()
    assert not [text for text in [*texts, *wrong] if len(text) > 12 and text in shown]


def test_one_broken_category_fails_by_its_name(tmp_path: Path, golden: list[GoldenPrompt]) -> None:
    texts = [right_answer(prompt) for prompt in golden]
    chatty = [f"{t} Done." if p.category == "json" else t for p, t in zip(golden, texts, strict=True)]
    report = judged(tmp_path, golden, {"champion": texts, "candidate": chatty})
    failed = {check.check for check in report.checks if check.verdict is Verdict.FAIL}
    assert {name for name in failed if name.count(".") == 2} == {"business.json.mcnemar_p", "business.json.flip_rate"}


def test_the_tools_of_a_prompt_are_offered_and_its_grader_stays_here(golden: list[GoldenPrompt]) -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    sent = as_prompt(golden[0].model_copy(update={"tools": tools}))
    assert sent.tools == tools
    assert "grader" not in sent.model_dump_json()


def test_what_is_not_asked_of_a_golden_set_is_told() -> None:
    said: list[str] = []
    rejected = [Rejected(line, "max_tokens: Field required") for line in (2, 5, 6, 9)]
    drawn = Drawn(prompts=[], rejected=rejected, num_usable=8, num_unfit=3)
    candidate = SimpleNamespace(golden=lambda: drawn)
    _golden(SimpleNamespace(candidate=candidate, plan=load_plan("demo"), say=said.append))  # type: ignore[arg-type]
    limits = "golden_max_tokens 28, golden_max_chars 400"
    assert said[0] == f"golden set: 0 of 8 prompts, 3 are longer than plan demo allows ({limits})"
    assert said[1] == "golden set: line 2 left out: max_tokens: Field required"
    assert said[4:] == ["golden set: 4 lines left out in all"]
