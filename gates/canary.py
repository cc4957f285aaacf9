"""Gate of one canary step: the candidate beside a control that got the same share at the same time.

Two layers. `breach` is the fast one: called while a step runs, it names the first event that no user
should see a second time. `judge` closes the step: what is deterministic (NaN, another backend, another
environment, a lost request) fails on the first event, everything else is an interval against a limit.

At the 100 % step control has no live traffic; it gets the mirror of the candidate's, and is compared
with the candidate on the same requests.
"""

from __future__ import annotations

import heapq
import math
import statistics as stdlib_statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import pandas as pd

from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.served import (
    CANDIDATE,
    CONTROL,
    CONTROL_SHADOW,
    LIVE,
    Arm,
    ClientOutcome,
    Span,
    arm,
    candidate_figures,
    candidate_notes,
    client_figures,
    client_notes,
    recorded,
    rows_of,
    served_rows,
)
from gates.thresholds import Limits, load_limits
from gates.verdict import Breach, Check, fail_closed

_COLUMNS = "request_id, ok, output_tokens, ttft_s, tpot_s, epoch(time) as at_s"
_QUANTILES = {"p50": 0.50, "p95": 0.95}
# With every request going to the candidate, one straggler of the step before must not be impossible.
_LARGEST_SHARE = 0.99

# One unit a session: sticky routing sends the whole of it to one arm.
_UNITS = """coalesce(nullif(session_id, ''), request_id) as unit, release_id = $release
  and side = 'candidate' as mine, epoch(time) - coalesce(e2e_s, 0) as arrived_s"""


@fail_closed("canary")
def judge(lake: Path, release_id: str, plan: Plan, *, share: int, span: Span, client: ClientOutcome) -> list[Check]:
    """Judge the step that gave the candidate `share` percent of live traffic during `span`."""
    limits = load_limits("canary", plan.name)
    least = plan.canary.min_candidate_requests
    limits = limits.least(
        min_candidate_requests=least, min_control_requests=math.ceil(least * limits.value("control_share"))
    )
    control_rows = _control(share)
    with served_rows(lake, release_id, span) as tables:
        candidate = arm(tables, release_id, CANDIDATE)
        control = arm(tables, release_id, control_rows)
        num_recorded = recorded(tables, release_id)
        rows = rows_of(tables, release_id, CANDIDATE, _COLUMNS)
        beside = rows_of(tables, release_id, control_rows, _COLUMNS)
        units = rows_of(tables, release_id, LIVE, _UNITS)
    figures = candidate_figures(candidate) | client_figures(client, num_recorded)
    figures |= {
        "num_control": control.num_requests,
        "control_extra_ids": max(0, control.num_ids - 1),
        "memory_ratio": candidate.peak_memory / control.peak_memory if control.peak_memory else math.nan,
    }
    notes = candidate_notes(candidate) | client_notes(client, num_recorded)
    notes |= _arm_notes(candidate, control, figures["memory_ratio"], limits)
    figures["sample_ratio_p"], notes["sample_ratio"] = _sample_ratio(units, share, span)
    if share == 100:
        rows = rows[rows["request_id"].isin(beside["request_id"])]
    for metric in ("ttft", "tpot"):
        figures |= _latency(metric, rows, beside, notes)
    return evaluate(load_suite("canary"), pd.DataFrame([figures]), limits, notes)


def _control(share: int) -> str:
    """At 100 % control has no live rows, only copies."""
    return CONTROL_SHADOW if share == 100 else CONTROL


def _arm_notes(candidate: Arm, control: Arm, memory_ratio: float, limits: Limits) -> dict[str, Note]:
    num, beside = candidate.num_requests, control.num_requests
    memory = statistics.headroom_phrase("peak memory", memory_ratio, limits.value("memory_ratio"))
    return {
        "candidate_requests": Note(f"1 request of {num}", num, f"{num} candidate requests"),
        "control_requests": Note(f"1 request of {beside}", beside, f"{beside} control requests"),
        "control_fingerprint": Note(f"1 request of {beside}", beside, "control's environment changed"),
        "memory": Note(memory, min(num, beside)),
    }


def _sample_ratio(units: pd.DataFrame, share: int, span: Span) -> tuple[float, Note]:
    """Two-sided exact p of the candidate's share of sessions against the share that was set."""
    # A request that arrived before the step was split by the shares of the step before.
    arrived = units[units["arrived_s"] >= span.start.timestamp()].groupby("unit")["mine"].max()
    num, mine = len(arrived), int(arrived.sum())
    chance = min(share / 100, _LARGEST_SHARE)
    p_value = statistics.share_p_value(mine, num, chance)
    # 3.29 standard errors are p = 0.001.
    shift = 3.29 * math.sqrt(chance * (1 - chance) / num) if num else math.nan
    detail = f"{mine} of {num} sessions went to the candidate, {share} % was set"
    return p_value, Note(f"share off by {statistics.percent(shift)}", num, detail)


def _latency(metric: str, rows: pd.DataFrame, beside: pd.DataFrame, notes: dict[str, Note]) -> dict[str, float]:
    """Ratio of P50 and P95, candidate over control, with bounds by shared windows."""
    first, second = _measured(metric, rows), _measured(metric, beside)
    first_windows, second_windows, num_windows = statistics.windows(first["at_s"], second["at_s"])
    figures: dict[str, float] = {}
    for name, quantile in _QUANTILES.items():
        ratio = statistics.quantile_ratio(
            first[f"{metric}_s"],
            second[f"{metric}_s"],
            quantile,
            candidate_windows=first_windows,
            control_windows=second_windows,
            num_windows=num_windows,
        )
        check = f"{metric}_{name}_ratio"
        figures |= {check: ratio.value, f"{check}_low": ratio.low, f"{check}_high": ratio.high}
        phrase = statistics.effect_phrase(f"{metric.upper()} {name.upper()}", ratio.detectable)
        bounds = f"{ratio.low:.3g} to {ratio.high:.3g} over {num_windows} windows"
        notes[check] = Note(phrase, min(len(first), len(second)), bounds)
    return figures


