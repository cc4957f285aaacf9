"""Numbers that a person gives a flag: one out of range is one line, before any work."""

from __future__ import annotations

from pathlib import Path

from attention.errors import UserError, is_dir

_LONGEST_S = 1e9  # a lock of Python's waits for little more


def check_count(flag: str, value: int | None) -> None:
    """UserError for a number below 1; None is a flag that was not given."""
    if value is not None and value < 1:
        raise UserError(f"{flag} {value}: use a whole number, at least 1")


def check_seconds(flag: str, value: float | None, *, or_none: bool = False) -> None:
    """UserError for what is no time to wait: not above 0 (`or_none`: 0 too is one), infinite or no number."""
    if value is None or 0 < value <= _LONGEST_S or (or_none and value == 0):
        return
    raise UserError(f"{flag} {value:g}: use seconds, {'0 or more' if or_none else 'above 0'}, at most {_LONGEST_S:g}")


def check_out(path: Path | None) -> None:
    """UserError for a file that could not be written at the end of the work; None is stdout."""
    if path is not None and (is_dir(path) or not is_dir(path.parent)):
        raise UserError(f"--out {path}: {'a folder' if is_dir(path) else 'no folder ' + str(path.parent)}; name a file")
