"""Folders with users' texts are made for this user alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention.private import private_folder
from attention.schemas import write_rows
from tasks.files import write_atomically


def modes(*folders: Path) -> list[int]:
    return [stat.S_IMODE(folder.stat().st_mode) for folder in folders]


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_is_missing_is_made_private_and_what_is_there_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path / "home" / "lake" / "requests")
    assert modes(tmp_path / "home", tmp_path / "home" / "lake", tmp_path / "home" / "lake" / "requests") == [0o700] * 3
    private_folder(tmp_path)
    assert modes(tmp_path) == [0o755]


def test_lake_and_state_are_made_private(tmp_path: Path) -> None:
    write_rows(tmp_path / "lake", "requests", [{"request_id": "q"}], release_id="r")
    write_atomically(tmp_path / "state" / "cpu--m" / "work" / "r" / "job.json", "{}")
    assert modes(tmp_path / "lake", tmp_path / "state") == [0o700] * 2
