"""Gate of the probe stage: every backend that may serve was run on every probe, and ran itself.

A cell is (backend, probe). Only a row of level `execute` proves a pass; a failure of any level is one,
and stays one though a later run passed. A cell that was not executed is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from data.lake import Lake
from data.plan import Plan
from gates.evaluate import Note, evaluate, load_suite
from gates.fingerprint import measured_rows
from gates.thresholds import load_limits
from gates.verdict import Check, fail_closed

_CELLS = """
select backend, probe,
  count(*) filter (status in ('fail', 'known_bad')) as num_failed,
  count(*) filter (executed) > 0 and count(*) filter (executed and status is distinct from 'pass') = 0
    as passed,
  count(*) filter (executed and status = 'pass' and confirmed_backend is distinct from backend) as num_other,
  string_agg(distinct confirmed_backend, ', ') as confirmed
from (select *, level = 'execute' as executed from probes)
where release_id = $release and side = 'candidate'
group by backend, probe
"""


@fail_closed("probe")
def judge(
    lake: Path,
    release_id: str,
    plan: Plan,
    *,
    required: Sequence[tuple[str, str]],
    fallbacks: Sequence[str] = (),
) -> list[Check]:
    """Judge the required (backend, probe) cells of the candidate's resolved chain.

    `fallbacks` are the chain's fallback backends; how many of them passed all their required probes is
    recorded, and does not block.
    """
    limits = load_limits("probe", plan.name)
    with Lake(lake, release_id=release_id) as tables:
        rows = measured_rows(tables, release_id, limits, ("probes",))
        cells = {(row[0], row[1]): row[2:] for row in tables.rows(_CELLS, release=release_id)}
    wanted = sorted(set(required))
    failed = [cell for cell in wanted if cell in cells and cells[cell][0]]
    unknown = [cell for cell in wanted if cell not in cells or not (cells[cell][0] or cells[cell][1])]
    other = [cell for cell in wanted if cell in cells and cells[cell][2]]
    bad = {backend for backend, _ in (*failed, *unknown, *other)}
    validated = {backend for backend, _ in wanted} & set(fallbacks) - bad
    frame = pd.DataFrame(
        {
            "num_failed": [len(failed)],
            "num_unknown": [len(unknown)],
            "num_other": [len(other)],
            "num_fallbacks": [len(validated)],
        }
    )
    one = f"1 cell of {len(wanted)}"
    ran = [f"{_named([cell])} ran {cells[cell][3]}" for cell in other]
    notes = {
        "executed": Note(one, len(wanted), _named(failed)),
        "known": Note(one, len(wanted), f"not proven: {_named(unknown)}"),
        "confirmed": Note(one, len(wanted), ", ".join(ran)),
        "fallback_validated": Note(f"1 fallback of {len(set(fallbacks))}", len(wanted)),
    }
    return [*rows, *evaluate(load_suite("probe"), frame, limits, notes)]


def _named(cells: Iterable[tuple[str, str]]) -> str:
    names = [f"{backend} on {probe}" for backend, probe in cells]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
