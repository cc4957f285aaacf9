"""`python -m flows status`: what every cell is doing, from its record and from the process table.

Reads no lake and asks no MLflow, so it answers when both are broken; `repair=True` is the exception:
it rebuilds MLflow's copies from record and lake.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pydantic import BaseModel

from attention.errors import UserError
from data.paths import cell_dir, cells, home_dir, lake_dir
from tasks.processes import broken_files, is_alive, list_processes
from tasks.record import Attempt, Deployed, Instance, Lease, Record, RecordStore, Shares

if TYPE_CHECKING:
    from rich.console import RenderableType

NUM_ATTEMPTS = 5  # shown; --json has all


class ProcessStatus(BaseModel):
    """A process of the cell: of a role in the record, or merely of a process file."""

    role: str
    name: str
    pid: int
    port: int | None
    alive: bool


class LeaseStatus(BaseModel):
    holder: str
    pid: int
    live: bool
    seconds_left: float


class CellStatus(BaseModel):
    """One (GPU, model family). With `error` the record could not be read and the rest is empty."""

    gpu: str
    family: str
    error: str | None = None
    generation: int = 0
    state: str | None = None
    release_id: str | None = None
    candidate: str | None = None
    reason: str = ""
    champion: str | None = None
    champion_release: str | None = None
    champion_backends: dict[str, str] = {}
    previous: str | None = None
    previous_release: str | None = None
    shares: Shares = Shares()
    mirror: float = 0.0
    lease: LeaseStatus | None = None
    approved_by: str | None = None
    processes: list[ProcessStatus] = []
    broken_files: list[str] = []  # process files that are none; `down` removes them
    attempts: list[Attempt] = []  # newest first


class StatusReport(BaseModel):
    home: str
    cells: list[CellStatus]
    repaired: list[str] = []  # releases whose copy in MLflow was rebuilt


def status(*, repair: bool = False) -> StatusReport:
    """Every cell that has a folder. Raises UserError when `repair` cannot reach MLflow."""
    found, repaired = [], []
    for gpu, family in cells():
        try:
            record = RecordStore(cell_dir(gpu, family) / "record.json").load()
        except UserError as error:
            found.append(CellStatus(gpu=gpu, family=family, error=str(error)))
            continue
        found.append(_cell(record))
        if repair:
            from tasks import track

            repaired += track.repair(record, lake_dir())
    return StatusReport(home=str(home_dir()), cells=found, repaired=repaired)


def _cell(record: Record) -> CellStatus:
    champion, previous = record.champion, record.previous
    return CellStatus(
        gpu=record.gpu,
        family=record.family,
        generation=record.generation,
        state=record.state,
        release_id=record.release_id,
        candidate=record.candidate,
        reason=record.reason,
        champion=champion.candidate if champion else None,
        champion_release=champion.release_id if champion else None,
        champion_backends=champion.backends if champion else {},
        previous=previous.candidate if previous else None,
        previous_release=previous.release_id if previous else None,
        shares=record.shares,
        mirror=record.mirror,
        lease=_lease(record.lease),
        approved_by=record.approval.by if record.approval else None,
        processes=_processes(record),
        broken_files=[str(path) for path in broken_files(cell_dir(record.gpu, record.family))],
        attempts=record.attempts[::-1],
    )


def _lease(lease: Lease | None) -> LeaseStatus | None:
    if lease is None:
        return None
    live = lease.live()
    left = max(0.0, lease.expires_at - time.time()) if live else 0.0
    return LeaseStatus(holder=lease.holder, pid=lease.pid, live=live, seconds_left=left)


def _processes(record: Record) -> list[ProcessStatus]:
    """Instances that the record names, then everything else that a process file tells of."""
    named = {
        "champion": _instance_of(record.champion),
        "previous": _instance_of(record.previous),
        "control": record.control_instance,
        "candidate": record.candidate_instance,
    }
    found = [
        ProcessStatus(role=role, name=one.name, pid=one.pid, port=one.port, alive=is_alive(one.pid, one.started))
        for role, one in named.items()
        if one is not None
    ]
    seen = {one.pid for one in found}
    for file in list_processes(cell_dir(record.gpu, record.family)):
        if file.pid not in seen:
            found.append(
                ProcessStatus(role=file.role, name=file.name, pid=file.pid, port=file.port, alive=file.alive())
            )
    return found


def _instance_of(deployed: Deployed | None) -> Instance | None:
    return deployed.instance if deployed else None


def render(report: StatusReport) -> RenderableType:
    """For a terminal: a block a cell."""
    from rich.console import Group
    from rich.text import Text

    if not report.cells:
        return Text(f"nothing is released yet under {report.home}: `make release` does it")
    blocks = [_render_cell(cell) for cell in report.cells]
    if report.repaired:
        blocks.append(Text(f"MLflow: told again {', '.join(report.repaired)}"))
    return Group(*blocks)


def _render_cell(cell: CellStatus) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from flows.tables import Rows, word

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(cell):
        facts.add_row(Text(name, style="dim"), Text(value))
    parts: list[RenderableType] = [Text(f"{cell.family} on {cell.gpu}", style="bold"), facts]
    if cell.processes:
        rows = Rows("role", "process", "pid", "port", "", text=False)
        for one in cell.processes:
            port = "-" if one.port is None else str(one.port)
            alive = "alive" if one.alive else "dead"
            rows.add(one.role, one.name, str(one.pid), port, word(alive, alive))
        parts.append(rows)
    if cell.attempts:
        # A release id begins with its candidate's name.
        rows = Rows("ended", "release", "state", "reason")
        for attempt in cell.attempts[:NUM_ATTEMPTS]:
            rows.add(_when(attempt.time), attempt.release_id, attempt.state.replace("_", " "), attempt.reason)
        parts.append(rows)
        earlier = len(cell.attempts) - NUM_ATTEMPTS
        if earlier > 0:
            parts.append(Text(f"{earlier} earlier: `status --json` has them", style="dim"))
    return Group(*parts, Text(""))


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # a number that is no time, written by hand
        return f"{seconds:g}?"


def _facts(cell: CellStatus) -> list[tuple[str, str]]:
    if cell.error:
        return [("record", cell.error)]
    shares = cell.shares
    facts = [
        ("state", cell.state or "idle"),
        ("release", f"{cell.candidate} ({cell.release_id})" if cell.release_id else "-"),
        ("champion", f"{cell.champion} ({cell.champion_release})" if cell.champion else "none"),
        ("backends", ", ".join(f"{phase} {name}" for phase, name in cell.champion_backends.items())),
        ("previous", f"{cell.previous} ({cell.previous_release})" if cell.previous else "none"),
        (
            "shares",
            f"champion {shares.champion}, control {shares.control}, candidate {shares.candidate}, "
            f"mirror {cell.mirror:g}",
        ),
        ("lease", _lease_text(cell.lease)),
        ("approved by", cell.approved_by or ""),
        ("reason", cell.reason),
        ("not a process file", ", ".join(cell.broken_files)),
    ]
    return [(name, value) for name, value in facts if value]


def _lease_text(lease: LeaseStatus | None) -> str:
    if lease is None:
        return "none"
    return f"{lease.holder} (pid {lease.pid}), " + (f"{lease.seconds_left:.1f} s left" if lease.live else "ran out")
