from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from data.lake import Lake
from tasks import figures, report, track
from tasks.record import Record
from tasks.story import tell
from tasks.track import Tracker
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, failing, fill, passing
from tests.tasks.sample_record import attempt, deployed, running

_numbers = itertools.count()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One MLflow store for all tests here, because its first connection takes seconds."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTENTION_RELEASE_HOME", str(folder))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield folder


@pytest.fixture
def family(home: Path) -> str:
    """An own experiment and an own registered model a test."""
    return f"family{next(_numbers)}"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def client(tracker: Tracker) -> Any:
    return tracker._client


def promote(lake: Path, family: str, release_id: str, record: Record) -> Tracker:
    """Open, close and promote one release as the flow does; `record` is that after the promotion."""
    tracker = Tracker("cpu", family, lake, release_id)
    story = tell(record, lake, release_id)
    run_id = tracker.open_release(story)
    tracker.log_stage(run_id, passing("probe"))
    tracker.close_release(run_id, story)
    tracker.promoted(run_id, story, record)
    return tracker


def promoted_record(family: str, release_id: str, candidate: str, previous: tuple[str, str]) -> Record:
    record = running(family, release_id, candidate, "promoted")
    record.champion, record.previous = deployed(release_id, candidate), deployed(*previous)
    return record


def aliases(tracker: Tracker) -> dict[str, str]:
    """Release id by alias."""
    model = client(tracker).get_registered_model(tracker.model_name)
    by_version = {version: release_id for release_id, version in tracker._versions().items()}
    return {alias: by_version[str(version)] for alias, version in model.aliases.items()}


def test_a_release_is_one_run_with_a_nested_run_for_each_stage(lake: Path, family: str) -> None:
    tracker = Tracker("cpu", family, lake, "r1")
    run_id = tracker.open_release(tell(running(family, "r1", "wrong-scale", "registered"), lake, "r1"))
    assert client(tracker).get_run(run_id).info.run_name == "OPEN wrong-scale: registered"
    stage_id = tracker.log_stage(run_id, failing(), seconds=4.0)
    for gate in (passing("probe"), failing()):
        gate.write(lake, "r1", gpu="cpu", model="m")
    record = running(family, "r1", "wrong-scale", "rejected", tags=("drill",))
    record.attempts = [attempt("r1", "wrong-scale", "rejected", "replay")]
    record.reason = "replay: r_rms is 31.5"
    tracker.close_release(run_id, tell(record, lake, "r1"))

    run, stage = client(tracker).get_run(run_id), client(tracker).get_run(stage_id)
    assert run.info.run_name == "FAIL wrong-scale: replay"
    assert run.info.status == "FAILED"
    lines = run.data.tags["mlflow.note.content"].splitlines()
    assert lines[0] == "**FAIL wrong-scale: replay** - replay: r_rms is 31.5"
    assert "| replay | tensor.float32.r_rms | FAIL | 31.5 | <= 2 | 0.1 |" in lines
    wanted = {"gate.replay": "fail", "gate.probe": "pass", "state": "rejected", "champion": "torch-math"}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.tags["drill"] == "true"
    assert run.data.metrics["gate.replay.tensor.float32.r_rms.value"] == 31.5
    assert run.data.metrics["gate.replay.tensor.float32.r_rms.limit"] == 2.0
    assert stage.info.run_name == "replay: FAIL"
    assert stage.data.tags["mlflow.parentRunId"] == run_id
    assert stage.data.metrics["seconds"] == 4.0


def test_a_resumed_release_finds_the_run_it_had(lake: Path, family: str) -> None:
    story = tell(running(family, "r1", "flash", "replayed"), lake, "r1")
    first = Tracker("cpu", family, lake, "r1").open_release(story)
    assert first is not None
    assert Tracker("cpu", family, lake, "r1").open_release(story) == first


def test_artifacts_lie_under_the_state_folder_and_are_complete(lake: Path, family: str, home: Path) -> None:
    fill(lake, "r1")
    record = promoted_record(family, "r1", "flash", ("r0", "torch-math"))
    story = tell(record, lake, "r1", policy_yaml="attention_policy: {}\n")
    folder = lake.parent / "report"
    drawn = {stage: figures.save(stage, lake, "r1", folder) for stage in ("probe", "baseline")}
    tracker = Tracker("cpu", family, lake, "r1")
    run_id = tracker.open_release(story)
    for stage, pictures in drawn.items():
        tracker.log_stage(run_id, passing(stage), pictures)
    tracker.close_release(run_id, story, report.write(story, folder))
    artifacts = home / "state" / "mlflow" / "artifacts" / str(run_id) / "artifacts"
    found = {str(path.relative_to(artifacts)) for path in artifacts.rglob("*") if path.is_file()}
    assert found == {
        "fingerprint.json",
        "policy.yaml",
        "gates/probe.json",
        "gates/baseline.json",
        "figures/probe.png",
        *(f"figures/{path.name}" for path in drawn["baseline"]),
        "report.html",
    }
    assert len(drawn["baseline"]) > 1


