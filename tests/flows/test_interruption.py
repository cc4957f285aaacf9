"""Ctrl-C and kill -9 of a real release: traffic back at once, nothing left behind, and it goes on.

The tests go in this order through one release of one home, which is interrupted in replay, killed in its
canary, interrupted there, and in the end promoted: an offline stage that was passed is never measured again.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.lifecycle import OFFLINE
from tasks.record import LEASE_S, Record, Shares
from tasks.router import RouterError
from tests.commands import Command, Home, candidate_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "home").mkdir()
    home = Home(folder / "home", folder / "prefect")
    yield home
    home.run("down")
    assert home.processes() == []


@pytest.fixture(scope="module")
def flash(home: Home) -> Path:
    return candidate_file(home.path.parent / "candidates")


def finished(record: Record) -> dict[str, float]:
    """When each stage that the record knows was finished."""
    return {stage.stage: stage.finished_at for stage in record.stages}


def replaying(home: Home) -> bool:
    """The replay's own process measures."""
    return any("-m attention replay" in process for process in home.processes())


def candidate_serves(home: Home) -> bool:
    """The record says that the canary runs, and Envoy gives the candidate traffic."""
    if home.record().state != "canary":
        return False
    try:
        seen = home.router.observe()
    except RouterError:
        return False
    return seen.shares.candidate > 0 and seen.counts["candidate"].total > 0


def left_nothing(home: Home, command: Command) -> Record:
    """It ended by Ctrl-C with share 0, and what it had started is gone."""
    assert command.child.wait(90) == 130, command.said()
    assert "Traceback" not in command.said()
    assert home.processes() == []
    record = home.record()
    assert (record.shares, record.mirror, record.lease) == (Shares(), 0.0, None)
    assert record.candidate_instance is record.control_instance is None
    return record


def test_sigterm_while_it_starts_leaves_nothing(home: Home, flash: Path) -> None:
    command = home.start("release", flash, "--json")
    command.wait_for(lambda: any("attention serve" in process for process in home.processes()), 60)
    command.child.terminate()
    assert command.child.wait(60) == 130, command.said()
    assert "Traceback" not in command.said()
    assert home.processes() == []


@pytest.mark.parametrize("group", [False, True], ids=["the leader alone", "the whole group"])
def test_ctrl_c_in_replay_leaves_nothing(home: Home, flash: Path, group: bool) -> None:
    before = finished(home.record())
    command = home.start("release", flash, "--json")
    command.wait_for(lambda: replaying(home), 240)
    command.interrupt(group=group)
    record = left_nothing(home, command)
    assert record.state == "probed"
    assert set(finished(record)) == {"fingerprint", "probe"}
    assert not before or finished(record) == before, "a resumed release measured again what it had"


def test_kill_9_in_the_canary_gives_users_back_within_the_lease_and_two_seconds(home: Home, flash: Path) -> None:
    before = finished(home.record())
    command = home.start("release", flash, "--json")
    command.wait_for(lambda: candidate_serves(home), 400)
    os.kill(command.child.pid, signal.SIGKILL)
    killed = time.monotonic()
    command.child.wait(10)
    while home.router.observe().exposed():
        assert time.monotonic() - killed < LEASE_S + 2, "the candidate still gets traffic"
        time.sleep(0.05)
    print(f"100/0/0 after {time.monotonic() - killed:.1f} s")
    assert home.router.observe().shares == Shares()
    record = home.record()
    assert (record.state, record.shares, record.lease) == ("baselined", Shares(), None)
    assert finished(record).items() >= before.items()
    assert set(OFFLINE) <= set(finished(record))


def test_ctrl_c_in_the_canary_goes_back_to_the_champion_and_stops_what_it_started(home: Home, flash: Path) -> None:
    """Envoy and the champion ran before this command, so they stay; what the killed one left is reaped."""
    before = finished(home.record())
    command = home.start("release", flash, "--json")
    command.wait_for(lambda: candidate_serves(home), 240)
    command.interrupt(group=True)
    assert command.child.wait(90) == 130, command.said()
    seen = home.router.observe()
    assert (seen.shares, seen.mirror) == (Shares(), 0.0)
    record = home.record()
    assert (record.state, record.lease, record.candidate_instance) == ("baselined", None, None)
    assert {stage: finished(record)[stage] for stage in OFFLINE} == {stage: before[stage] for stage in OFFLINE}
    roles = sorted(process.partition(" ")[2].split("--side ")[-1].split()[0] for process in serving(home))
    assert roles == ["champion"]


def serving(home: Home) -> list[str]:
    return [process for process in home.processes() if "attention serve" in process]


def test_the_same_command_goes_on_to_the_promotion(home: Home, flash: Path) -> None:
    before = home.record()
    done = home.run("release", flash, "--json", timeout_s=400)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["state"], said["release_id"]) == ("promoted", before.release_id)
    after = finished(home.record())
    assert {stage: after[stage] for stage in OFFLINE} == {stage: finished(before)[stage] for stage in OFFLINE}
    assert "(resumed)" in done.stderr


def test_a_candidate_that_dies_in_the_canary_is_rolled_back_at_once(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    home = Home(tmp_path / "home", tmp_path / "prefect")
    try:
        command = home.start("release", candidate_file(tmp_path / "candidates"), "--json")
        command.wait_for(lambda: candidate_serves(home), 400)
        instance = home.record().candidate_instance
        assert instance is not None
        os.kill(instance.pid, signal.SIGKILL)
        killed = time.monotonic()
        while home.router.observe().exposed():
            assert time.monotonic() - killed < 10, "the dead candidate still gets traffic"
            time.sleep(0.05)
        print(f"100/0/0 after {time.monotonic() - killed:.1f} s")
        assert command.child.wait(120) == 1, command.said()
        record = home.record()
        assert (record.state, record.attempts[-1].failed_gate) == ("rolled_back", "canary")
        assert "died" in record.reason
    finally:
        home.run("down")
    assert home.processes() == []
