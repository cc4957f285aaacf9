"""The watchdog: traffic of a release that died goes back to the champion, whatever else is broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.paths import lake_dir, repo_dir
from flows.watch import _Watchdog, watch
from tasks.files import locked
from tasks.processes import free_port
from tasks.record import LEASE_S, LeaseLostError, Record, Shares
from tasks.router import StaleGenerationError
from tests.stub_cell import FAMILY, GPU, StubCell, deployed, wait_until
from tests.stub_instance import StubInstance

CANARY = Shares(champion=60, control=20, candidate=20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubCell]:
    """Envoy with a champion and a candidate; no supervisor, so that the watchdog is alone."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path_factory.mktemp("home")))
        cell = StubCell.here()
        champion, candidate = (stack.enter_context(StubInstance(name)) for name in ("champion", "candidate"))
        cell.router.start(free_port())
        stack.callback(cell.router.stop)
        for role, stub in (("champion", champion), ("control", champion), ("candidate", candidate)):
            cell.router.set_endpoint(role, stub.port, generation=0)  # type: ignore[arg-type]
        yield cell


@pytest.fixture
def cell(running: StubCell) -> StubCell:
    def reset(record: Record) -> None:
        record.champion, record.lease, record.state = deployed("r1"), None, "baselined"
        record.shares, record.mirror = Shares(), 0.0

    running.router.revert(running.write(reset).generation)
    return running


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("flows.watch.POLL_S", 0.05)
    stop = threading.Event()
    watchdog = threading.Thread(target=lambda: watch(GPU, FAMILY, stop=stop))
    watchdog.start()
    try:
        yield
    finally:
        stop.set()
        watchdog.join()


def is_safe(cell: StubCell) -> bool:
    return not cell.router.observe().exposed()


def events() -> list[str]:
    files = sorted(lake_dir().glob("events/*/*.parquet"), key=lambda path: path.stat().st_mtime)
    return [row["kind"] for path in files for row in pq.read_table(path, partitioning=None).to_pylist()]


