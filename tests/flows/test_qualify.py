"""A qualification leaves what `why` needs: verdicts in the lake, who against whom, a report."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attention.errors import UserError
from data.candidate import load_candidate
from flows import qualify
from flows import why as telling
from gates.verdict import GateReport
from tasks.context import Context, StageOutcome
from tests.commands import candidate_file
from tests.tasks.sample_lake import failing, passing


class NoTracker:
    """MLflow, which here is not asked."""

    def __init__(self, *args: Any) -> None:
        self.pages: list[Path] = []

    def open_release(self, story: Any) -> None:
        return None

    def log_stage(self, *args: Any) -> None:
        return None

    def close_release(self, run_id: Any, story: Any, page: Path) -> None:
        assert page.is_file(), "a reviewer finds it in MLflow too"


Run = Callable[..., qualify.Qualified]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("replay")`: a qualification whose stages are not measured, and which that gate fails."""
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(qualify, "Tracker", NoTracker)
    loaded = load_candidate(candidate_file(tmp_path))
    against = load_candidate(candidate_file(tmp_path, "math"))

    def of(fails: str = "", at_stage: Callable[[Context], None] = lambda context: None) -> qualify.Qualified:
        def judged(name: str, context: Context) -> StageOutcome:
            at_stage(context)
            return StageOutcome(failing(name) if name == fails else passing(name))

        monkeypatch.setattr(qualify, "run_stage", judged)
        return qualify.qualify_cell(loaded, against, loaded.cells[0], lambda line: None)

    return of


def printed(answer: telling.Why) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(telling.render(answer))
    return console.export_text()


def stages(reports: tuple[GateReport, ...] | list[GateReport]) -> list[str]:
    return [report.stage for report in reports]


def test_why_tells_of_a_qualification_what_its_gates_said(run: Run) -> None:
    done = run("replay")
    answer = telling.why(done.qualification_id)
    assert (done.verdict, answer.headline, answer.champion) == ("fail", "FAIL flash: replay", "math")
    assert stages(answer.gates) == stages(done.gates) == ["fingerprint", "probe", "replay"]
    assert answer.first_failing is not None and answer.reason == done.reason
    assert "no gate has judged" not in printed(answer) and "31.5" in printed(answer)


def test_one_that_passed_says_so_and_has_a_report(run: Run) -> None:
    done = run()
    assert telling.why(done.qualification_id).headline == "PASS flash: qualified"
    assert len(telling.why(done.qualification_id).gates) == 4
    page = Path(done.report)
    assert page.name == "report.html" and "PASS" in page.read_text()


def test_why_knows_one_that_still_runs_or_died(run: Run) -> None:
    def dies(context: Context) -> None:
        raise UserError(context.release_id)

    with pytest.raises(UserError) as died:
        run("", dies)
    answer = telling.why(str(died.value))
    assert (answer.headline, answer.gates) == ("OPEN flash: registered", ())
    assert "no gate has judged it yet" in printed(answer)
    with pytest.raises(UserError, match=f"nearest: {died.value}"):
        telling.why(str(died.value)[:-1])


def test_an_id_is_a_name_and_no_path(run: Run) -> None:
    done = run()
    with pytest.raises(UserError, match="is not known"):
        telling.why(f"../work/{done.qualification_id}")
