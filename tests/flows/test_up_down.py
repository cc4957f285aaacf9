"""`up` and `down`: what is started, kept running, adopted, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attention.errors import UserError
from data.paths import repo_dir
from flows.down import down
from flows.up import up
from tasks.processes import ProcessError, free_port, is_alive, living_instance, start_ticks, stop_processes
from tasks.record import Attempt, Instance, LeaseLostError, Record, RecordStore, Shares
from tasks.supervisor import HUNG_S, Supervisor, _Silence
from tests.stub_cell import FAMILY, GPU, StubCell, deployed, wait_until


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCell]:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTENTION_RELEASE_PORT", str(free_port()))
    yield StubCell.here()
    down(GPU, FAMILY, grace_s=2)


def serves(cell: StubCell) -> bool:
    try:
        return cell.router.process() is not None and cell.served_by() != ""
    except OSError:  # Envoy is there, its listener not yet
        return False


def test_up_serves_again_does_nothing_and_down_leaves_nothing(cell: StubCell) -> None:
    first = up(GPU, FAMILY, champion=deployed("r1"))
    assert cell.served_by() == first.release_id == "r1"
    pids = cell.pids()
    assert set(pids) == {"supervisor", "envoy", "watchdog", "champion-r1"}
    assert up(GPU, FAMILY) == first and cell.pids() == pids
    # What a killed release leaves behind has process files, and goes too.
    orphans = [cell.start("r2", "candidate"), cell.start("r2", "control")]
    stopped = down(GPU, FAMILY)
    assert {process.name for process in stopped} == {*pids, "candidate-r2", "control-r2"}
    assert cell.pids() == {} and list((cell.cell / "processes").iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() and find_state(pid) != "Z" for pid in pids.values())
    assert not any(is_alive(orphan.pid, orphan.started) for orphan in orphans)
    champion = cell.store.load().champion
    assert champion is not None and champion.instance is None
    assert down(GPU, FAMILY) == []


def find_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_dies_is_started_again(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    before = cell.pids()
    for name in ("envoy", "watchdog", "champion-r1"):
        os.kill(before[name], signal.SIGKILL)
    wait_until(lambda: set(cell.pids()) == set(before) and serves(cell), 10)
    after = cell.pids()
    assert after["supervisor"] == before["supervisor"]
    assert all(after[name] != before[name] for name in ("envoy", "watchdog", "champion-r1"))


def test_what_hangs_is_killed_and_started_again(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    before = cell.pids()
    for name in ("watchdog", "champion-r1"):
        os.kill(before[name], signal.SIGSTOP)
    waited = wait_until(lambda: cell.pids().get("champion-r1") not in (None, before["champion-r1"]), 40)
    assert waited > HUNG_S / 2
    wait_until(lambda: cell.pids().get("watchdog") not in (None, before["watchdog"]), 40)
    wait_until(lambda: serves(cell), 10)
    after = cell.pids()
    assert (after["supervisor"], after["envoy"]) == (before["supervisor"], before["envoy"])
    assert find_state_of(before.values()) <= {"S", "R"}


def find_state_of(pids: Iterable[int]) -> set[str]:
    return {find_state(pid) for pid in pids if start_ticks(pid) is not None}


def test_a_champion_that_still_loads_is_left_alone_however_silent(cell: StubCell) -> None:
    supervisor = supervisor_of(cell)
    silent = Instance(name="champion-r1", port=free_port(), pid=os.getpid(), started=1, log="")
    assert not any(supervisor._hangs(silent) for _ in range(20))


@pytest.mark.parametrize(("answers", "hung"), [([True, False] * 10, False), ([False] * 20, True)])
def test_a_champion_hangs_only_when_it_answers_nothing_for_long(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch, answers: list[bool], hung: bool
) -> None:
    """Slow now and then is not hung; a question every two seconds by this clock."""
    supervisor, clock, said = supervisor_of(cell), [100.0], iter(answers)
    champion = Instance(name="champion-r1", port=4711, pid=os.getpid(), started=1, log="")
    monkeypatch.setattr(supervisor.router, "told_endpoint", lambda role: champion.port)
    monkeypatch.setattr("tasks.supervisor.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("tasks.supervisor.ask_health", lambda *_: (503, {}) if next(said) else None)
    verdicts = []
    for _ in answers:
        verdicts.append(supervisor._hangs(champion))
        clock[0] += 2.0
    assert any(verdicts) == hung
    assert not any(verdicts[:5]), "too early"


def test_a_supervisor_that_was_itself_stopped_kills_nobody_for_it() -> None:
    silence = _Silence(limit_s=0.0, min_looks=4)
    assert not any(silence.too_long("sign") for _ in range(4))
    assert silence.too_long("sign") and not silence.too_long("another sign")


def supervisor_of(cell: StubCell) -> Supervisor:
    return Supervisor(GPU, FAMILY, free_port())


def test_a_killed_supervisor_leaves_users_served_and_up_adopts_what_lives(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    before = cell.pids()
    os.kill(before["supervisor"], signal.SIGKILL)
    wait_until(lambda: "supervisor" not in cell.pids())
    assert serves(cell)
    up(GPU, FAMILY)
    after = cell.pids()
    assert after.pop("supervisor") != before.pop("supervisor")
    assert after == before


def test_after_a_promotion_the_new_champion_is_the_one_that_is_kept(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    candidate = cell.start("r2", "candidate")

    def promote(record: Record) -> None:
        record.previous = record.champion
        record.champion = deployed("r2", candidate)

    generation = cell.write(promote).generation
    cell.router.set_endpoint("champion", candidate.port, generation=generation)
    assert cell.served_by() == "r2"
    os.kill(candidate.pid, signal.SIGKILL)
    wait_until(lambda: serves(cell), 10)
    assert cell.served_by() == "r2"
    kept = cell.store.load().champion
    assert kept is not None and kept.instance is not None
    assert (kept.instance.name, kept.instance.pid != candidate.pid) == ("candidate-r2", True)
    assert "champion-r1" in cell.pids(), "previous stays warm"


def test_up_starts_previous_too_so_that_a_rollback_need_not_wait(cell: StubCell) -> None:
    cell.write(lambda record: record.__dict__.update(champion=deployed("r2"), previous=deployed("r1")))
    up(GPU, FAMILY)
    wait_until(lambda: warm_pid(cell) is not None, 20)
    pid = warm_pid(cell)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cell.pids().get("previous-r1") not in (None, pid), 20)
    assert "previous-r1" in {process.name for process in down(GPU, FAMILY)}


def test_a_champion_that_could_not_be_entered_in_the_record_is_adopted_at_the_next_look(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.write(lambda record: record.__dict__.update(champion=deployed("r1")))
    supervisor = supervisor_of(cell)

    def locked_out(*_: object, **__: object) -> Record:
        raise TimeoutError("record.lock has been locked for 5 s")

    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(supervisor.store, "update", locked_out)
        supervisor._keep_champion()
    first = cell.pids()["champion-r1"]
    supervisor_of(cell)._keep_champion()  # of another supervisor, even
    champion = cell.store.load().champion
    assert champion is not None and champion.instance is not None
    assert champion.instance.pid == first == cell.pids()["champion-r1"]


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_started_as_previous_stays_only_if_the_rollback_in_the_same_moment_took_it(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    champion = cell.start("r2", "champion")
    cell.write(lambda record: record.__dict__.update(champion=deployed("r2", champion), previous=deployed("r1")))
    supervisor, update = supervisor_of(cell), RecordStore.update
    monkeypatch.setattr(supervisor.router, "told_endpoint", lambda role: champion.port)

    def overtaken(store: RecordStore, *args: Any, **kwargs: Any) -> Record:
        monkeypatch.setattr(RecordStore, "update", update)
        found = living_instance(cell.cell, "previous-r1") if taken else None
        serves = {"champion": deployed("r1", found), "previous": deployed("r2", champion)}
        cell.write(lambda record: record.__dict__.update(serves))
        return update(store, *args, **kwargs)

    monkeypatch.setattr(RecordStore, "update", overtaken)
    supervisor._keep_previous()
    assert ("previous-r1" in cell.pids()) == taken


def test_down_stops_what_no_process_file_tells_of(cell: StubCell, capsys: pytest.CaptureFixture[str]) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    before = cell.pids()
    assert set(before) == {"supervisor", "envoy", "watchdog", "champion-r1"}
    for name in ("supervisor", "envoy"):
        (cell.cell / "processes" / f"{name}.json").write_bytes(b"\xff\xfe")
    (cell.cell / "processes" / "champion-r1.json").unlink()
    assert serves(cell) and up(GPU, FAMILY).supervisor_pid == before["supervisor"]
    assert {process.name for process in down(GPU, FAMILY)} == set(before)
    assert not any(start_ticks(pid) for pid in before.values())
    assert list((cell.cell / "processes").iterdir()) == []


def test_down_stops_what_a_release_was_starting_meanwhile(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cell.start("r2", "candidate")
    late: list[Instance] = []

    def racing(*args: Any) -> None:
        stop_processes(*args)
        if not late:
            late.append(cell.start("r2", "control"))

    monkeypatch.setattr("flows.down.stop_processes", racing)
    assert [process.pid for process in down(GPU, FAMILY)] == [first.pid]
    assert late and cell.pids() == {}


def warm_pid(cell: StubCell) -> int | None:
    """Of previous, once the record names its instance."""
    previous = cell.store.load().previous
    return previous.instance.pid if previous is not None and previous.instance is not None else None


def test_what_a_rollback_took_out_is_not_started_again(cell: StubCell) -> None:
    bad = Attempt(release_id="r2", candidate="stub-r2", identity="i", state="rolled_back", failed_gate=None,
                  reason="wrong answers", time=2.0)  # fmt: skip
    cell.write(lambda record: record.__dict__.update(champion=deployed("r1"), previous=deployed("r2"), attempts=[bad]))
    up(GPU, FAMILY)
    time.sleep(1.0)
    assert set(cell.pids()) == {"supervisor", "envoy", "watchdog", "champion-r1"}


def test_a_handover_that_died_half_way_is_undone(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    candidate = cell.start("r2", "candidate")
    # The endpoint was moved; the record, which decides, was not written any more.
    cell.router.set_endpoint("champion", candidate.port, generation=cell.store.load().generation)
    wait_until(lambda: cell.served_by() == "r1")


def test_envoy_comes_back_with_the_shares_of_a_living_release(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    candidate = cell.start("r9", "candidate")
    cell.router.set_endpoint("candidate", candidate.port, generation=cell.store.load().generation)
    cell.expose(Shares(champion=60, control=20, candidate=20), lease_s=60)
    old = cell.pids()["envoy"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: cell.pids().get("envoy", old) != old and serves(cell), 10)
    assert cell.router.observe().shares.candidate == 20


def test_a_port_in_use_starts_nothing(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("ATTENTION_RELEASE_PORT", str(port))
        with pytest.raises(UserError, match=f"^port {port} is in use .pid {os.getpid()} .* ATTENTION_RELEASE_PORT"):
            up(GPU, FAMILY, champion=deployed("r1"))
    assert cell.pids() == {}


def test_a_port_that_is_no_port_is_named(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_PORT", "http")
    with pytest.raises(UserError, match="ATTENTION_RELEASE_PORT=http: not a port"):
        up(GPU, FAMILY, champion=deployed("r1"))


def test_a_champion_that_cannot_start_is_quoted_and_nothing_stays(cell: StubCell) -> None:
    broken = deployed("r1").model_copy(
        update={"command": [sys.executable, "-c", "raise SystemExit('no model at /nowhere')"]}
    )
    with pytest.raises(ProcessError, match="champion-r1 died while starting:\nno model at /nowhere"):
        up(GPU, FAMILY, champion=broken)
    assert cell.pids() == {}


def test_up_without_a_champion_says_what_to_do(cell: StubCell) -> None:
    with pytest.raises(UserError, match="names no champion to serve: release one first"):
        up(GPU, FAMILY)


def test_down_during_a_release_ends_its_lease_and_leaves_a_whole_record(cell: StubCell) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    candidate = cell.start("r9", "candidate")
    cell.router.set_endpoint("candidate", candidate.port, generation=cell.store.load().generation)
    token = cell.expose(Shares(champion=60, control=20, candidate=20), lease_s=60)
    down(GPU, FAMILY)
    assert cell.pids() == {}
    text = cell.store.path.read_text()
    with pytest.raises(LeaseLostError, match="a rollback, the watchdog or another release ended it"):
        cell.store.update(lambda record: None, token=token)
    assert cell.store.path.read_text() == text
    record = cell.store.load()
    assert (record.state, record.shares, record.lease, record.candidate_instance) == ("baselined", Shares(), None, None)


def test_down_stops_everything_although_the_record_is_corrupt(
    cell: StubCell, capsys: pytest.CaptureFixture[str]
) -> None:
    up(GPU, FAMILY, champion=deployed("r1"))
    cell.store.path.write_text("{")
    down(GPU, FAMILY)
    assert cell.pids() == {}
    assert "not a release record" in capsys.readouterr().err


def test_what_keeps_users_safe_imports_nothing_heavy() -> None:
    heavy = ("torch", "prefect", "mlflow", "duckdb", "great_expectations", "pyarrow", "transformers", "pandas")
    script = (
        "import sys, tasks.supervisor, flows.up, flows.down, flows.watch, flows.rollback;"
        f"sys.exit(' '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=repo_dir(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
