"""A candidate that cannot answer is noticed although it writes no rows."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.candidate import load_candidate
from data.paths import cell_dir
from tasks import vigil
from tasks.context import Context
from tasks.processes import start_ticks
from tasks.record import Instance, Record, RecordStore
from tasks.traffic import Played, Reply
from tests.commands import candidate_file
from tests.tasks.test_lifecycle import make_context


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]) -> Iterator[Context]:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(vigil, "ask_health", lambda port: (200, {}))
    store = RecordStore(cell_dir("cpu", "smollm2") / "record.json")
    with store.hold("flash-1") as lease:
        found = make_context(load_candidate(candidate_file(tmp_path)), lease, "flash-1")

        def note(record: Record) -> None:
            record.candidate_instance = Instance(
                name="candidate-flash-1", port=1, pid=process.pid, started=start_ticks(process.pid) or 0, log=""
            )

        found.update(note)
        yield found


def replies(*roles_ok: tuple[str, bool]) -> Played:
    return Played([Reply("id", 200 if ok else 503, ok, role, "r", 0.1) for role, ok in roles_ok])


def test_a_candidate_that_answers_is_no_trouble(context: Context) -> None:
    assert vigil.Vigil(context).trouble(replies(*[("candidate", True)] * 60)) is None


def test_a_dead_process_is_noticed_at_once(context: Context, process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert vigil.Vigil(context).trouble() == "the process of candidate-flash-1 died"


def test_a_hanging_one_is_given_three_chances(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "ask_health", lambda port: None)
    watch = vigil.Vigil(context)
    assert [watch.trouble() for _ in range(3)] == [None, None, "candidate-flash-1 does not answer /health"]


def test_what_users_lose_counts_unless_another_role_lost_it(context: Context) -> None:
    watch = vigil.Vigil(context)
    assert watch.trouble(replies(*[("champion", False)] * 9)) is None
    assert watch.trouble(replies(*[("", False)] * 5)) == "users lost 5 of the last 5 requests"


def test_a_dead_control_ends_it_too(context: Context) -> None:
    """Users are on both arms."""

    def note(record: Record) -> None:
        record.control_instance = Instance(name="control-flash-1", port=1, pid=2**22 - 1, started=1, log="")

    context.update(note)
    assert vigil.Vigil(context).trouble() == "the process of control-flash-1 died"


class CountingRouter:
    """A router that has counted so many requests of the candidate, and errors among them."""

    def __init__(self) -> None:
        self.total = self.errors = 0

    def observe(self) -> Any:
        counts = SimpleNamespace(total=self.total, errors_5xx=self.errors)
        return SimpleNamespace(counts={"candidate": counts})


def test_errors_that_only_the_router_counts_end_a_hold(context: Context) -> None:
    router = CountingRouter()
    watch = vigil.Vigil(context, router)  # type: ignore[arg-type]
    router.total, router.errors = 1000, 900
    assert watch.trouble() is None, "what was before is not its doing"
    router.total, router.errors = 1040, 904
    assert watch.trouble() is None
    router.total, router.errors = 1041, 905
    assert watch.trouble() == "5 of the candidate's last 41 requests failed, by the router's count"


def test_few_errors_among_many_requests_are_for_the_gate(context: Context) -> None:
    router = CountingRouter()
    watch = vigil.Vigil(context, router)  # type: ignore[arg-type]
    for turn in range(30):
        router.total, router.errors = 60 * turn, turn
        assert watch.trouble() is None