def _measured(metric: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Ok rows; for TPOT those of two output tokens and more. A figure that is null stays, as NaN."""
    answered = rows[rows["ok"].astype(bool)]
    # A null count of tokens cannot excuse a null TPOT.
    return answered[~(answered["output_tokens"] < 2)] if metric == "tpot" else answered


@dataclass(frozen=True)
class ServedRow:
    """What the fast layer looks at."""

    fault: bool
    nonfinite: bool
    wrong_backend: bool
    tpot_s: float | None
    load: float = 1.0  # sequences in the steps that decoded it, on average
    at_s: float = 0.0  # when it ended, in seconds since 1970


_FAST = """side, coalesce(fault, true) as fault, coalesce(num_nonfinite, 0) > 0 as nonfinite,
  ok and not confirmed as wrong, tpot_s, greatest(coalesce(batch_size_mean, 1), 1) as load, epoch(time) as at_s"""


class _Follower:
    """Rows of a step as they come. A Parquet file never changes, so none is read twice."""

    def __init__(self, lake: Path, release_id: str, share: int, start: datetime) -> None:
        self._lake, self._release_id, self._start = lake, release_id, start
        self._which = f"({CANDIDATE}) or ({_control(share)})"
        self._seen: set[Path] = set()
        self._rows: dict[str, list[ServedRow]] = {"candidate": [], "control": []}

    def poll(self) -> tuple[list[ServedRow], list[ServedRow]]:
        folder = self._lake.resolve() / "requests" / f"release_id={self._release_id}"
        fresh = set(folder.glob("*.parquet")) - self._seen
        if fresh:
            self._read(fresh)
        return list(self._rows["candidate"]), list(self._rows["control"])

    def _read(self, files: set[Path]) -> None:
        # No end: a file is read once, also for rows that are later than this moment's clock.
        span = Span(self._start, datetime(9000, 1, 1, tzinfo=UTC))
        with served_rows(self._lake, self._release_id, span, files) as tables:
            frame = rows_of(tables, self._release_id, self._which, _FAST)
        self._seen |= files
        for side, fault, nonfinite, wrong, tpot_s, load, at_s in frame.itertuples(index=False):
            measured = float(tpot_s) if tpot_s > 0 else None
            row = ServedRow(bool(fault), bool(nonfinite), bool(wrong), measured, float(load), float(at_s))
            self._rows[side].append(row)


_follow = lru_cache(maxsize=4)(_Follower)


def recent(lake: Path, release_id: str, *, share: int, span: Span) -> tuple[list[ServedRow], list[ServedRow]]:
    """Candidate's and control's rows since the span's start, oldest first, for `breach`.

    Cheap to call each half second: what a call with the same start read before is remembered.
    """
    return _follow(lake, release_id, share, span.start).poll()


def breach(candidate: Sequence[ServedRow], control: Sequence[ServedRow], plan: Plan) -> Breach | None:
    """Why the step must end now, or None. Rows are the step's so far, oldest first."""
    limits = load_limits("canary", plan.name)
    if nonfinite := sum(row.nonfinite for row in candidate):
        return Breach("a candidate request produced NaN or Inf logits", nonfinite, limits.value("none"))
    if wrong := sum(row.wrong_backend for row in candidate):
        why = "a candidate request ran another backend than the resolved one"
        return Breach(why, wrong, limits.value("none"))
    last, most = candidate[-int(limits.value("breach_last")) :], limits.value("breach_errors")
    faults = sum(row.fault for row in last)
    if faults >= most:
        return Breach(f"{faults} of the candidate's last {len(last)} requests failed", faults, most - 1)
    return _slow(candidate, control, limits)


def _slow(candidate: Sequence[ServedRow], control: Sequence[ServedRow], limits: Limits) -> Breach | None:
    """Median of TPOT over what control took at that time, at the same load, of the candidate's last requests."""
    least, beside = int(limits.value("breach_candidate")), int(limits.value("breach_control"))
    mine, theirs = _timed(candidate)[-least:], _timed(control)
    if len(mine) < least or len(theirs) < beside:
        return None
    ratio = stdlib_statistics.median(tpot_s / _beside(row, theirs, beside) for tpot_s, row in mine)
    if ratio <= (most := limits.value("breach_tpot_ratio")):
        return None
    why = f"median TPOT of the candidate's last {least} requests is {ratio:.1f} times control's at the same load"
    return Breach(why, ratio, most)


def _timed(rows: Sequence[ServedRow]) -> list[tuple[float, ServedRow]]:
    """Rows with a TPOT, beside it."""
    return [(row.tpot_s, row) for row in rows if row.tpot_s is not None]


def _beside(row: ServedRow, control: Sequence[tuple[float, ServedRow]], num: int) -> float:
    """Most that control's TPOT would be at the load of this row: median of the `num` rows nearest in time.

    Near in time, since what slows the machine slows both arms. A row of a smaller load is taken times the loads'
    ratio: the most that a batch costs is that its sequences run one after another. So arms under unequal load are
    compared in the candidate's favour; what that hides is left to the end of the step, where users' times count.
    """
    near = heapq.nsmallest(num, control, key=lambda timed: abs(timed[1].at_s - row.at_s))
    return stdlib_statistics.median(tpot_s * max(1.0, row.load / other.load) for tpot_s, other in near)
