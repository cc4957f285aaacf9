"""Which golden prompts the champion passes: what was kept fits the file, and shows enough of each category."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention import startup
from attention.replay import business
from data.golden_set import draw, load_golden
from data.paths import GOLDEN_FILE, repo_dir
from data.plan import load_plan
from tasks import golden_table
from tasks.golden_table import Passed, main, read_passed, sha256_of, table
from tests.commands import candidate_file
from tests.data.test_golden_set import PROMPT

KEPT = GOLDEN_FILE.parent / "passed.json"
README = GOLDEN_FILE.parent / "README.md"


@pytest.fixture(scope="module")
def kept() -> Passed:
    return read_passed(KEPT)


def test_the_kept_outcome_is_of_the_golden_set_as_it_is(kept: Passed) -> None:
    assert kept.golden_sha256 == sha256_of(GOLDEN_FILE), (
        "run `python -m tasks.golden_table --out data/golden/passed.json`"
    )
    known = {prompt.prompt_id: (prompt.category, prompt.language) for prompt in load_golden().prompts}
    assert {name: (one.category, one.language) for name, one in kept.prompts.items()} == known


def test_the_readme_shows_the_table_of_the_kept_outcome(kept: Passed) -> None:
    found = re.search(
        r"<!-- python -m tasks.golden_table --table (\S+) -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL
    )
    assert found
    assert repo_dir() / found[1] == KEPT
    assert found[2] == table(kept)


def test_the_champion_passes_enough_of_every_category_for_the_full_plan(kept: Passed) -> None:
    least = load_plan("full").replay.min_category_passes
    assert least is not None and least >= 30
    passes = Counter(one.category for one in kept.prompts.values() if one.passed)
    assert min(passes.values()) >= least
    assert len(passes) == 6


def test_the_champion_passes_enough_of_what_the_demo_draws(kept: Passed) -> None:
    demo = load_plan("demo").replay
    passes = [kept.prompts[prompt.prompt_id].passed for prompt in draw(GOLDEN_FILE, demo).prompts]
    assert sum(passes) >= demo.min_golden_passes


def test_the_champion_passes_prompts_of_every_length_up_to_its_context(kept: Passed) -> None:
    """SmolLM2's context is 8,192 tokens."""
    for low, high in ((0, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192)):
        assert any(one.passed for one in kept.prompts.values() if low < one.prompt_tokens <= high), (low, high)


ONE = {"category": "copy", "language": "en", "prompt_tokens": 60, "passed": True}
OUTCOME: dict[str, Any] = {
    "golden_sha256": "0",
    "model": "m",
    "confirmed": {"prefill": "torch_sdpa:math", "decode": "torch_sdpa:math"},
    "torch": "2.13.0",
    "num_threads": 1,
    "cpu_seconds": 3.0,
    "prompts": {
        "copy-1": ONE,
        "copy-2": ONE | {"language": "de", "passed": False},
        "json-1": ONE | {"category": "json", "prompt_tokens": 900},
    },
}


def test_the_table_counts_by_category_language_and_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(json.dumps(OUTCOME))
    assert main(["--table", str(tmp_path / "kept.json")]) == 0
    assert (
        capsys.readouterr().out
        == """\
| category | en | de | all |
|---|---|---|---|
| copy | 1 of 1 | 0 of 1 | 1 of 2 |
| json | 1 of 1 | - | 1 of 1 |
| all | 2 of 2 | 0 of 1 | 2 of 3 |

| prompt tokens | up to 64 | up to 1024 |
|---|---|---|
| all categories | 1 of 2 | 1 of 1 |

Asked: every prompt of the set, whatever a plan allows.

Longest prompt: 900 tokens. m, torch 2.13.0, torch_sdpa:math, 1 thread: 3 s of processor time for all answers.

Not passed: `copy-2`.
"""
    )


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), ("{}", "no outcome of a golden set"), ("", "no outcome")]
)
def test_a_file_that_is_no_outcome_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "kept.json").write_text(content)
    assert main(["--table", str(tmp_path / "kept.json")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1


def test_a_set_of_ones_own_is_asked_and_its_bad_lines_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is left out: both prompts are answered `tea`, and the second one wanted coffee."""
    golden = tmp_path / "mine.jsonl"
    coffee = PROMPT | {"prompt_id": "coffee", "category": "drinks", "grader": {"kind": "exact", "value": "coffee"}}
    golden.write_text("".join(json.dumps(line) + "\n" for line in (PROMPT, coffee, {})))

    def answer(runner: Any, plan: Any, progress: Any) -> business.Answers:
        progress(2, 2)
        return business.Answers(
            answers=[business.Answer(prompt_id=p.prompt_id, output_text="tea", output_tokens=[1]) for p in plan.prompts]
        )

    monkeypatch.setattr(startup, "decide", lambda setup, probes: SimpleNamespace(confirmed={"decode": "b"}))
    monkeypatch.setattr(startup, "load", lambda setup, dispatcher: SimpleNamespace(name="m"))
    monkeypatch.setattr(business, "answer", answer)
    monkeypatch.setattr(business, "prompt_ids", lambda runner, prompt: (1, 2, 3))
    kept = tmp_path / "kept.json"
    assert main([str(candidate_file(tmp_path, golden=str(golden))), "--out", str(kept)]) == 0
    outcomes = read_passed(kept).prompts
    assert {name: one.passed for name, one in outcomes.items()} == {"copy-01": True, "coffee": False}
    captured = capsys.readouterr()
    assert "line 3 left out: prompt_id: Field required" in captured.err
    assert "golden set: 2 of 2 answered" in captured.err
    assert "| drinks | 0 of 1 | 0 of 1 |" in captured.out
    assert "tea" not in kept.read_text()


def test_with_a_plan_only_its_prompts_are_asked_and_the_outcome_says_whose_they_are() -> None:
    golden, asked = golden_table._asked(GOLDEN_FILE, "demo")
    assert golden.prompts == draw(GOLDEN_FILE, load_plan("demo").replay).prompts
    assert asked == "the 21 of 390 prompts that plan demo asks (golden_max_tokens 28, golden_max_chars 400)"
    assert len(golden_table._asked(GOLDEN_FILE, None)[0].prompts) == 390


def test_a_plan_that_is_not_there_or_means_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "demmo"]) == 2
    assert "plan 'demmo': no file" in capsys.readouterr().err
    assert main(["--table", str(KEPT), "--plan", "demo"]) == 2
    assert capsys.readouterr().err.startswith("error: --table shows an outcome that was kept")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_champion_still_passes_what_it_passed(kept: Passed) -> None:
    """Another machine may break a tie otherwise; each category keeps the least that a full release needs."""
    now = golden_table.measure(repo_dir() / golden_table.CHAMPION, print)
    changed = [name for name, one in now.prompts.items() if one.passed != kept.prompts[name].passed]
    assert len(changed) <= 0.02 * len(kept.prompts), changed
    passes = Counter(one.category for one in now.prompts.values() if one.passed)
    assert min(passes.values()) >= 30
