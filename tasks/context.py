"""What every stage of one release is given: who against whom, where evidence goes, how traffic moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from attention.job import Evidence, Setup
from attention.schemas import write_rows
from data.candidate import Cell, Loaded
from data.environment import Environment, load_environment
from data.paths import cell_dir, lake_dir
from data.plan import Plan
from gates.verdict import GateReport
from tasks.record import HeldLease, LeaseLostError, Record, RecordStore

Side = Literal["champion", "candidate"]
SIDES: tuple[Side, ...] = ("champion", "candidate")


@dataclass(frozen=True)
class Context:
    """One release of one candidate in one cell. The record is read anew whenever something is decided."""

    release_id: str
    cell: Cell
    candidate: Loaded
    champion: Loaded
    lease: HeldLease | None  # None: a qualification, which touches neither record nor traffic
    say: Callable[[str], None]  # progress for people
    resumed: bool = False
    lake: Path = field(default_factory=lake_dir)

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def folder(self) -> Path:
        """State of the cell: record, route files, logs."""
        return cell_dir(self.cell.gpu, self.cell.family)

    @property
    def work(self) -> Path:
        """Job files, recordings and logs of this release; a resumed release finds its results here."""
        return self.folder / "work" / self.release_id

    @property
    def store(self) -> RecordStore:
        return RecordStore(self.folder / "record.json")

    def check(self) -> None:
        """Raise LeaseLostError when a rollback, the watchdog or another release ended this one."""
        if self.lease is not None:
            self.lease.check()

    def update(self, change: Callable[[Record], None]) -> Record:
        """Change the record as the holder of the lease. Raises LeaseLostError when it is ours no more."""
        if self.lease is None:
            raise RuntimeError("a qualification holds no lease and changes no record")
        return self.store.update(change, token=self.lease.token)

    def held(self) -> Record:
        """The record, read without its lock. Raises LeaseLostError where its lease is not ours any more."""
        record = self.store.load()
        if self.lease is None or record.lease is None or record.lease.token != self.lease.token:
            raise LeaseLostError("the lease was ended by a rollback, the watchdog or another release")
        return record

    def fingerprint_id(self, side: Side) -> str:
        """Id that the fingerprint stage found for a side."""
        from data.lake import Lake

        with Lake(self.lake, release_id=self.release_id) as lake:
            found = lake.rows(
                "select fingerprint_id from fingerprints where release_id = $id and side = $side"
                " order by time desc limit 1",
                id=self.release_id,
                side=side,
            )
        if not found:
            raise RuntimeError(f"{self.release_id} has no fingerprint of its {side}: the fingerprint stage comes first")
        return str(found[0][0])

    def loaded(self, side: Side) -> Loaded:
        return self.candidate if side == "candidate" else self.champion

    def environment(self, side: Side) -> Environment:
        return load_environment(self.loaded(side).candidate.environment)

    def setup(self, side: Side) -> Setup:
        """The process set-up of a side, the same for measuring and serving."""
        return setup_of(self.loaded(side), self.cell)

    def evidence(self, side: Side) -> Evidence:
        return Evidence(lake=self.lake, release_id=self.release_id, side=side, gpu=self.cell.gpu)

    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Append rows with the release's common columns; a row's own values win."""
        import socket

        common = {
            "node": socket.gethostname(),
            "gpu": self.cell.gpu,
            "model": self.cell.model,
            "time": datetime.now(UTC),
        }
        write_rows(self.lake, table, ({**common, **row} for row in rows), release_id=self.release_id)

    def event(self, kind: str, message: str, *, severity: str = "info", subject: str = "") -> None:
        """A row of `events`, and a line for whoever watches."""
        self.write("events", [{"kind": kind, "severity": severity, "subject": subject, "message": message}])


@dataclass(frozen=True)
class StageOutcome:
    """What a stage found: its gate's report, and facts that the record keeps."""

    report: GateReport
    detail: dict[str, Any] = field(default_factory=dict)


def setup_of(loaded: Loaded, cell: Cell) -> Setup:
    """How a process of that candidate runs in that cell."""
    return Setup(
        model=cell.model_path,
        policy=loaded.policy_path,
        device="cpu" if cell.gpu == "cpu" else "cuda",
        fault=loaded.candidate.fault,
    )


def new_release_id(candidate: str) -> str:
    """`torch-flash-cpu-20261129-231502`: readable, and sorted by time."""
    return f"{candidate}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
