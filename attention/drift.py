"""Drift: where declared rules and what probes observed disagree, and where two observations do.

An observation is a file of probe rows (`python -m attention probe --out FILE`), which hold both: the static row says
what was declared on that machine, the construct and execute rows what happened. A rule that is too strict shows only
where probes ran in spite of it (`--try-declared-failures`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from attention.cases import AttentionCase
from attention.errors import UserError
from attention.probe import ProbeResult, Status
from attention.reasons import Reason

Key = tuple[str, str, AttentionCase]  # backend, probe, case


class Drift(BaseModel):
    """One cell on which two sources disagree."""

    model_config = ConfigDict(frozen=True)

    backend: str
    probe: str
    case: AttentionCase
    before: str  # declared pass | declared fail | the first file's status
    after: str
    reasons: tuple[Reason, ...]


def against_rules(observed: Iterable[ProbeResult]) -> list[Drift]:
    """Cells that the rules let pass and that failed, and cells that they refuse and that passed."""
    found = []
    for (backend, probe, case), rows in _cells(observed).items():
        static = next((r for r in rows if r.level == "static"), None)
        outcome = _outcome([r for r in rows if r.level != "static"])
        if static is None or outcome is None or outcome.status == "unknown":
            continue
        if (static.status == "pass") != (outcome.status == "pass"):
            reasons = outcome.reasons or static.reasons
            before = f"declared {'pass' if static.status == 'pass' else static.status}"
            after = f"observed {outcome.status}"
            found.append(Drift(backend=backend, probe=probe, case=case, before=before, after=after, reasons=reasons))
    return found


def between(first: Iterable[ProbeResult], second: Iterable[ProbeResult]) -> list[Drift]:
    """Cells whose outcome differs from one observation to the other; a cell that one lacks is `absent` there."""
    left, right = ({key: _outcome(rows) for key, rows in _cells(some).items()} for some in (first, second))
    found = []
    for key in dict.fromkeys((*left, *right)):
        one, other = left.get(key), right.get(key)
        before, after = (_status(r) for r in (one, other))
        if before != after:
            backend, probe, case = key
            reasons = (other and other.reasons) or (one and one.reasons) or ()
            found.append(Drift(backend=backend, probe=probe, case=case, before=before, after=after, reasons=reasons))
    return found


def _cells(rows: Iterable[ProbeResult]) -> dict[Key, list[ProbeResult]]:
    cells: dict[Key, list[ProbeResult]] = {}
    for row in rows:
        cells.setdefault((row.backend, row.probe, row.case), []).append(row)
    return cells


def _outcome(rows: list[ProbeResult]) -> ProbeResult | None:
    """The row that decides a cell: its last that is not a mere construct pass."""
    deciding = [r for r in rows if not (r.level == "construct" and r.status == "pass")]
    return deciding[-1] if deciding else None


def _status(result: ProbeResult | None) -> Status | str:
    return "absent" if result is None else result.status


def write_rows(path: Path, results: list[ProbeResult]) -> None:
    """Probe rows as Parquet (`.parquet`) or JSON (`.json`). UserError for another ending."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{**r.row(), "required": r.required} for r in results]), path)
    elif path.suffix == ".json":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"results": [r.model_dump(mode="json") for r in results]}, indent=1) + "\n")
    else:
        raise UserError(f"{path}: write probe rows to a .json or .parquet file")


class RowsLog:
    """Rows of a file as they come: JSON lines beside it, which become the file at the end.

    A process that is killed leaves the lines; `finish_log` makes the file of them.
    """

    def __init__(self, path: Path, earlier: Iterable[ProbeResult] = ()) -> None:
        if path.suffix not in (".json", ".parquet"):
            raise UserError(f"--out {path}: write probe rows to a .json or .parquet file")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(f"{row.model_dump_json()}\n" for row in earlier))
        self._lines = fresh.open("a")
        fresh.replace(path.with_suffix(".jsonl"))
        path.unlink(missing_ok=True)

    def add(self, rows: Iterable[ProbeResult]) -> None:
        self._lines.write("".join(f"{row.model_dump_json()}\n" for row in rows))
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        finish_log(self._path)


def finish_log(path: Path) -> None:
    """Make the file of rows from its JSON lines, where a process has left some."""
    lines = path.with_suffix(".jsonl")
    if lines.is_file():
        rows = read_rows(lines)
        if rows:
            write_rows(path, rows)
        lines.unlink()


def read_rows(path: Path) -> list[ProbeResult]:
    """Rows that `write_rows`, `RowsLog` or `probe --json` wrote. UserError names the file and the problem."""
    if not path.is_file():
        raise UserError(f"observation {path}: no such file; write it with `python -m attention probe --out {path}`")
    try:
        if path.suffix == ".jsonl":
            whole, _, _ = path.read_text().rpartition("\n")  # a line without an end was being written
            return [ProbeResult.model_validate_json(line) for line in whole.splitlines()]
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return [_from_columns(row) for row in pq.read_table(path).to_pylist()]
        return [ProbeResult.model_validate(row) for row in json.loads(path.read_text())["results"]]
    except OSError as error:
        raise UserError(f"observation {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"observation {path}: not written by `probe --out` ({type(error).__name__})") from error


def _from_columns(row: dict[str, Any]) -> ProbeResult:
    fields = {name: value for name, value in row.items() if not name.endswith("_json")}
    return ProbeResult.model_validate(
        {**fields, "case": json.loads(row["case_json"]), "reasons": json.loads(row["reasons_json"])}
    )