def test_promotion_moves_the_aliases_and_rollback_moves_them_back(lake: Path, family: str) -> None:
    promote(lake, family, "r1", promoted_record(family, "r1", "flash", ("r0", "torch-math")))
    second = promoted_record(family, "r2", "flash-next", ("r1", "flash"))
    tracker = promote(lake, family, "r2", second)
    assert aliases(tracker) == {"champion": "r2", "previous": "r1"}

    back = second.model_copy(update={"state": "rolled_back", "reason": "on call: slow"})
    back.champion, back.previous = deployed("r1", "flash"), None
    run_id = tracker.run_of("r2")
    tracker.rolled_back(run_id, tell(back, lake, "r2"), back)
    assert aliases(tracker) == {"champion": "r1"}
    assert client(tracker).get_run(run_id).data.tags["state"] == "rolled_back"
    assert client(tracker).get_run(run_id).info.run_name == "FAIL flash-next: rolled back"


def test_a_champion_that_was_never_a_candidate_has_no_alias(lake: Path, family: str) -> None:
    tracker = promote(lake, family, "r1", promoted_record(family, "r1", "flash", ("r0", "torch-math")))
    assert aliases(tracker) == {"champion": "r1"}


def test_promoting_twice_makes_one_version(lake: Path, family: str) -> None:
    record = promoted_record(family, "r1", "flash", ("r0", "torch-math"))
    promote(lake, family, "r1", record)
    assert len(promote(lake, family, "r1", record)._versions()) == 1


def test_a_drill_gets_neither_version_nor_alias(lake: Path, family: str) -> None:
    record = promoted_record(family, "r1", "slow-decode", ("r0", "torch-math"))
    record.tags = ["drill"]
    tracker = promote(lake, family, "r1", record)
    assert tracker._versions() == {}
    assert client(tracker).search_registered_models(f"name = '{tracker.model_name}'") == []


def test_no_prompt_output_or_token_reaches_mlflow(lake: Path, family: str, home: Path) -> None:
    fill(lake, "r1")
    record = running(family, "r1", "wrong-scale", "rejected")
    story = tell(record, lake, "r1")
    folder = lake.parent / "report"
    tracker = Tracker("cpu", family, lake, "r1")
    run_id = tracker.open_release(story)
    for gate in story.gates:
        tracker.log_stage(run_id, gate)
    tracker.close_release(run_id, story, report.write(story, folder))
    store = home / "state" / "mlflow"
    artifacts = store / "artifacts" / str(run_id)
    text = "\n".join(sqlite3.connect(store / "mlflow.db").iterdump())
    text += "\n".join(path.read_text(errors="replace") for path in artifacts.rglob("*") if path.is_file())
    assert "wrong-scale" in text
    assert SECRET not in text
    assert str(SECRET_TOKEN) not in text


def test_a_broken_store_costs_a_warning_event_and_not_the_release(
    lake: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:hunter2@127.0.0.1:9")
    record = running(family, "r1", "flash", "registered")
    tracker = Tracker("cpu", family, lake, "r1")
    story = tell(record, lake, "r1")
    run_id = tracker.open_release(story)
    assert run_id is None
    assert tracker.log_stage(run_id, passing("probe")) is None
    tracker.close_release(run_id, story)
    assert tracker.promoted(run_id, story, record) is None
    with Lake(lake) as opened:
        found = opened.rows("select kind, severity, subject, message from events where release_id = 'r1'")
    assert [row[:3] for row in found] == [("mlflow_failed", "warning", "open_release")]
    assert "127.0.0.1:9" in found[0][3]
    assert "hunter2" not in found[0][3]


def test_repair_that_cannot_reach_mlflow_says_so_to_the_person_who_asked(
    lake: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        track.repair(running(family, "r1", "flash", "registered"), lake)


def test_repair_rebuilds_runs_versions_and_aliases_from_record_and_lake(lake: Path, family: str) -> None:
    for release_id in ("r1", "r2"):
        fill(lake, release_id)
    record = promoted_record(family, "r2", "flash-next", ("r1", "flash"))
    record.attempts = [
        attempt("r1", "flash", "superseded"),
        attempt("r9", "wrong-scale", "rejected", "replay"),
    ]
    assert track.repair(record, lake) == ["r1", "r9", "r2"]
    tracker = Tracker("cpu", family, lake, "r2")
    assert aliases(tracker) == {"champion": "r2", "previous": "r1"}
    run_id = tracker.run_of("r9")
    assert client(tracker).get_run(run_id).info.run_name == "FAIL wrong-scale: replay"
    assert tracker._stages_of(str(tracker.run_of("r2"))) == {"probe", "replay", "baseline"}

    client(tracker).set_registered_model_alias(tracker.model_name, "champion", tracker._version_of("r1"))
    ended = client(tracker).get_run(run_id).info.end_time
    track.repair(record, lake)
    assert aliases(tracker) == {"champion": "r2", "previous": "r1"}
    assert client(tracker).get_run(run_id).info.end_time == ended
