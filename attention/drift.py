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

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from attention.cases import AttentionCase
from attention.errors import UserError, is_dir, is_file
from attention.probe import ProbeResult, Status
from attention.reasons import Reason
from attention.replaced import replaced

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
    """Cells whose outcome differs from one observation to the other; a cell that one lacks is `absent` there.

    Of backends that only one of them has, nothing is said: `only_in` names those.
    """
    left, right = ({key: _outcome(rows) for key, rows in _cells(some).items()} for some in (first, second))
    both = {key[0] for key in left} & {key[0] for key in right}
    found = []
    for key in (key for key in dict.fromkeys((*left, *right)) if key[0] in both):
        one, other = left.get(key), right.get(key)
        before, after = (_status(r) for r in (one, other))
        if before != after:
            backend, probe, case = key
            reasons = (other and other.reasons) or (one and one.reasons) or ()
            found.append(Drift(backend=backend, probe=probe, case=case, before=before, after=after, reasons=reasons))
    return found


def only_in(first: Iterable[ProbeResult], second: Iterable[ProbeResult]) -> list[str]:
    """Backends of the first observation that the second has no row of."""
    return sorted({row.backend for row in first} - {row.backend for row in second})


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


def check_place(path: Path) -> None:
    """UserError for a file that `write_rows` could not write, before the work that its rows take."""
    if path.suffix not in (".json", ".parquet"):
        raise UserError(f"--out {path}: write probe rows to a .json or .parquet file")
    if is_dir(path):
        raise UserError(f"--out {path}: this is a folder; name a file")


def write_rows(path: Path, results: list[ProbeResult]) -> None:
    """Probe rows as Parquet (`.parquet`) or JSON (`.json`), whole or not at all. UserError for another ending."""
    check_place(path)
    with replaced(path) as fresh:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist([{**r.row(), "required": r.required} for r in results]), fresh)
        else:
            fresh.write_text(json.dumps({"results": [r.model_dump(mode="json") for r in results]}, indent=1) + "\n")


_LINE = TypeAdapter(tuple[ProbeResult, ...])


class RowsLog:
    """Rows of a file as they come: JSON lines in a hidden file beside it, which become the file at the end.

    A line holds all rows of a probe, so that one that was cut (a kill, a full disk) leaves no probe half known. A
    process that is killed leaves the lines; `finish_log` makes the file of them. Until then the file stays as it was.
    """

    def __init__(self, path: Path, earlier: Iterable[ProbeResult] = ()) -> None:
        check_place(path)
        self._path = path
        with replaced(_log_of(path)) as fresh:
            fresh.write_bytes(_line(earlier))
        self._lines = _log_of(path).open("ab")

    def add(self, rows: Iterable[ProbeResult]) -> None:
        """All rows of one probe. UserError when they cannot be written."""
        try:
            self._lines.write(_line(rows))
            self._lines.flush()
        except OSError as error:
            raise self._full(error) from error

    def close(self) -> None:
        """Make the file of the rows, if there are some. UserError when they cannot be written: the lines stay."""
        try:
            self._lines.close()
            finish_log(self._path)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> UserError:
        why = error.strerror or error
        return UserError(f"--out {self._path}: rows cannot be written ({why}); make room, then go on with --resume")


def _log_of(path: Path) -> Path:
    """Where the rows of a file are meanwhile; hidden, and nobody else's name."""
    return path.with_name(f".{path.name}.rows")


def _line(rows: Iterable[ProbeResult]) -> bytes:
    return _LINE.dump_json(tuple(rows)) + b"\n"


def unfinished_rows(path: Path) -> list[ProbeResult]:
    """Rows of a file that a process was writing when it was killed; none where it ended. UserError: cannot be read."""
    log = _log_of(path)
    if not log.is_file():
        return []
    *whole, _ = log.read_bytes().split(b"\n")  # a line without an end was being written
    try:
        return [row for line in whole for row in _LINE.validate_json(line)]
    except ValidationError as error:
        raise UserError(f"{log}: not the rows of this version; remove it to probe anew") from error


def finish_log(path: Path) -> None:
    """Make the file of the rows that a process has left, if it has left some; else the file stays as it is."""
    if rows := unfinished_rows(path):
        write_rows(path, rows)
    _log_of(path).unlink(missing_ok=True)


def read_rows(path: Path) -> list[ProbeResult]:
    """Rows that `write_rows` or `probe --json` wrote. UserError names the file and the problem."""
    if not is_file(path):
        raise UserError(f"observation {path}: no such file; write it with `python -m attention probe --out {path}`")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return [_from_columns(row) for row in pq.read_table(path).to_pylist()]
        return [ProbeResult.model_validate(row) for row in json.loads(path.read_text())["results"]]
    except OSError as error:
        raise UserError(f"observation {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"observation {path}: not written by `probe --out` ({type(error).__name__})") from error


def _from_columns(row: dict[str, Any]) -> ProbeResult:
    fields = {name: value for name, value in row.items() if not name.endswith("_json")}
    return ProbeResult.model_validate(
        {**fields, "case": json.loads(row["case_json"]), "reasons": json.loads(row["reasons_json"])}
    )
