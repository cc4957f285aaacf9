"""The steps of a machine's evidence: commands with a share of the time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attention.job import StressJob
from tasks.baseline_steps import main, steps, write_load


def argv(found: list, name: str, limit_s: float) -> list[str]:  # type: ignore[type-arg]
    return next(step for step in found if step.name == name).argv(limit_s)[2:]


def test_steps_of_a_gpu_begin_with_the_clock_and_end_with_the_load(tmp_path: Path) -> None:
    found = steps(tmp_path, matrix="hopper", mix="chat", cells=50, model=tmp_path, device="cuda")
    assert [step.name for step in found] == ["clock", "verdicts", "survey", "load"]
    assert argv(found, "verdicts", 648)[-1] == "150", "the floor and every pass have the same budget"
    assert argv(found, "survey", 648)[-1] == "600"
    assert [s.name for s in steps(tmp_path, matrix="cpu", mix="chat", cells=6, model=None, device="cpu")] == [
        "verdicts",
        "survey",
    ]


def test_the_load_is_a_job_of_the_mix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_load(tmp_path, "chat", tmp_path, "cpu")
    job = StressJob.model_validate_json((tmp_path / "load.json").read_text())
    assert (job.max_running, job.random_weights, len(job.levels)) == (32, True, 4)


@pytest.mark.parametrize(
    "flags", [["--matrix", "nope"], ["--cells", "0"], ["--only", "nope"], ["--mix", "nope"], ["--model", "nope"]]
)
def test_bad_flags_are_one_line_before_anything_is_measured(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "steps.json").exists()


def test_a_step_that_is_not_done_is_told_of(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--matrix", "cpu", "--only", "survey", "--budget-s", "0.5"]) == 1
    assert [one["status"] for one in json.loads((tmp_path / "steps.json").read_text())] == ["not run"]
