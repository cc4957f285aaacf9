"""Bring the champion up while Prefect starts: both take seconds, and neither needs the other.

The release itself calls `up` again, which then finds everything running. What this command started, it
stops again when it is interrupted; what ran before is left as it was.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from attention.errors import UserError
from data.candidate import Loaded
from data.paths import cell_dir, repo_dir
from flows.down import down
from tasks.record import RecordStore
from tasks.router import EnvoyRouter


@contextmanager
def serving(loaded: Loaded, champion: str | None) -> Iterator[None]:
    """Start `flows up` for the first cell in the background, unless it runs; undo that on Ctrl-C.

    Raises UserError at once while another release holds the cell.
    """
    cell = loaded.cells[0]
    folder = cell_dir(cell.gpu, cell.family)
    lease = RecordStore(folder / "record.json").load().lease
    if lease is not None and lease.live():
        raise UserError(
            f"a release is already running for {cell.gpu} {cell.family}: {lease.holder} (pid {lease.pid}):"
            f" wait for it or stop it"
        )
    if EnvoyRouter(folder).process() is not None:
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
