"""A night qualifies what serves, beside the nights before it; stages are not measured here, the history is judged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from attention.schemas import write_rows
from data.candidate import load_candidate
from data.paths import cell_dir, lake_dir
from flows import nightly, qualify
from flows.why import why
from gates import history
from gates.thresholds import load_limits
from gates.verdict import GateReport
from tasks.context import Context, StageOutcome
from tasks.record import RecordStore
from tests.commands import candidate_file
from tests.flows.test_qualify import NoTracker
from tests.tasks.sample_lake import passing
from tests.tasks.sample_record import deployed, running

MODEL = "smollm2-135m-instruct"
Night = Callable[..., list[str]]


def test_nothing_to_do_before_the_first_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    said: list[str] = []
    assert nightly.run(say=said.append) == []
    assert said == ["nightly: nothing was released yet"]


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """`nights(1.3)`: the lines of a night whose decode takes 1.3 times what it took in six nights before."""
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(qualify, "Tracker", NoTracker)
    champion = candidate_file(tmp_path)
    serving = deployed("r0", "flash").model_copy(update={"candidate_file": str(champion)})
    record = running("smollm2", "r0", "flash", "promoted").model_copy(update={"champion": serving})
    store = RecordStore(cell_dir("cpu", "smollm2") / "record.json")
    store.update(lambda new: new.__dict__.update(record.model_copy(update={"generation": 0}).__dict__))
    [cell] = load_candidate(champion).cells
    for day in range(6):
        time = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(days=day)
        release_id = f"nightly-flash-{time:%Y%m%d-%H%M%S}"
        write_rows(lake_dir(), "perf_backends", [measured(time, 1.0)], release_id=release_id)
        passing("baseline").write(lake_dir(), release_id, gpu=cell.gpu, model=cell.model)

    def night(factor: float) -> list[str]:
        def judged(name: str, context: Context) -> StageOutcome:
            if name != "baseline":
                return StageOutcome(passing(name))
            context.write("perf_backends", [measured(datetime.now(UTC), factor)])
            checks = history.checks(context.lake, context.release_id, load_limits("history", "full"))
            return StageOutcome(GateReport(stage="baseline", checks=tuple(checks)))

        monkeypatch.setattr(qualify, "run_stage", judged)
        said: list[str] = []
        nightly.run(say=said.append)
        return said

    return night


def measured(time: datetime, factor: float) -> dict[str, Any]:
    key = {"family": "decode", "metric": "kernel_s", "backend": "torch_sdpa:flash", "case_id": "4q1s512"}
    figures = {"outcome": "measured", "weight": 0.4, "p50_s": 1e-3 * factor, "limit_ratio": 0.5 / factor}
    return {"side": "candidate", "gpu": "cpu", "model": MODEL, "time": time, **key, **figures}


def test_a_night_like_those_before_says_what_it_was_compared_with(nights: Night) -> None:
    assert nights(1.0)[-1].startswith("nightly: 6 accepted baselines before")


def test_a_night_that_became_slower_fails_and_why_shows_the_cell(nights: Night) -> None:
    said = nights(1.3)
    assert said[-1].startswith("nightly: history.slower: 1.3 is not <= 1.08; decode kernel_s of torch_sdpa:flash")
    with pytest.raises(nightly.NightlyFailedError, match=r"cpu smollm2: baseline: history\.slower"):
        nightly.nightly.fn()
    [release_id] = [line.removeprefix("id ") for line in said if line.startswith("id ")]
    answer = why(release_id)
    assert answer.headline == "FAIL flash: baseline" and "1.3 ms now, 1 ms last" in answer.reason
    assert answer.evidence is not None and answer.evidence.table == "perf_backends"
    assert answer.evidence.rows[0][3] == "4q1s512"


def test_a_first_night_says_that_there_is_nothing_to_compare_with(nights: Night) -> None:
    for folder in lake_dir().glob("perf_backends/*"):
        folder.rename(lake_dir() / folder.name)
    assert nights(9.0)[-1].endswith("before: nothing to compare with")