@pytest.mark.alone
def test_a_release_that_is_killed_loses_its_traffic_within_two_seconds(cell: StubCell) -> None:
    release = (
        "import time\n"
        "from tests.stub_cell import StubCell\n"
        "from tasks.record import Shares\n"
        "cell = StubCell.here()\n"
        "with cell.store.hold('r9') as lease:\n"
        "    def change(record):\n"
        "        record.release_id, record.state = 'r9', 'canary'\n"
        "        record.shares, record.mirror = Shares(champion=60, control=20, candidate=20), 0.5\n"
        "    generation = cell.store.update(change, token=lease.token).generation\n"
        "    cell.router.set_shares(60, 20, 20, generation)\n"
        "    cell.router.set_mirror(0.5, generation=generation)\n"
        "    print('exposed', flush=True)\n"
        "    time.sleep(60)\n"
    )
    watchdog = subprocess.Popen([sys.executable, "-m", "flows.watch", GPU, FAMILY], cwd=repo_dir())
    holder = subprocess.Popen([sys.executable, "-c", release], cwd=repo_dir(), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "exposed\n"
        time.sleep(1.2)  # a renewal, which the watchdog respects
        assert not is_safe(cell)
        os.kill(holder.pid, signal.SIGKILL)
        waited = wait_until(lambda: is_safe(cell), 2)
        print(f"100/0/0 after {waited:.2f} s")
        wait_until(lambda: cell.store.load().state == "baselined")
        record = cell.store.load()
        assert (record.shares, record.mirror, record.lease) == (Shares(), 0.0, None)
        wait_until(lambda: events() == ["lease_expired"])
    finally:
        holder.kill()
        watchdog.terminate()
        holder.communicate()
        watchdog.wait()


def test_a_living_lease_keeps_its_traffic(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    cell.expose(CANARY, lease_s=60)
    with watching(monkeypatch):
        time.sleep(0.4)
    assert cell.router.observe().shares == cell.store.load().shares == CANARY


def test_a_release_that_wakes_up_late_can_neither_write_nor_move_traffic(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = cell.expose(CANARY)
    generation = cell.store.load().generation
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell))
    with pytest.raises(LeaseLostError):
        cell.store.update(lambda record: None, token=token)
    with pytest.raises(StaleGenerationError):
        cell.router.set_shares(60, 20, 20, generation)
    # The hand-over needs no share: it puts the candidate itself behind `champion`.
    champion = cell.router.told_endpoint("champion")
    with pytest.raises(StaleGenerationError):
        cell.router.set_endpoint("champion", cell.router.told_endpoint("candidate"), generation=generation)
    assert is_safe(cell) and cell.router.told_endpoint("champion") == champion


def test_a_release_that_was_stopped_for_long_moves_nothing_after_it_is_continued(cell: StubCell) -> None:
    """SIGSTOP in the canary until its lease ran out, SIGCONT: each way to traffic is closed before it notices."""
    release = (
        "import time\n"
        "from tests.stub_cell import StubCell\n"
        "from tasks.record import LeaseLostError, Shares\n"
        "from tasks.router import StaleGenerationError\n"
        "cell = StubCell.here()\n"
        "def refused(order, *args, **named):\n"
        "    try:\n"
        "        order(*args, **named)\n"
        "        return 'obeyed'\n"
        "    except (LeaseLostError, StaleGenerationError) as error:\n"
        "        return type(error).__name__\n"
        "def expose(record):\n"
        "    record.release_id, record.state = 'r9', 'canary'\n"
        "    record.shares = Shares(champion=60, control=20, candidate=20)\n"
        "with cell.store.hold('r9') as lease:\n"
        "    held = cell.store.update(expose, token=lease.token).generation\n"
        "    cell.router.set_shares(60, 20, 20, held)\n"
        "    candidate = cell.router.told_endpoint('candidate')\n"
        "    print('exposed', flush=True)\n"
        "    input()\n"
        "    print(refused(cell.router.set_shares, 0, 0, 100, held))\n"
        "    print(refused(cell.router.set_endpoint, 'champion', candidate, generation=held))\n"
        "    print(refused(cell.store.update, expose, token=lease.token))\n"
        "    print(lease.lost.wait(5))\n"
    )
    watchdog = subprocess.Popen([sys.executable, "-m", "flows.watch", GPU, FAMILY], cwd=repo_dir())
    holder = subprocess.Popen(
        [sys.executable, "-c", release], cwd=repo_dir(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "exposed\n"
        os.kill(holder.pid, signal.SIGSTOP)
        wait_until(lambda: is_safe(cell), LEASE_S + 5)
        wait_until(lambda: cell.store.load().lease is None)
        holder.stdin.write("\n")
        holder.stdin.flush()
        os.kill(holder.pid, signal.SIGCONT)
        said, _ = holder.communicate(timeout=30)
        assert said.split() == ["StaleGenerationError", "StaleGenerationError", "LeaseLostError", "True"]
        record = cell.store.load()
        assert is_safe(cell) and (record.state, record.shares, record.lease) == ("baselined", Shares(), None)
    finally:
        holder.kill()
        watchdog.terminate()
        holder.wait()
        watchdog.wait()


def test_traffic_that_no_record_knows_of_is_taken_back(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    cell.router.set_shares(60, 20, 20, cell.store.load().generation)
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell))


def test_a_route_file_of_another_shape_does_not_end_the_watchdog(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.router.set_shares(60, 20, 20, cell.store.load().generation)
    content = json.loads((cell.cell / "rds.json").read_text())
    (cell.cell / "rds.json").write_text(json.dumps(content | {"version_info": 5}))
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell))


def test_a_defect_in_one_look_does_not_end_the_watchdog(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    look, looks = _Watchdog.look, iter([True])

    def breaks_once(watchdog: _Watchdog) -> None:
        if next(looks, False):
            raise AttributeError("a defect")
        look(watchdog)

    monkeypatch.setattr(_Watchdog, "look", breaks_once)
    cell.router.set_shares(60, 20, 20, cell.store.load().generation)
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell))


def test_a_mirror_alone_is_taken_back_too(cell: StubCell, monkeypatch: pytest.MonkeyPatch) -> None:
    cell.expose(Shares(), state="shadow", mirror=1.0)
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell) and cell.store.load().state == "baselined")


def test_a_record_that_cannot_be_read_means_100_0_0_and_one_event(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.expose(CANARY, lease_s=60)
    before, good = len(events()), cell.store.path.read_text()
    cell.store.path.write_text("{")
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell))
        time.sleep(0.3)
    cell.store.path.write_text(good)
    assert events()[before:] == ["record_unreadable"]


def test_a_lake_that_cannot_be_written_changes_nothing(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "lake"
    blocked.write_text("a file where the lake should be")
    monkeypatch.setattr("tasks.events.lake_dir", lambda: blocked)
    cell.expose(CANARY)
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell) and cell.store.load().state == "baselined")
        wait_until(lambda: "event lease_expired was not written" in capsys.readouterr().out)


def test_a_record_that_somebody_keeps_locked_changes_nothing_for_users(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.expose(CANARY)
    with locked(cell.store.path.with_suffix(".lock")), watching(monkeypatch):
        assert wait_until(lambda: is_safe(cell)) < 2
    with watching(monkeypatch):
        wait_until(lambda: cell.store.load().state == "baselined")


def test_a_held_release_with_traffic_resumes_at_its_shadow_stage(
    cell: StubCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell.expose(CANARY, state="held")
    with watching(monkeypatch):
        wait_until(lambda: is_safe(cell) and cell.store.load().state == "baselined")
