"""The release record: who may write it, and what a writer that may not is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from attention.errors import UserError
from tasks.files import locked
from tasks.record import LEASE_S, LeaseLostError, Record, RecordStore, Shares


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "cpu--smollm2" / "record.json")


def set_reason(text: str) -> object:
    def change(record: Record) -> None:
        record.reason = text

    return change


def let_lease_run_out(store: RecordStore, pid: int | None = None) -> None:
    content = json.loads(store.path.read_text())
    content["lease"]["expires_at"] = time.time() - 1
    content["lease"]["pid"] = pid or content["lease"]["pid"]
    store.path.write_text(json.dumps(content))


def test_a_missing_record_is_an_empty_one_of_its_cell(store: RecordStore) -> None:
    record = store.load()
    assert (record.gpu, record.family, record.generation, record.shares) == ("cpu", "smollm2", 0, Shares())
    assert not store.path.exists()


def test_every_update_grows_the_generation_and_is_read_back(store: RecordStore) -> None:
    assert store.update(set_reason("a")).generation == 1  # type: ignore[arg-type]
    assert store.update(set_reason("b")).generation == 2  # type: ignore[arg-type]
    assert RecordStore(store.path).load().reason == "b"


def test_a_change_that_raises_leaves_the_file_as_it_was(store: RecordStore) -> None:
    store.update(set_reason("kept"))  # type: ignore[arg-type]
    text = store.path.read_text()

    def fails(record: Record) -> None:
        record.reason = "half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.update(fails)

    def breaks(record: Record) -> None:
        record.generation = "many"  # type: ignore[assignment]

    with pytest.raises((ValidationError, TypeError)):
        store.update(breaks)
    assert store.path.read_text() == text
    assert [path.name for path in store.path.parent.iterdir() if path.suffix == ".tmp"] == []


def test_shares_that_do_not_sum_to_100_cannot_be_written() -> None:
    with pytest.raises(ValidationError, match="sum to 100"):
        Shares(champion=90, control=5, candidate=10)
    with pytest.raises(ValidationError, match="non-negative"):
        Shares(champion=110, control=-10, candidate=0)


@pytest.mark.parametrize(
    "text", ["", "{", '{"gpu": "cpu"}', '{"gpu": "cpu", "family": "x", "shares": {"champion": 3}}']
)
def test_a_corrupt_record_is_one_line_that_names_the_file_and_the_remedy(store: RecordStore, text: str) -> None:
    store.path.parent.mkdir(parents=True)
    store.path.write_text(text)
    with pytest.raises(UserError) as caught:
        store.load()
    assert str(store.path) in str(caught.value) and "restore a good copy" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        store.update(set_reason("overwritten"))  # type: ignore[arg-type]
    assert store.path.read_text() == text


def test_a_record_that_went_back_to_an_older_generation_is_refused(store: RecordStore) -> None:
    store.update(set_reason("old"))  # type: ignore[arg-type]
    old = store.path.read_text()
    store.update(set_reason("new"))  # type: ignore[arg-type]
    store.path.write_text(old)
    with pytest.raises(UserError, match="went back from 2 to 1"):
        store.update(set_reason("newer"))  # type: ignore[arg-type]


def test_a_second_release_is_refused_with_pid_and_duration(store: RecordStore) -> None:
    store.acquire("first")
    with pytest.raises(UserError, match=rf"already running for cpu smollm2: first \(pid {os.getpid()}, since 0 s\)"):
        store.acquire("second")
    with pytest.raises(UserError, match="already running"):
        store.update(set_reason("from aside"))  # type: ignore[arg-type]


def test_of_releases_that_begin_in_the_same_moment_one_gets_the_record(store: RecordStore) -> None:
    said: list[str] = []
    together = threading.Barrier(4)

    def begin(name: str) -> None:
        together.wait()
        try:
            RecordStore(store.path).acquire(name)
            said.append(name)
        except UserError as error:
            said.append(str(error))

    releases = [threading.Thread(target=begin, args=(f"release-{number}",)) for number in range(4)]
    for release in releases:
        release.start()
    for release in releases:
        release.join()
    [winner] = [line for line in said if line.startswith("release-")]
    refused = [line for line in said if line != winner]
    assert all("already running for cpu smollm2: " + winner in line and "\n" not in line for line in refused)
    record = store.load()
    assert record.lease is not None and (record.lease.holder, record.generation) == (winner, 1)


def test_a_lease_that_ran_out_is_taken_over_and_its_old_holder_is_stopped(store: RecordStore) -> None:
    old = store.acquire("first")
    let_lease_run_out(store)
    new = store.acquire("second")
    with pytest.raises(LeaseLostError, match="held by second"):
        store.update(set_reason("late"), token=old)  # type: ignore[arg-type]
    with pytest.raises(LeaseLostError):
        store.renew(old)
    store.release(old)
    assert store.update(set_reason("mine"), token=new).lease is not None  # type: ignore[arg-type]


def test_the_lease_of_a_dead_holder_is_waited_out(store: RecordStore) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    store.acquire("dead")
    content = json.loads(store.path.read_text())
    content["lease"] |= {"pid": dead.pid, "expires_at": time.time() + 0.3}
    store.path.write_text(json.dumps(content))
    started = time.monotonic()
    store.acquire("next")
    assert 0.2 < time.monotonic() - started < 1.0


def test_the_lease_of_a_dead_holder_is_void_whatever_the_clock_says(store: RecordStore) -> None:
    store.acquire("dead")
    assert store.load().lease_live()
    content = json.loads(store.path.read_text())
    content["lease"]["started"] -= 1  # the pid was given to another process
    store.path.write_text(json.dumps(content))
    assert not store.load().lease_live()


def test_a_clock_set_back_does_not_prolong_the_lease_of_a_holder_that_hangs(store: RecordStore) -> None:
    token = store.acquire("hangs")
    content = json.loads(store.path.read_text())
    content["lease"] |= {"acquired_at": time.time() + 3600, "expires_at": time.time() + 3600 + LEASE_S}
    store.path.write_text(json.dumps(content))
    assert not store.load().lease_live()
    store.renew(token)  # it did not hang, and nobody minded
    assert store.load().lease_live()


def test_a_late_renewal_is_fine_as_long_as_nobody_minded(store: RecordStore) -> None:
    token = store.acquire("slow")
    let_lease_run_out(store)
    generation = store.load().generation
    store.renew(token)
    record = store.load()
    assert record.lease_live() and record.generation == generation


def test_a_held_lease_is_renewed_and_given_back(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.record.RENEW_S", 0.05)
    with store.hold("release") as lease:
        first = store.load().lease
        time.sleep(0.3)
        second = store.load().lease
        assert first and second and second.expires_at > first.expires_at
        assert second.expires_at - time.time() > LEASE_S - 1
        lease.check()
    assert store.load().lease is None


def test_a_holder_learns_that_a_rollback_ended_its_lease(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.record.RENEW_S", 0.05)
    with store.hold("release") as lease:

        def fence(record: Record) -> None:
            record.lease = None

        store.update(fence, over_lease=True)
        assert lease.lost.wait(2.0)
        with pytest.raises(LeaseLostError):
            lease.check()
        with pytest.raises(LeaseLostError):
            store.update(set_reason("late"), token=lease.token)  # type: ignore[arg-type]


def test_many_writers_lose_no_update(store: RecordStore) -> None:
    def add(record: Record) -> None:
        record.tags.append("x")

    writers = [
        threading.Thread(target=lambda: [RecordStore(store.path).update(add) for _ in range(10)]) for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (len(store.load().tags), store.load().generation) == (40, 40)


def test_a_lock_that_stays_taken_is_given_up_in_time(store: RecordStore) -> None:
    with locked(store.path.with_suffix(".lock")), pytest.raises(TimeoutError, match="locked"):
        store.update(set_reason("never"), timeout_s=0.1)  # type: ignore[arg-type]
