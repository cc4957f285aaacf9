from __future__ import annotations

import io
import json
import socket
import struct
from pathlib import Path

import pytest
from rich.console import Console

from data.model_setup import NAME
from data.paths import cell_dir, lake_dir, repo_dir
from flows import doctor, telemetry
from flows.doctor import Diagnosis, Finding, render
from tasks.files import write_atomically
from tasks.processes import ProcessFile, free_port
from tasks.record import RecordStore, Shares
from tests.tasks.sample_lake import fill


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTENTION_RELEASE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("ATTENTION_RELEASE_PORT", str(free_port()))
    for name, value in telemetry.SWITCHES.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def only(check: object) -> list[Finding]:
    return doctor._guarded(check)  # type: ignore[arg-type]


def failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fail"]


def model_folder(home: Path, num_missing: int) -> Path:
    """A model folder in the layout of safetensors, its weights cut short by so many bytes."""
    folder = home / "models" / NAME
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(16)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) - num_missing])
    return folder


def test_a_sound_machine_passes_and_every_failure_has_a_remedy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MODULES", ("json", "yaml"))
    model_folder(home, 0)
    fill(lake_dir(), "r1")
    diagnosis = doctor.doctor()
    names = {finding.check for finding in diagnosis.findings}
    assert {"python", "imports", "envoy", "model", "port", "disk", "records", "processes", "lake"} <= names
    without_pins = [one for one in diagnosis.findings if one.check != "versions"]
    assert failed(without_pins) == []
    assert all(one.remedy for one in diagnosis.findings if one.status != "ok")


def test_a_package_that_does_not_import_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MODULES", ("json", "no_such_package_here"))
    [finding] = [one for one in failed(only(doctor._packages)) if one.check.startswith("import")]
    assert finding.check == "import no_such_package_here"
    assert "ModuleNotFoundError" in finding.found


def test_another_version_than_the_constraints_name_is_a_warning(tmp_path: Path) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("# pins\nrich==0.0.1\nnot-installed-at-all==1.0\n")
    findings = list(doctor._pins(pins))
    assert [(one.check, one.status) for one in findings] == [("version rich", "warn"), ("versions", "ok")]


def test_a_missing_model_and_a_cut_download_are_told_apart(home: Path) -> None:
    assert "not complete" in only(doctor._model)[0].found
    folder = model_folder(home, 4)
    assert "model.safetensors: not whole" in only(doctor._model)[0].found
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(4))
    assert only(doctor._model)[0].status == "ok"


def test_a_taken_port_fails_and_names_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("ATTENTION_RELEASE_PORT", str(other.getsockname()[1]))
        [finding] = only(doctor._port)
    assert finding.status == "fail"
    assert "pid" in finding.found


def test_a_broken_record_and_traffic_without_a_lease_fail(home: Path) -> None:
    write_atomically(cell_dir("cpu", "broken") / "record.json", "{ not json")
    RecordStore(cell_dir("cpu", "open") / "record.json").update(
        lambda record: setattr(record, "shares", Shares(champion=60, control=20, candidate=20))
    )
    findings = failed(only(doctor._records))
    assert [one.check for one in findings] == ["record cpu broken", "record cpu open"]
    assert "shares champion 60, control 20, candidate 20, mirror 0" in findings[1].found
    assert "rollback --family open --gpu cpu" in findings[1].remedy


def test_a_dead_process_that_is_still_recorded_is_a_warning(home: Path) -> None:
    dead = ProcessFile(
        name="candidate-1", role="candidate", command=["x"], pid=2**22 - 1, started=1, port=1, log="x.log"
    )
    write_atomically(cell_dir("cpu", "smollm2") / "processes" / "candidate-1.json", dead.model_dump_json())
    findings = only(doctor._processes)
    assert findings[0].status == "warn"
    assert "flows down" in findings[0].remedy


def test_a_damaged_lake_file_is_named(home: Path) -> None:
    fill(lake_dir(), "r1")
    broken = next((lake_dir() / "requests" / "release_id=r1").glob("*.parquet"))
    broken.write_bytes(broken.read_bytes()[:-100])
    [finding] = only(doctor._lake)
    assert finding.status == "fail"
    assert broken.name in finding.found


def test_a_check_that_breaks_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_PORT", "eighty")
    [finding] = only(doctor._port)
    assert finding.status == "fail"


def test_telemetry_that_somebody_turned_on_is_a_warning_and_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    telemetry.silence()
    [finding] = only(doctor._telemetry)
    assert finding.status == "warn"
    assert "MLFLOW_DISABLE_TELEMETRY is false" in finding.found


def test_silence_sets_every_switch_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in telemetry.SWITCHES:
        monkeypatch.delenv(name)
    telemetry.silence()
    assert telemetry.differing() == {}


def test_one_failure_stops_a_release_and_warnings_do_not() -> None:
    warn = Finding(check="a", status="warn", found="b", remedy="c [d]")
    fail = Finding(check="a", status="fail", found="b", remedy="c")
    assert Diagnosis(findings=[warn]).ok
    diagnosis = Diagnosis(findings=[warn, fail])
    assert not diagnosis.ok
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(diagnosis))
    text = console.export_text()
    assert "c [d]" in text
    assert "1 failed: a release cannot run" in text


def test_names_and_paths_are_whole_at_eighty_columns() -> None:
    folder = "/srv/serving/attention-release/data/models/smollm2-135m-instruct"
    name = "record NVIDIA-H200 a-family-of-models"
    found = Finding(check=name, status="fail", found=f"{folder} is not complete", remedy="run `make setup`")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(Diagnosis(findings=[found])))
    lines = console.export_text().splitlines()
    assert lines[1:4] == [f"{name}  fail", f"    {folder} is not", "    complete"]
    assert lines[4] == "    run `make setup`"


def test_the_repository_that_doctor_looks_at_is_this_one() -> None:
    assert (repo_dir() / "pyproject.toml").is_file()
