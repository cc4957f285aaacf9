"""Bring the champion up while Prefect starts: both take seconds, and neither needs the other.

Before that, what the release would run into anyway is said at once, while nothing is written yet.
The release itself calls `up` again, which then finds everything running. What this command started, it
stops again when it is interrupted; what ran before is left as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attention.errors import UserError, is_dir
from data.candidate import Loaded
from data.paths import cell_dir, lake_dir, repo_dir, state_dir
from flows.down import down
from tasks.lifecycle import champion_of
from tasks.processes import require_free_port
from tasks.record import RecordStore
from tasks.router import EnvoyRouter, default_port

LEAST_ROOM = 8 * 2**20  # bytes: Prefect's database and the first evidence


def check_set_up(loaded: Loaded, champion: str | None, *, with_traffic: bool) -> None:
    """Raise UserError while another release holds the first cell, for a `--champion` that cannot be, and
    for traffic without a usable line, for a listener's port that is taken, and for a disk that takes nothing.
    """
    loaded.traffic()
    cell = loaded.cells[0]
    folder = cell_dir(cell.gpu, cell.family)
    record = RecordStore(folder / "record.json").load()
    if record.lease is not None and record.lease_live():
        raise UserError(
            f"a release is already running for {cell.gpu} {cell.family}: {record.lease.holder}"
            f" (pid {record.lease.pid}): wait for it or stop it"
        )
    if champion is not None or record.champion is not None:
        champion_of(record, cell, champion)
    if with_traffic and EnvoyRouter(folder).process() is None:
        require_free_port(default_port())
    for written in (state_dir(), lake_dir(), Path(os.environ.get("PREFECT_HOME") or state_dir())):
        _check_room(written)


def _check_room(folder: Path) -> None:
    """Raise UserError where nothing can be written: Prefect's server would only fail silently, and be waited for."""
    there = next(one for one in (folder, *folder.parents) if is_dir(one))
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(LEAST_ROOM))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise UserError(
            f"{there}: cannot be written: {error.strerror}; mend it, or set ATTENTION_RELEASE_HOME to another folder"
        ) from error


@contextmanager
def serving(loaded: Loaded, champion: str | None) -> Iterator[None]:
    """Start `flows up` for the first cell in the background, unless it runs; undo that on Ctrl-C."""
    cell = loaded.cells[0]
    if EnvoyRouter(cell_dir(cell.gpu, cell.family)).process() is not None:
        yield
        return
    command = [sys.executable, "-m", "flows", "up", "--gpu", cell.gpu, "--family", cell.family]
    command += ["--champion", champion] if champion else []
    child = subprocess.Popen(
        command,
        cwd=repo_dir(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the release runs into the same problem and tells of it
        start_new_session=True,
    )
    try:
        yield
    except KeyboardInterrupt:
        child.kill()
        child.wait()
        down(cell.gpu, cell.family)
        raise
    finally:
        child.poll()
