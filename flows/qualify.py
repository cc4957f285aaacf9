"""`flows qualify`: the offline phases alone. No record changes, no traffic moves.

For a small service ("fixed backend, startup probe, basic replay"), and for the nightly regression of
what is in production.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow
from pydantic import BaseModel

from data.candidate import Cell, Loaded, load_candidate
from data.paths import cell_dir
from gates.verdict import GateReport, Verdict, worst
from tasks import figures, lifecycle, qualified
from tasks import report as report_html
from tasks.context import Context, new_release_id
from tasks.offline import OFFLINE_STAGES, run_stage
from tasks.record import RecordStore
from tasks.story import Story, with_evidence
from tasks.track import Tracker

Say = Callable[[str], None]


class Qualified(BaseModel):
    """How a qualification ended in one cell."""

    qualification_id: str
    candidate: str
    champion: str
    gpu: str
    family: str
    verdict: str
    failed_gate: str | None
    reason: str
    gates: list[GateReport]
    seconds: dict[str, float]  # that each stage took
    report: str  # report.html
    mlflow_run_id: str | None

    @property
    def exit_code(self) -> int:
        """0 passed, 1 a gate failed, 3 inconclusive or errored."""
        return {"pass": 0, "fail": 1}.get(self.verdict, 3)


@flow(name="qualify", flow_run_name="{candidate}", log_prints=True)
def qualify(candidate: str, champion: str | None = None) -> list[dict[str, Any]]:
    """Qualify a candidate file in every cell of its waves, against who serves there or the incumbent."""
    return [one.model_dump(mode="json") for one in run(Path(candidate), champion=champion, say=print)]


def run(candidate: Path, *, champion: str | None, say: Say) -> list[Qualified]:
    """The same without Prefect. Raises UserError for a bad candidate."""
    loaded = load_candidate(candidate)
    found = []
    for cell in loaded.cells:
        record = RecordStore(cell_dir(cell.gpu, cell.family) / "record.json").load()
        _, against = lifecycle.champion_of(record, cell, champion)
        found.append(qualify_cell(loaded, against, cell, say))
    return found


def qualify_cell(loaded: Loaded, against: Loaded, cell: Cell, say: Say, *, prefix: str = "qualify") -> Qualified:
    """Measure and judge one cell; evidence and verdicts go to the lake under an id of its own, and to MLflow."""
    context = Context(
        release_id=f"{prefix}-{new_release_id(loaded.candidate.name)}",
        cell=cell,
        candidate=loaded,
        champion=against,
        lease=None,
        say=say,
    )
    tracker = Tracker(cell.gpu, cell.family, context.lake, context.release_id)
    story = Story(
        release_id=context.release_id,
        candidate=loaded.candidate.name,
        gpu=cell.gpu,
        family=cell.family,
        state="registered",
        champion=against.candidate.name,
        tags=(prefix,),
        policy_yaml=loaded.policy_path.read_text(),
    )
    qualified.keep(story, context.work)
    say(f"id {context.release_id}")
    run_id = tracker.open_release(story)
    reports: list[GateReport] = []
    seconds: dict[str, float] = {}
    for name in OFFLINE_STAGES:
        started = time.monotonic()
        report = run_stage(name, context).report
        report.write(context.lake, context.release_id, gpu=cell.gpu, model=cell.model)
        reports.append(report)
        seconds[name] = round(time.monotonic() - started, 3)
        say(f"{name}: {report.verdict}, {len(report.checks)} checks, {seconds[name]:.0f} s")
        pictures = figures.save(name, context.lake, context.release_id, context.work / "figures")
        tracker.log_stage(run_id, report, pictures, time.monotonic() - started)
        if report.verdict is not Verdict.PASS:
            break
    verdict = worst(report.verdict for report in reports)
    failed = reports[-1] if verdict is not Verdict.PASS else None
    state = {"pass": "qualified", "fail": "rejected"}.get(str(verdict), "held")
    reason = failed.reason if failed else "every offline gate passed"
    ended = {"state": state, "reason": reason, "failed_gate": failed.stage if failed else None}
    story = story.model_copy(update=ended)
    qualified.keep(story, context.work)
    told = with_evidence(story, context.lake)
    page = report_html.write(told, context.work / "figures")
    tracker.close_release(run_id, told, page)
    return Qualified(
        qualification_id=context.release_id,
        candidate=loaded.candidate.name,
        champion=against.candidate.name,
        gpu=cell.gpu,
        family=cell.family,
        verdict=str(verdict),
        failed_gate=failed.stage if failed else None,
        reason=reason,
        gates=reports,
        seconds=seconds,
        report=str(page),
        mlflow_run_id=run_id,
    )
