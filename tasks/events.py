"""Events of the lake, written by processes that must not depend on the lake.

pyarrow is imported only when an event is written, after whatever the event tells of is done.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from typing import Any, Literal

from data.paths import lake_dir
from tasks.record import Record

Severity = Literal["info", "warning", "critical"]


def write_event(
    record: Record, kind: str, severity: Severity, message: str, *, side: str, detail: dict[str, Any]
) -> str | None:
    """Append one row to `events`, under the record's release. Returns why it could not, else None.

    `side`: whose event it is, champion, control or candidate. Never raises: by the time it is called
    traffic has been moved, and that must stand whether or not the lake can be written.
    """
    try:
        from attention.schemas import write_rows

        champion = record.champion
        row = {
            "fingerprint_id": champion.fingerprint_id if champion and side == "champion" else None,
            "node": platform.node(),
            "gpu": record.gpu,
            "model": record.family,
            "time": datetime.now(UTC),
            "side": side,
            "kind": kind,
            "severity": severity,
            "subject": record.candidate or "",
            "message": message,
            "detail_json": json.dumps(detail, sort_keys=True),
        }
        write_rows(lake_dir(), "events", [row], release_id=record.release_id or "none")
    except Exception as error:  # whatever it is, the event is all that is lost
        return f"event {kind} was not written: {error!r}"
    return None
