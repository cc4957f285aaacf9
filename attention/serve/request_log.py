"""The request log: one row of table `requests` for each served request, written by who served it.

Rows are buffered and written each half second and at the end, one Parquet file a flush, under a
temporary name and renamed. A flush that fails keeps its rows and is tried again: the lake may be away
for a while, evidence is not dropped for that.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from attention.schemas import write_rows
from attention.serve.log import event

FLUSH_S = 0.5
# About 1 GB of rows: beyond it a lake that never comes back would take the instance down.
MAX_BUFFERED = 200_000


@dataclass(frozen=True)
class Instance:
    """Who this process is, fixed at its start."""

    release_id: str
    side: str  # champion | control | candidate
    name: str
    model: str
    gpu: str  # "cpu" without one
    node: str
    fault: str | None = None


class RequestRow(BaseModel):
    """The columns that one request fills; the instance's own are added by `RequestLog`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint_id: str
    time: datetime
    request_id: str
    session_id: str | None
    role: str | None
    shadow: bool
    endpoint: str
    stream: bool
    status: int
    finish_reason: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float
    requested_backend: str | None = None
    resolved_prefill: str | None = None
    resolved_decode: str | None = None
    confirmed_prefill: str | None = None
    confirmed_decode: str | None = None
    fallback: bool = False
    fallback_reason: str | None = None
    num_nonfinite: int = 0
    batch_size_mean: float | None = None
    peak_memory_bytes: int
    prompt_text: str | None = None
    output_text: str | None = None
    token_ids: list[int] | None = None
    error: str | None = None


class RequestLog:
    """Buffers rows and writes them from a thread of its own. Rows may be added from any thread.

    Events (table `events`) go the same way, so that neither is lost at a shutdown.
    """

    def __init__(self, lake: Path, instance: Instance) -> None:
        self._lake = lake
        self._instance = instance
        self._rows: list[tuple[str, dict[str, Any]]] = []  # (table, row)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self.fingerprint_id: str | None = None  # known once the model has started
        self.num_dropped = 0
        self.failure: str | None = None  # why the last flush failed
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, row: RequestRow) -> None:
        self._add("requests", {"instance": self._instance.name, **row.model_dump()})

    def add_event(self, kind: str, severity: str, subject: str, message: str, detail: Mapping[str, Any]) -> None:
        text = json.dumps(detail, default=str)
        row = {"kind": kind, "severity": severity, "subject": subject, "message": message, "detail_json": text}
        self._add("events", {"time": now(), **row})

    def _add(self, table: str, row: dict[str, Any]) -> None:
        common = {
            "fingerprint_id": self.fingerprint_id,
            "node": self._instance.node,
            "gpu": self._instance.gpu,
            "model": self._instance.model,
            "side": self._instance.side,
        }
        with self._lock:
            if len(self._rows) >= MAX_BUFFERED:
                self.num_dropped += 1
                return
            self._rows.append((table, {**common, **row}))

    def flush(self) -> None:
        """Write what is buffered; once it returns, no earlier row is still under way in the other thread.

        Raises nothing: a failure is logged and its rows are kept.
        """
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        failure = None
        for table in ("requests", "events"):
            chosen = [row for name, row in rows if name == table]
            try:
                write_rows(self._lake, table, chosen, release_id=self._instance.release_id)
            except Exception as error:
                failure = f"{len(chosen)} rows of {table} wait for the lake {self._lake}: {error}"
                with self._lock:
                    self._rows[:0] = [(table, row) for row in chosen]
                event("request_log_failed", severity="critical", message=failure, dropped=self.num_dropped)
        self.failure = failure

    def close(self) -> None:
        """Write the rest and stop."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self.flush()


def peak_memory_bytes(device: str = "cpu") -> int:
    """Most memory that this process held so far: of a GPU what PyTorch reserved there, else its resident set, which
    getrusage counts in KiB on Linux and in bytes on macOS."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_reserved(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def now() -> datetime:
    return datetime.now(UTC)
