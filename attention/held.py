"""A folder for one process at a time: two that wrote into one would each count what the other wrote."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attention.errors import UserError

LOCK = ".lock"


@contextmanager
def held(path: Path, flag: str = "--out") -> Iterator[None]:
    """The folder, made where there is none, for this process alone; the kernel frees it with the process.

    `flag` is how the user named the folder. Raises UserError where another process holds it.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{flag} {path}: another process writes there; wait for it, or use a new folder") from error
        yield
