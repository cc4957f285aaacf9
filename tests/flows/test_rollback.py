"""`rollback`: one command, fast, that needs nothing of what may be broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from attention.errors import UserError
from data.paths import lake_dir, repo_dir
from flows.rollback import rollback
from tasks.files import locked
from tasks.processes import free_port, is_alive, list_processes, start_instance, start_ticks, stop_processes
from tasks.record import Instance, LeaseLostError, Record, RecordStore, Shares
from tasks.router import EnvoyRouter, RouterError
from tests.stub_cell import FAMILY, GPU, StubCell, deployed, stub_command

CANARY = Shares(champion=60, control=20, candidate=20)
BLOCKED = ("prefect", "mlflow", "torch", "great_expectations", "duckdb", "transformers")


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCell]:
    """Release r2 was promoted over r1: both instances live, r2 serves, r1 is kept warm."""
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    cell = StubCell.here()
    with ExitStack() as stack:
        stack.callback(cell.router.stop)
        stack.callback(lambda: stop_processes(cell.cell, list_processes(cell.cell), 2))
        cell.router.start(free_port())
        old, new = cell.start("r1", "champion"), cell.start("r2", "candidate")

        def promoted(record: Record) -> None:
            record.release_id, record.candidate, record.identity = "r2", "stub-r2", "identity-r2"
            record.previous, record.champion = deployed("r1", old), deployed("r2", new)
            record.state = "promoted"

        generation = cell.write(promoted).generation
        for role in ("champion", "control", "candidate"):
            cell.router.set_endpoint(role, new.port, generation=generation)
        assert cell.served_by() == "r2"
        yield cell


@pytest.mark.alone
def test_users_are_back_on_previous_within_a_second_of_the_command_although_imports_are_blocked(
    cell: StubCell,
) -> None:
    """Wall time from the start of the interpreter; a busy machine gets three tries."""
    seconds = []
    for bad, good in (("r2", "r1"), ("r1", "r2"), ("r2", "r1")):
        seconds.append(seconds_until_served_by(cell, bad, good, to=good if seconds else None))
        if seconds[-1] < 1.0:
            break
    print("last request to the bad release:", ", ".join(f"{waited:.2f} s" for waited in seconds))
    assert min(seconds) < 1.0


def seconds_until_served_by(cell: StubCell, bad: str, good: str, to: str | None) -> float:
    """Seconds after the start of the command at which the bad release got its last request."""
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
        "from flows.rollback import rollback\n"
        f"done = rollback({GPU!r}, {FAMILY!r}, to={to!r}, reason='users see garbage')\n"
        "print(done.serves, done.notes)\n"
    )
    answers: list[tuple[float, str]] = []
    finished = threading.Event()

    def user() -> None:
        while not finished.wait(0.01):
            asked = time.monotonic()
            answers.append((asked, cell.served_by()))

    traffic = threading.Thread(target=user)
    traffic.start()
    time.sleep(0.1)
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=repo_dir(), capture_output=True, text=True)
    time.sleep(0.1)
    finished.set()
    traffic.join()
    assert (done.returncode, done.stdout) == (0, f"{good} []\n"), done.stderr
    assert {release for _, release in answers} == {bad, good}, "a request was lost"
    return max(asked for asked, release in answers if release == bad) - started


def test_after_a_rollback_the_record_and_the_lake_tell_of_it_and_the_bad_release_stays_warm(
    cell: StubCell,
) -> None:
    before = cell.store.load()
    done = rollback(GPU, FAMILY, reason="users see garbage")
    assert (done.release_id, done.serves, done.confirmed, done.notes) == ("r2", "r1", True, [])
    assert cell.served_by() == "r1"
    after = cell.store.load()
    assert after.champion is not None and after.previous is not None
    assert (after.champion.release_id, after.previous.release_id) == ("r1", "r2")
    assert (after.state, after.release_id, after.reason) == ("rolled_back", "r2", "users see garbage")
    assert after.generation > before.generation
    [attempt] = after.attempts
    assert (attempt.release_id, attempt.identity, attempt.state) == ("r2", "identity-r2", "rolled_back")
    bad = after.previous.instance
    assert bad is not None and is_alive(bad.pid, bad.started)
    [event] = pq.read_table(next(lake_dir().glob("events/release_id=r2/*.parquet")), partitioning=None).to_pylist()
    assert (event["kind"], event["message"]) == ("rolled_back", "users see garbage")


def test_a_running_canary_goes_to_zero_its_release_is_fenced_and_the_champion_stays(cell: StubCell) -> None:
    token = cell.expose(CANARY, lease_s=60, mirror=0.5)
    done = rollback(GPU, FAMILY, reason="errors on the candidate")
    assert (done.release_id, done.serves) == ("r9", "r2")
    seen = cell.router.observe()
    assert (seen.shares, seen.mirror, cell.served_by()) == (Shares(), 0.0, "r2")
    with pytest.raises(LeaseLostError):
        cell.store.update(lambda record: None, token=token)
    record = cell.store.load()
    assert (record.state, record.attempts[-1].identity) == ("rolled_back", "identity-r9")


def test_a_running_canary_and_its_champion_can_be_left_at_once(cell: StubCell) -> None:
    cell.expose(CANARY, lease_s=60)
    assert rollback(GPU, FAMILY, to="r1", reason="both are bad").serves == "r1"
    assert cell.served_by() == "r1" and not cell.router.observe().exposed()
    states = {attempt.release_id: attempt.state for attempt in cell.store.load().attempts}
    assert states == {"r9": "superseded", "r2": "rolled_back"}


def test_a_previous_that_is_not_warm_is_started_first(cell: StubCell, capsys: pytest.CaptureFixture[str]) -> None:
    stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)
    done = rollback(GPU, FAMILY, reason="cold")
    assert (done.serves, cell.served_by()) == ("r1", "r1")
    assert "champion-r1 is not warm: starting it" in capsys.readouterr().err


def test_a_previous_that_hangs_is_not_warm_and_is_started_anew(
    cell: StubCell, capsys: pytest.CaptureFixture[str]
) -> None:
    hung = cell.pids()["champion-r1"]
    os.kill(hung, signal.SIGSTOP)
    done = rollback(GPU, FAMILY, reason="both are ill")
    assert (done.serves, cell.served_by()) == ("r1", "r1")
    assert "champion-r1 is not warm: starting it" in capsys.readouterr().err
    assert cell.pids()["champion-r1"] != hung and start_ticks(hung) is None


def test_a_previous_that_is_merely_slow_to_answer_is_kept(cell: StubCell) -> None:
    """Continued between the first question and the second."""
    slow = cell.pids()["champion-r1"]
    os.kill(slow, signal.SIGSTOP)
    threading.Timer(0.8, os.kill, (slow, signal.SIGCONT)).start()
    assert rollback(GPU, FAMILY, reason="a busy machine").serves == "r1"
    assert cell.pids()["champion-r1"] == slow and cell.served_by() == "r1"


def test_a_previous_that_the_supervisor_starts_in_the_same_moment_is_taken(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)
    others: list[Instance] = []

    def raced(*args: Any) -> Instance:
        others.append(start_instance(*args))
        return start_instance(*args)

    monkeypatch.setattr("flows.rollback.start_instance", raced)
    assert rollback(GPU, FAMILY, reason="both at once").serves == "r1"
    assert cell.served_by() == "r1" and [other.pid for other in others] == [cell.pids()["champion-r1"]]


def test_a_previous_that_still_loads_is_waited_for(cell: StubCell) -> None:
    stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)
    slow = [*stub_command("r1", "champion-r1"), "--ready-after", "4"]
    loading = start_instance(cell.cell, "champion-r1", "champion", slow, free_port())
    assert rollback(GPU, FAMILY, reason="the supervisor is at it").serves == "r1"
    assert cell.pids()["champion-r1"] == loading.pid and cell.served_by() == "r1"


def test_a_start_that_is_stopped_from_outside_is_tried_again(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)
    started: list[Instance] = []

    def stopped_at_first(*args: Any) -> Instance:
        started.append(start_instance(*args))
        if len(started) == 1:
            stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)
        return started[-1]

    monkeypatch.setattr("flows.rollback.start_instance", stopped_at_first)
    assert rollback(GPU, FAMILY, reason="unlucky").serves == "r1"
    assert len(started) == 2 and cell.served_by() == "r1"


def test_a_rollback_that_down_overtakes_leaves_nothing_running(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_processes(cell.cell, [p for p in list_processes(cell.cell) if p.name == "champion-r1"], 2)

    def stopped(*args: Any) -> Instance:
        cell.router.stop()
        return start_instance(*args)

    monkeypatch.setattr("flows.rollback.start_instance", stopped)
    assert not rollback(GPU, FAMILY, reason="night").confirmed
    assert "champion-r1" not in cell.pids()


def test_a_reason_in_another_encoding_does_not_stop_a_rollback(cell: StubCell) -> None:
    command = [sys.executable, "-m", "flows", "rollback", "--gpu", GPU, "--family", FAMILY, "--reason", b"Gr\xf6\xdfe"]
    done = subprocess.run(command, cwd=repo_dir(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert cell.served_by() == "r1" and cell.store.load().reason == "Gr\ufffd\ufffde"


def test_broken_files_do_not_stop_a_rollback(cell: StubCell) -> None:
    """The process file of the Envoy that serves, and its route file."""
    (cell.cell / "processes" / "envoy.json").write_bytes(b"\xff\xfe")
    routes = cell.cell / "rds.json"
    routes.write_text(json.dumps(json.loads(routes.read_text()) | {"version_info": 5}))
    assert rollback(GPU, FAMILY, reason="a bad disk").confirmed
    assert cell.served_by() == "r1"


def test_a_rollback_can_itself_be_rolled_back(cell: StubCell) -> None:
    rollback(GPU, FAMILY, reason="first")
    forward = rollback(GPU, FAMILY, to="r2", reason="it was not r2")
    assert (forward.release_id, forward.serves, cell.served_by()) == ("r1", "r2", "r2")
    record = cell.store.load()
    assert (record.state, record.release_id) == ("promoted", "r2"), "what serves is good, and the record says so"
    # It was r2 after all: the plain command takes it back, as it did the first time.
    assert rollback(GPU, FAMILY, reason="second").serves == "r1"
    with pytest.raises(UserError, match=r"^r2 is already rolled back"):
        rollback(GPU, FAMILY, reason="third")


def test_a_second_rollback_does_not_give_users_back_to_what_was_rolled_back(cell: StubCell) -> None:
    rollback(GPU, FAMILY, reason="users see garbage")
    before = cell.store.path.read_text()
    with pytest.raises(UserError, match=r"^r2 is already rolled back and r1 serves .*`--to r2` to go forward again$"):
        rollback(GPU, FAMILY, reason="on-call runs it twice")
    assert cell.served_by() == "r1" and cell.store.path.read_text() == before
    # A release under way is another matter: it is what can still be ended.
    cell.expose(CANARY, lease_s=60)
    assert rollback(GPU, FAMILY, reason="the next one is bad too").release_id == "r9"
    cell.store.acquire("r10")
    assert rollback(GPU, FAMILY, reason="stop it").serves == "r1"
    assert not cell.store.load().lease_live() and cell.served_by() == "r1"


def test_a_rollback_that_was_not_confirmed_is_finished_by_the_next_and_not_undone(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def unconfirmed(router: EnvoyRouter, generation: int) -> None:
            raise RouterError("Envoy did not confirm")

        broken.setattr(EnvoyRouter, "revert", unconfirmed)
        with pytest.raises(RouterError):
            rollback(GPU, FAMILY, reason="users see garbage")
    assert cell.store.load().state == "rolling_back"
    done = rollback(GPU, FAMILY, reason="again, as it said")
    assert (done.release_id, done.serves, cell.served_by()) == ("r2", "r1", "r1")
    assert cell.store.load().state == "rolled_back"


def test_after_the_next_promotion_what_was_once_rolled_back_is_an_ordinary_previous(cell: StubCell) -> None:
    rollback(GPU, FAMILY, reason="first")
    rollback(GPU, FAMILY, to="r2", reason="it was not r2")
    third = cell.start("r3", "candidate")

    def promote(record: Record) -> None:
        record.previous, record.champion = record.champion, deployed("r3", third)
        record.champion.promoted_at = time.time()
        record.release_id, record.state = "r3", "promoted"

    cell.router.set_endpoint("champion", third.port, generation=cell.write(promote).generation)
    assert rollback(GPU, FAMILY, reason="r3 is bad").serves == "r2"
    assert cell.served_by() == "r2"


def test_without_a_router_the_record_decides_what_is_served_next(cell: StubCell) -> None:
    cell.router.stop()
    done = rollback(GPU, FAMILY, reason="found at night")
    assert (done.serves, done.confirmed) == ("r1", False)
    assert any("no router runs" in note for note in done.notes)


def test_a_lake_that_cannot_be_written_is_said_and_changes_nothing(
    cell: StubCell, capsys: pytest.CaptureFixture[str]
) -> None:
    lake_dir().write_text("a file where the lake should be")
    assert rollback(GPU, FAMILY, reason="full disk").serves == "r1"
    assert "event rolled_back was not written" in capsys.readouterr().err
    assert cell.store.load().state == "rolled_back"


def test_a_record_that_somebody_keeps_locked_does_not_keep_users_waiting(
    cell: StubCell,
) -> None:
    taken, free = threading.Event(), threading.Event()

    def stopped_process() -> None:
        with locked(cell.store.path.with_suffix(".lock")):
            taken.set()
            free.wait(5)

    holder = threading.Thread(target=stopped_process)
    holder.start()
    taken.wait()
    threading.Timer(1.0, free.set).start()
    done = rollback(GPU, FAMILY, reason="stuck writer")
    holder.join()
    assert done.share_zero_s < 1.0 and cell.served_by() == "r1"
    record = cell.store.load()
    assert record.state == "rolled_back" and record.champion is not None
    assert record.champion.release_id == "r1"


def test_a_promotion_in_the_same_moment_is_seen(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is made on a record that is promoted over before the lock is taken."""
    load, promoted = RecordStore.load, deployed("r3", cell.start("r3", "candidate"))

    def racing(store: RecordStore) -> Record:
        found = load(store)
        monkeypatch.setattr(RecordStore, "load", load)

        def promote(record: Record) -> None:
            record.previous, record.champion, record.release_id = record.champion, promoted, "r3"

        RecordStore(store.path).update(promote)
        return found

    monkeypatch.setattr(RecordStore, "load", racing)
    assert rollback(GPU, FAMILY, reason="race").serves == "r2"
    assert cell.served_by() == "r2"


def test_a_corrupt_record_is_named_after_traffic_is_safe(cell: StubCell) -> None:
    cell.router.set_shares(60, 20, 20, cell.store.load().generation)
    cell.store.path.write_text(json.dumps({"gpu": "cpu"}))
    with pytest.raises(UserError, match="not a release record"):
        rollback(GPU, FAMILY, reason="anything")
    assert not cell.router.observe().exposed()


def test_what_cannot_be_rolled_back_is_one_line_with_a_remedy(cell: StubCell) -> None:
    with pytest.raises(UserError, match=r"no release record for cpu smolm: known cells are cpu stub"):
        rollback("cpu", "smolm", reason="typo")
    with pytest.raises(UserError, match=r"cannot roll back to r7: .*r1"):
        rollback(GPU, FAMILY, to="r7", reason="typo")
    with pytest.raises(UserError, match="r2 gets all traffic already"):
        rollback(GPU, FAMILY, to="r2", reason="nothing to do")

    def forget(record: Record) -> None:
        record.previous = None

    cell.write(forget)
    with pytest.raises(UserError, match="no previous release to go back to: release another candidate"):
        rollback(GPU, FAMILY, reason="first release")
    assert cell.served_by() == "r2"
