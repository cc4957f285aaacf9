"""Workers: what kills one, or hangs it, is a row with an error, and the others go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Event

import pytest

from attention.isolate import NOT_RUN, Outcome, in_workers

WORKER = """
import os, signal, sys, time
from attention.isolate import worker
with worker() as (task, channel):
    print("a library's banner")
    if task.get("stillborn"):
        sys.exit("no such module")
    for name in task["names"]:
        channel.at(name)
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "compile":
            import subprocess
            subprocess.run(["sleep", "30"])  # holds our stdout
        if name == "hang":
            time.sleep(60)
        if not task.get("together"):
            channel.done(name, pid=os.getpid())
    if task.get("together"):
        for name in task["names"]:
            channel.done(name, pid=os.getpid())
"""


def outcomes(names: list[str], timeout_s: float = 30, deadline: float | None = None, **task: object) -> list[Outcome]:
    return in_workers([sys.executable, "-c", WORKER], dict(task), names, timeout_s=timeout_s, deadline=deadline)


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_a_crash_and_a_hang_cost_themselves_alone() -> None:
    found = outcomes(["a", "crash", "b", "hang", "c"], timeout_s=5)
    assert [one.name for one in found] == ["a", "crash", "b", "hang", "c"]
    a, crash, b, hang, c = found
    assert crash.error == "the worker died (signal 11): a library's banner"
    assert hang.error == "no answer within 5 s"
    assert a.error is b.error is c.error is None
    assert len({one.said["pid"] for one in (a, b, c)}) == 3, "a new worker goes on after each"


def test_a_worker_serves_many_names_until_it_dies() -> None:
    assert len({one.said["pid"] for one in outcomes(["a", "b", "c"])}) == 1


def test_work_on_all_names_together_starts_again_without_the_one_that_died() -> None:
    a, crash, b = outcomes(["a", "crash", "b"], together=True)
    assert crash.error is not None
    assert a.said == b.said, "both come from the worker that had them alone"


def test_a_worker_that_dies_before_it_begins_is_not_tried_again_for_every_name() -> None:
    started = time.monotonic()
    found = outcomes(["a", "b", "c"] * 5, stillborn=True)
    assert {one.error for one in found} == {"the worker died (exit 1): no such module"}
    assert time.monotonic() - started < 10


def test_what_is_left_at_the_deadline_was_not_run() -> None:
    a, hang, b = outcomes(["a", "hang", "b"], deadline=time.monotonic() + 3)
    assert a.error is None
    assert hang.error == b.error == NOT_RUN


def test_once_it_is_stopped_the_worker_is_killed_and_the_rest_was_not_run() -> None:
    stopped, started = Event(), time.monotonic()
    found = in_workers(
        [sys.executable, "-c", WORKER],
        {},
        ["a", "hang", "b"],
        timeout_s=60,
        stopped=stopped,
        heard=lambda one: stopped.set(),
    )
    assert time.monotonic() - started < 20
    assert [one.error for one in found] == [None, NOT_RUN, NOT_RUN]


def test_a_compiler_that_a_worker_started_is_killed_with_it_and_holds_nobody_up() -> None:
    started = time.monotonic()
    heard: list[Outcome] = []
    found = in_workers(
        [sys.executable, "-c", WORKER], {}, ["a", "compile"], timeout_s=30, deadline=started + 2, heard=heard.append
    )
    assert time.monotonic() - started < 8
    assert [one.error for one in found] == [None, NOT_RUN]
    assert heard == found


def test_a_worker_that_does_not_read_its_task_holds_nobody_up() -> None:
    started = time.monotonic()
    sleeper = [sys.executable, "-c", "import time; time.sleep(30)"]
    (one,) = in_workers(sleeper, {"long": "x" * 1_000_000}, ["a"], timeout_s=30, deadline=started + 1)
    assert one.error == NOT_RUN
    assert time.monotonic() - started < 8
