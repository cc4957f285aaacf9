"""Candidate and control of a release that may have been overruled."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.candidate import load_candidate
from data.paths import cell_dir
from tasks import instances
from tasks.context import Context
from tasks.processes import list_processes
from tasks.record import LeaseLostError, Record, RecordStore
from tasks.router import EnvoyRouter
from tests.commands import candidate_file


def test_a_release_that_lost_its_lease_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` has stopped everything by then, and would not come back for what is started after it."""
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path / "home"))
    loaded = load_candidate(candidate_file(tmp_path))
    cell = cell_dir("cpu", "smollm2")
    store = RecordStore(cell / "record.json")
    with store.hold("flash-1") as lease:
        context = Context("flash-1", loaded.cells[0], loaded, loaded, lease, lambda line: None)
        store.update(Record.fence, over_lease=True)
        with pytest.raises(LeaseLostError):
            instances.start(context, EnvoyRouter(cell))
    assert list_processes(cell) == []
