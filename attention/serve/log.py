"""The instance's log: one line of JSON an event on standard error, uvicorn's own lines included."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


def event(kind: str, *, severity: str = "info", **fields: object) -> None:
    """Write one event. `fields` that JSON does not know are written as text."""
    line = {"time": datetime.now(UTC).isoformat(), "event": kind, "severity": severity, **fields}
    sys.stderr.write(json.dumps(line, default=str, ensure_ascii=False) + "\n")
    sys.stderr.flush()


class _AsEvent(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        event("log", severity=record.levelname.lower(), **fields)


def log_libraries_as_events() -> None:
    """Send warnings and errors of every library through `event`."""
    root = logging.getLogger()
    root.handlers[:] = [_AsEvent()]
    root.setLevel(logging.WARNING)
