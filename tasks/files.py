"""Files that several processes share: replaced whole, under a lock that cannot hang.

A reader sees the old file or the new one, never half of one: text is written beside the target,
synced, and renamed over it. Writers exclude each other with `locked`, which gives up after a time,
because a rollback may not wait for a process that was stopped while it held the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attention.private import private_folder


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: temporary file in the same folder, fsync, rename."""
    private_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as sink:
            sink.write(text)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Hold an exclusive flock on `path` (created if missing). Raises TimeoutError after `timeout_s`.

    The kernel drops the lock with the process, so a kill -9 leaves nothing to clean up.
    """
    private_folder(path.parent)
    deadline = time.monotonic() + timeout_s
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} has been locked for {timeout_s:g} s") from None
                time.sleep(0.005)
        yield
