"""Rows of the performance tables from what was measured: pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from attention.cases import AttentionCase
from attention.roofline import Ceilings, datasheet_of, limit_of, too_fast
from data.requests import Bucket
from gates.paired_ratio import Judged
from tasks.measurement import Metric, Run

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One thing to measure, and what it stands for in the traffic."""

    metric: Metric
    bucket: Bucket
    case: AttentionCase
    calls: float | None = None  # of this case that 1000 requests cost, one layer


@dataclass(frozen=True)
class Who:
    """Whose figures these are: columns of every row of a contender."""

    side: str
    fingerprint_id: str
    backend: str
    device_name: str


def cell_columns(cell: Cell) -> Row:
    """What rows of one cell share."""
    return {
        "family": cell.bucket.family,
        "metric": cell.metric,
        "case_id": cell.case.case_id,
        "shape_bucket": cell.bucket.shape_bucket,
    }


def sample_rows(cell: Cell, run: Run, name: str, who: Who) -> list[Row]:
    """perf_samples: every timed call, and the first one as a metric of its own."""
    shared = {
        "side": who.side,
        "fingerprint_id": who.fingerprint_id,
        "backend": who.backend,
        "confirmed_backend": run.first[name].confirmed if name in run.first else None,
        **cell_columns(cell),
    }
    rows = [
        {**shared, "block": turn // 2, "call": call, "seconds": seconds}
        for turn, taken in enumerate(run.turns.get(name, []))
        for call, seconds in enumerate(taken)
    ]
    first = run.first.get(name)
    if first is not None and first.first_call_s is not None:
        rows.append({**shared, "metric": "first_call_s", "block": -1, "call": 0, "seconds": first.first_call_s})
    return rows


def ceiling_rows(cell: Cell, run: Run, who: Who) -> list[Row]:
    """perf_ceilings: one row a block and kind."""
    return [
        {
            "side": who.side,
            "fingerprint_id": who.fingerprint_id,
            "kind": kind,
            "case_id": cell.case.case_id,
            "block": block,
            "seconds": seconds,
            "work": work,
        }
        for kind, taken in run.ceilings.items()
        for block, (seconds, work) in enumerate(taken)
    ]


def backend_row(cell: Cell, run: Run, name: str, who: Who, mix: str) -> Row:
    """perf_backends: what one contender did on one case, beside what the machine could have done."""
    row: Row = {
        "side": who.side,
        "fingerprint_id": who.fingerprint_id,
        "backend": who.backend,
        **cell_columns(cell),
        "case_json": cell.case.model_dump_json(),
        "kv_len": cell.bucket.kv_len,
        "mix": mix,
        "weight": cell.bucket.weight,
        "calls": cell.calls,
    }
    if name in run.lost:
        lost = run.lost[name]
        return {**row, "outcome": lost.outcome, "error": lost.error}
    seconds, first, last = run.seconds(name), run.first[name], run.last[name]
    p50 = median(seconds)
    measured = {
        "outcome": "measured",
        "confirmed_backend": first.confirmed,
        "p50_s": p50,
        "p95_s": float(np.quantile(seconds, 0.95)),
        "p99_s": float(np.quantile(seconds, 0.99)),
        "num_samples": len(seconds),
        "tokens_per_s": sum(member.q_len for member in cell.case.members) / p50,
        "cold_ratio": first.cold_ratio,
        "first_call_s": first.first_call_s,
        "workspace_bytes": first.workspace_bytes,
        "peak_bytes": last.peak_bytes,
        "graph_capture": first.graph_capture,
        "num_waited": last.num_waited,
    }
    return {**row, **measured, **_against_the_machine(cell, run.machine(), p50, who)}


def _against_the_machine(cell: Cell, machine: Ceilings | None, p50: float, who: Who) -> Row:
    """Ratios limit / p50. One that no machine reaches takes the measurement's place: it was none."""
    if cell.metric != "kernel_s":
        return {}
    if machine is None:
        return {"outcome": "failed", "error": "the ceilings could not be measured beside it"}
    limit = limit_of(cell.case, machine)
    sheet = datasheet_of(who.device_name, cell.case.dtype)
    by_sheet = None if sheet is None else limit_of(cell.case, sheet).seconds / p50
    row: Row = {
        "limit_s": limit.seconds,
        "limited_by": limit.limited_by,
        "limit_ratio": limit.seconds / p50,
        "datasheet_ratio": by_sheet,
    }
    if why := too_fast(row["limit_ratio"], by_sheet):
        row |= {"outcome": "above_limit", "error": why}
    return row


def pair_row(cell: Cell, run: Run, judged: Judged, how: Row, champion: Who, candidate: Who) -> Row:
    """perf_cells: the ratio candidate / champion, paired by block; `how` are columns that all cells of a run share."""
    theirs, ours = run.seconds(champion.side), run.seconds(candidate.side)
    return {
        "side": "candidate",
        "fingerprint_id": candidate.fingerprint_id,
        "backend": candidate.backend,
        "champion_backend": champion.backend,
        **cell_columns(cell),
        "weight": cell.bucket.weight,
        "champion_p50_s": median(theirs),
        "candidate_p50_s": median(ours),
        "candidate_p95_s": float(np.quantile(ours, 0.95)),
        "candidate_p99_s": float(np.quantile(ours, 0.99)),
        "ratio": judged.interval.value,
        "ratio_low": judged.interval.low,
        "ratio_high": judged.interval.high,
        "verdict": judged.verdict,
        "confidence": judged.confidence,
        "num_blocks": run.num_blocks,
        **how,
    }
