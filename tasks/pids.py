"""Process ids that are never mistaken for others: a pid counts together with the start of its process."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the program's name in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
