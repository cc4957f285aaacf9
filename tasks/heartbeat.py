"""The watchdog's sign of life: a file that it touches, so that one that hangs is told from one that waits."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def beat(cell: Path) -> None:
    """Touch the file. A disk that refuses does not end the watchdog."""
    with suppress(OSError):
        _file(cell).touch()


def last_beat(cell: Path) -> int | None:
    """When it was touched last, only to be compared with the next answer; None: never."""
    try:
        return _file(cell).stat().st_mtime_ns
    except OSError:
        return None


def _file(cell: Path) -> Path:
    return cell / "watchdog.beat"
