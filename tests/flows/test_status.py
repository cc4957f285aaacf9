from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from data.paths import cell_dir
from flows.status import StatusReport, render, status
from tasks.files import write_atomically
from tasks.processes import ProcessFile, start_ticks
from tasks.record import LEASE_S, Approval, Instance, Lease, Record, RecordStore, Shares
from tests.tasks.sample_record import attempt, deployed, running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    return tmp_path


def put(record: Record) -> None:
    path = cell_dir(record.gpu, record.family) / "record.json"
    write_atomically(path, record.model_dump_json())


def this_process() -> Instance:
    started = start_ticks(os.getpid())
    assert started is not None
    return Instance(name="champion-1", port=9001, pid=os.getpid(), started=started, log="x.log")


def printed(report: StatusReport, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(report))
    return console.export_text()


def test_nothing_released_yet_says_how_to_begin() -> None:
    assert "make release" in printed(status())


def test_a_cell_shows_state_champion_previous_shares_lease_and_who_lives() -> None:
    record = running("smollm2", "r2", "flash", "canary")
    record.champion = deployed("r1", "torch-math", this_process())
    record.previous = deployed("r0", "older")
    record.candidate_instance = Instance(name="candidate-1", port=9002, pid=os.getpid(), started=1, log="y.log")
    record.shares = Shares(champion=60, control=20, candidate=20)
    now = time.time()
    record.lease = Lease(holder="r2", pid=os.getpid(), token="t", acquired_at=now, expires_at=now + LEASE_S)
    record.approval = Approval(release_id="r2", stage="canary", by="reviewer", time=now)
    put(record)
    [cell] = status().cells
    assert (cell.state, cell.champion, cell.previous) == ("canary", "torch-math", "older")
    assert cell.shares.candidate == 20
    assert cell.lease is not None
    assert cell.lease.live
    alive = {process.role: process.alive for process in cell.processes}
    assert alive == {"champion": True, "candidate": False}  # the second has another start time
    text = printed(status())
    for part in ("champion 60, control 20, candidate 20", "r2 (pid", "reviewer", "torch_sdpa:math", "dead"):
        assert part in text


def test_processes_that_only_a_file_tells_of_are_shown() -> None:
    put(running("smollm2", "r2", "flash", "shadow"))
    envoy = ProcessFile(
        name="envoy", role="envoy", command=["envoy"], pid=os.getpid(), started=1, port=8700, log="x.log"
    )
    write_atomically(cell_dir("cpu", "smollm2") / "processes" / "envoy.json", envoy.model_dump_json())
    [process] = status().cells[0].processes
    assert (process.name, process.alive) == ("envoy", False)


def test_what_no_clock_can_show_and_a_process_file_that_is_none_are_shown_all_the_same() -> None:
    record = running("smollm2", "r2", "flash", "rolled_back")
    record.attempts = [attempt("r2", "flash", "rolled_back").model_copy(update={"time": 1e300})]
    put(record)
    broken = cell_dir("cpu", "smollm2") / "processes" / "envoy.json"
    broken.parent.mkdir()
    broken.write_bytes(b"\xff\xfe")
    text = printed(status(), width=400)
    assert "1e+300?" in text and f"not a process file  {broken}" in text


def test_the_last_five_attempts_are_shown_and_the_others_counted() -> None:
    record = running("smollm2", "r9", "flash", "promoted")
    record.attempts = [attempt(f"try-{i}", "wrong-scale", "rejected", "replay") for i in range(9)]
    put(record)
    report = status()
    assert [one.release_id for one in report.cells[0].attempts] == [f"try-{i}" for i in reversed(range(9))]
    text = printed(report)
    assert [f"try-{i}" in text for i in range(9)] == [False] * 4 + [True] * 5
    assert "4 earlier: `status --json` has them" in text


def test_five_attempts_have_none_earlier() -> None:
    record = running("smollm2", "r9", "flash", "promoted")
    record.attempts = [attempt(f"try-{i}", "wrong-scale", "rejected", "replay") for i in range(5)]
    put(record)
    assert "earlier" not in printed(status())


def test_release_ids_are_whole_at_eighty_columns() -> None:
    release_id = "a-candidate-with-quite-a-long-name-20261129-231502"
    record = running("smollm2", release_id, "a-candidate-with-quite-a-long-name", "rolled_back")
    record.attempts = [attempt(release_id, "a-candidate-with-quite-a-long-name", "rolled_back", "canary [50 %]")]
    put(record)
    lines = printed(status(), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(release_id in line for line in lines) == 2
    assert any("canary [50 %]: too far off" in line for line in lines)


def test_a_broken_record_hides_no_other_cell() -> None:
    write_atomically(cell_dir("cpu", "aaa") / "record.json", "{")
    put(running("zzz", "r1", "flash", "promoted"))
    broken, sound = status().cells
    assert broken.error is not None
    assert "record.json" in broken.error
    assert sound.candidate == "flash"
    assert "not a release record" in printed(status())


def test_the_report_round_trips_as_json() -> None:
    put(running("smollm2", "r1", "flash", "promoted"))
    report = status()
    assert StatusReport.model_validate_json(report.model_dump_json()) == report


def test_repair_tells_the_releases_of_every_cell_again(monkeypatch: pytest.MonkeyPatch) -> None:
    put(running("smollm2", "r1", "flash", "promoted"))
    put(running("qwen", "r2", "flash", "promoted"))
    from tasks import track

    monkeypatch.setattr(track, "repair", lambda record, lake: [record.release_id])
    assert status(repair=True).repaired == ["r2", "r1"]


def test_status_needs_neither_mlflow_nor_duckdb_nor_torch(home: Path) -> None:
    RecordStore(cell_dir("cpu", "smollm2") / "record.json").update(lambda record: None)
    script = (
        "import sys\n"
        "for name in ('mlflow', 'duckdb', 'torch', 'prefect', 'great_expectations'): sys.modules[name] = None\n"
        "from flows.status import status\nprint(status().cells[0].family)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "smollm2", done.stderr
