"""What a service meets beside kernel time: first calls of fresh processes, and the stress run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from gates.stress import Level, knee
from gates.thresholds import load_limits
from tasks.figures.canvas import (
    BAD,
    CANDIDATE,
    CONTROL,
    ROLE_COLOURS,
    End,
    Evidence,
    Row,
    columns,
    end_labels,
    plain_log_ticks,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINEAR_UP_TO = 20.0  # times between longest and shortest: past it the short ones vanish without a log axis
_AXES_IN = 1.8
_PLAN = "full"  # whose share of good requests marks the knee
_MARKERS, _STYLES = "osD^v", ("-", "--", ":", "-.")


def first_call(evidence: Evidence) -> Figure | None:
    """Process start to the end of the first call, with empty caches of compiled kernels and with what those left."""
    found = evidence.rows(
        "select * from perf_startup where release_id = $id"
        " qualify row_number() over (partition by side, backend, cache order by time desc) = 1"
    )
    if not found:
        return None
    with_side = any(row["side"] == "champion" for row in found)
    bars = sorted(found, key=lambda row: (row["backend"], row["side"], row["cache"]))
    figure, (ax,) = stacked("From process start to the first result, in a fresh process", [0.26 * len(bars)])
    ends = [_end(row) for row in bars if _is_measured(row)]
    if ends and max(ends) > _LINEAR_UP_TO * min(ends):
        ax.set(xscale="log")
        plain_log_ticks(ax.xaxis)
    low = 0.0 if ax.get_xscale() == "linear" else 0.5 * min(row["import_s"] for row in bars if _is_measured(row))
    for y, row in enumerate(bars):
        _bar(ax, y, row, low)
    names = [f"{row['side'] + ' ' if with_side else ''}{row['backend']}, {row['cache']}" for row in bars]
    ax.set_yticks(range(len(bars)), names, size=8)
    ax.set(ylim=(len(bars) - 0.4, -0.6), xlabel="seconds since the process started")
    if ends:
        longest = max(ends)
        ax.set_xlim(low, longest * 1.25 if low == 0 else longest * (longest / low) ** 0.3)
    said = "plain: until the backend is imported, hatched: plan and first call, compilation included"
    ax.set_title(said, fontsize=9, loc="left")
    return figure


def _is_measured(row: Row) -> bool:
    return row["outcome"] == "measured" and row["import_s"] is not None and row["first_call_s"] is not None


def _end(row: Row) -> float:
    return float(row["import_s"] + row["first_call_s"])


def _bar(ax: Axes, y: int, row: Row, low: float) -> None:
    if not _is_measured(row):
        outcome = "no figure" if row["outcome"] == "measured" else (row["outcome"] or "no figure").replace("_", " ")
        ax.annotate(outcome, (0.0, y), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                    color=BAD, size=8, va="center")  # fmt: skip
        return
    colour = CONTROL if row["cache"] == "cold" else CANDIDATE
    start, first = row["import_s"], row["first_call_s"]
    ax.barh(y, start - low, 0.8, left=low, color=colour, lw=0, alpha=0.45)
    ax.barh(y, first, 0.8, left=start, color=colour, hatch="////", edgecolor="white", lw=0)
    ax.annotate(
        f"{_seconds(start)} + {_seconds(first)} s",
        (start + first, y),
        (4, 0),
        textcoords="offset points",
        size=8,
        va="center",
    )


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


@dataclass(frozen=True)
class _Curve:
    """One side at one concurrency, by offered rate."""

    name: str
    colour: str
    marker: str
    style: str
    rows: Sequence[Row]

    def levels(self) -> list[Level]:
        return [
            Level(row["rate_per_s"], row["num_offered"], row["num_good"]) for row in self.rows if row["num_offered"]
        ]

    def points(self, column: str) -> list[tuple[float, float]]:
        return [(row["rate_per_s"], row[column]) for row in self.rows if _is_finite(row[column])]


def stress(evidence: Evidence) -> Figure | None:
    """Goodput, and the tails of TTFT and TPOT, against the offered rate; the knee is the gate's."""
    found = evidence.rows(
        "select * from perf_stress where release_id = $id and rate_per_s > 0"
        " qualify row_number() over (partition by side, max_running, level order by time desc) = 1"
        " order by side, max_running, rate_per_s"
    )
    if not found:
        return None
    title = f"Stress: open-loop arrivals of the mix {found[0]['mix']}, at shares of the champion's saturation"
    figure, axes = stacked(title, [_AXES_IN] * 3, 0.6)
    curves, last = _curves(found), max(row["rate_per_s"] for row in found)
    _goodput(axes[0], curves, last)
    _tail(axes[1], curves, last, "ttft")
    _tail(axes[2], curves, last, "tpot")
    axes[2].set_xlabel("requests offered a second")
    figure.align_ylabels(axes)
    return figure


