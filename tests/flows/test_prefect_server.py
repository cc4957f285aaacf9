"""A Prefect server is ended when its command is gone, and never before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.paths import state_dir
from flows import prefect_server
from tasks.processes import is_alive, start_ticks

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    child = subprocess.Popen(SLEEP)
    yield child
    child.kill()
    child.wait()


def note(server: subprocess.Popen[bytes], owner: int, owner_started: int) -> Path:
    file = state_dir() / "prefect" / "servers" / f"{server.pid}.json"
    file.parent.mkdir(parents=True)
    ids = {"pid": server.pid, "started": start_ticks(server.pid), "owner": owner, "owner_started": owner_started}
    file.write_text(json.dumps(ids))
    return file


def test_the_server_of_a_living_command_is_left_alone(server: subprocess.Popen[bytes]) -> None:
    file = note(server, os.getpid(), start_ticks(os.getpid()) or 0)
    assert prefect_server.stop_orphans() == []
    assert server.poll() is None
    assert file.exists()


def test_the_server_of_a_killed_command_is_ended(server: subprocess.Popen[bytes]) -> None:
    owner = subprocess.Popen(SLEEP)
    ticks = start_ticks(owner.pid) or 0
    file = note(server, owner.pid, ticks)
    owner.kill()
    owner.wait()
    assert prefect_server.stop_orphans() == [server.pid]
    server.wait(10)
    assert not file.exists()


def test_a_reused_pid_is_not_taken_for_the_server(server: subprocess.Popen[bytes]) -> None:
    file = note(server, 2**22 + 1, 0)
    file.write_text(file.read_text().replace(f'"started": {start_ticks(server.pid)}', '"started": 1'))
    assert prefect_server.stop_orphans() == []
    assert is_alive(server.pid, start_ticks(server.pid) or 0)


def test_a_broken_note_is_removed(server: subprocess.Popen[bytes]) -> None:
    file = note(server, 1, 1)
    file.write_text("{")
    assert prefect_server.stop_orphans() == []
    assert not file.exists()
