from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from attention.schemas import SCHEMAS, write_rows
from data.plan import load_plan
from gates import baseline, fingerprint, probe, replay
from gates.verdict import Verdict
from tasks.story import Story, with_evidence


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake in which every file of an old release is broken."""
    for table in SCHEMAS:
        broken = tmp_path / table / "release_id=old" / "a.parquet"
        broken.parent.mkdir(parents=True)
        broken.write_bytes(b"no parquet\n")
    return tmp_path


def test_a_story_needs_its_own_evidence_alone(lake: Path) -> None:
    write_rows(lake, "events", [{"kind": "x", "time": datetime.now(UTC)}], release_id="new")
    story = Story(release_id="new", candidate="c", gpu="cpu", family="f", state="promoted")
    assert [event.kind for event in with_evidence(story, lake).events] == ["x"]


def test_the_offline_gates_judge_their_own_release_alone(lake: Path) -> None:
    plan = load_plan("demo")
    reports = [gate.judge(lake, "new", plan) for gate in (fingerprint, baseline)]
    reports += [probe.judge(lake, "new", plan, []), replay.judge(lake, "new", plan, num_golden=21)]
    assert not any("parquet" in check.message for report in reports for check in report.checks)


def test_evidence_of_its_own_that_cannot_be_read_is_an_error_and_no_exception(lake: Path) -> None:
    report = fingerprint.judge(lake, "old", load_plan("demo"))
    assert report.verdict is Verdict.ERROR and "a.parquet" in report.reason