def _curves(found: Sequence[Row]) -> list[_Curve]:
    concurrencies = sorted({row["max_running"] for row in found})
    curves = []
    for (side, running), rows in groupby(found, key=lambda row: (row["side"], row["max_running"])):
        nth = concurrencies.index(running)
        marker, style = _MARKERS[nth % len(_MARKERS)], _STYLES[nth % len(_STYLES)]
        name = f"{side}, {running} running"
        curves.append(_Curve(name, ROLE_COLOURS.get(side, CANDIDATE), marker, style, list(rows)))
    return curves


def _goodput(ax: Axes, curves: Sequence[_Curve], last: float) -> None:
    share = load_limits("stress", _PLAN).value("good_share")
    ends = [End(last, last, "everything offered is good", "#777777")]
    ax.plot([0, last], [0, last], color="#BBBBBB", lw=1, ls="--", zorder=0)
    for curve in curves:
        if points := curve.points("goodput_per_s"):
            found = knee(curve.levels(), share).value
            told = "below all" if math.isnan(found) else f"{found:.3g}/s"
            more = " or more" if found == points[-1][0] else ""  # it has not bent down yet
            ends.append(_line(ax, curve, points, f"{curve.name}: knee {told}{more}"))
            if not math.isnan(found):
                ax.plot(found, share * found, marker="o", ms=12, mfc="none", mec=curve.colour, mew=1.2)
    ax.plot([0, last], [0, share * last], color="#BBBBBB", lw=1, ls=":", zorder=0)
    ends.append(End(last, share * last, f"{share:.0%} of it", "#777777"))
    ax.set_title(f"ring: the knee, up to which {share:.0%} is good", fontsize=9, loc="left")
    _finish(ax, ends, last, "good requests a second")


def _tail(ax: Axes, curves: Sequence[_Curve], last: float, name: str) -> None:
    """P95 in ms, with the objective; on a log axis where a queue that grows dwarfs all else."""
    ends, values = [], []
    for curve in curves:
        if points := [(rate, 1e3 * value) for rate, value in curve.points(f"{name}_p95_s")]:
            ends.append(_line(ax, curve, points, curve.name))
            values += [value for _, value in points]
    for objective in {row[f"slo_{name}_s"] for curve in curves for row in curve.rows if row[f"slo_{name}_s"]}:
        limit = 1e3 * objective
        ax.axhline(limit, color=BAD, ls=":", lw=1.5)
        ends.append(End(last, limit, f"objective {limit:,.0f} ms", BAD))
        values.append(limit)
    if values and min(values) > 0 and max(values) > _LINEAR_UP_TO * min(values):
        ax.set_yscale("log")
        plain_log_ticks(ax.yaxis)
    _finish(ax, ends, last, f"{name.upper()} P95, ms")


def _line(ax: Axes, curve: _Curve, points: Sequence[tuple[float, float]], text: str) -> End:
    ax.plot(*columns(points), color=curve.colour, marker=curve.marker, ls=curve.style, ms=5, lw=1.5)
    return End(*points[-1], text, curve.colour, curve.marker)


def _finish(ax: Axes, ends: Sequence[End], last: float, label: str) -> None:
    if ax.get_yscale() == "linear":
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    ax.set(xlim=(0, 1.04 * last), ylabel=label)
    ax.grid(visible=True, axis="y", color="#EEEEEE")
    end_labels(ax, ends, _AXES_IN)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
