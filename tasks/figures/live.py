"""Figures of the stages under traffic: shadow, canary, expand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from tasks.figures.canvas import (
    CANDIDATE,
    CONTROL,
    ROLE_COLOURS,
    Evidence,
    Row,
    blank,
    columns,
    empty,
    legend,
    plain_log_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def shadow(evidence: Evidence) -> Figure:
    pairs = evidence.rows(
        "select p.ttft_s as ttft_p, s.ttft_s as ttft_s, p.tpot_s as tpot_p, s.tpot_s as tpot_s,"
        " p.token_ids as tokens_p, s.token_ids as tokens_s"
        # A primary carries the release that serves, its shadow the one under test.
        " from requests p join requests s using (request_id)"
        " where s.release_id = $id and s.side = 'candidate' and s.shadow and not p.shadow",
    )
    if not pairs:
        return empty("shadow", "requests (pairs of a primary and its shadow)")
    figure, (left, right) = blank(2, 4.2)
    figure.suptitle(f"Shadow: {len(pairs)} requests answered by both")
    _paired_latency(left, pairs)
    _identical_share(right, [_divergence(p["tokens_p"] or [], p["tokens_s"] or []) for p in pairs])
    return figure


def _paired_latency(ax: Axes, pairs: Sequence[Row]) -> None:
    """A point a request: the champion's time across, its shadow's time up; below the line is faster."""
    seen = []
    for name, marker, colour in (("ttft", "o", CANDIDATE), ("tpot", "^", CONTROL)):
        times = [(p[f"{name}_p"], p[f"{name}_s"]) for p in pairs if p[f"{name}_p"] and p[f"{name}_s"]]
        both = [(1e3 * ours, 1e3 * theirs) for ours, theirs in times]
        ax.scatter(*columns(both), marker=marker, s=22, color=colour, alpha=0.7, lw=0, label=name.upper())
        seen += [time for pair in both for time in pair]
    ax.set(xscale="log", yscale="log", xlabel="champion, ms", ylabel="shadow of the candidate, ms")
    plain_log_ticks(ax.xaxis, ax.yaxis)
    if seen:
        bounds = (min(seen) / 1.3, max(seen) * 1.3)
        ax.plot(bounds, bounds, color="#888888", lw=1, label="equal")
        ax.set(xlim=bounds, ylim=bounds)
    legend(ax)


def _identical_share(ax: Axes, lengths: Sequence[tuple[int, int]]) -> None:
    """Share of pairs without a difference among the first x tokens; a short pair stays at its end."""
    from matplotlib.ticker import MaxNLocator

    longest = max(length for _, length in lengths)
    shares = [sum(same >= min(x, length) for same, length in lengths) / len(lengths) for x in range(longest + 1)]
    ax.step(range(longest + 1), shares, where="post", color=CANDIDATE)
    ax.set(ylim=(0, 1.03), xlabel="output tokens compared", ylabel="share of pairs still identical")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    num_same = sum(same == length for same, length in lengths)
    ax.set_title(f"identical to the end: {num_same} of {len(lengths)}", fontsize=9, loc="left")


def _divergence(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    """Tokens in common before the first difference, and the length of the longer side."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    return common, max(len(ours), len(theirs))


def canary(evidence: Evidence) -> Figure:
    return _live(evidence, "canary", "Canary: candidate beside a control of equal share")


def expand(evidence: Evidence) -> Figure:
    return _live(evidence, "expand", "Expand: the candidate alone, before the hand-over")


def _live(evidence: Evidence, stage: str, title: str) -> Figure:
    windows = evidence.rows(
        'select share, "window", side, ttft_p50_s, ttft_p95_s, tpot_p50_s, tpot_p95_s, num_requests'
        ' from canary_windows where release_id = $id and stage = $stage order by share, "window"',
        stage=stage,
    )
    if not windows:
        return empty(stage, "canary_windows")
    from matplotlib.gridspec import GridSpec

    figure, _ = blank(0, 6.0)
    figure.suptitle(title)
    grid = GridSpec(2, 2, figure=figure, height_ratios=(3, 2))
    positions = sorted({(row["share"], row["window"]) for row in windows})
    for column, metric in enumerate(("ttft", "tpot")):
        _windows(figure.add_subplot(grid[0, column]), windows, positions, metric)
    _shares(figure.add_subplot(grid[1, :]), evidence)
    return figure


def _windows(ax: Axes, windows: Sequence[Row], positions: list[tuple[int, int]], metric: str) -> None:
    """P50 and P95 of one metric, window by window; steps are told apart by a line and their share."""
    for side, marker in (("control", "s"), ("candidate", "o")):
        for quantile, style in (("p50", "-"), ("p95", ":")):
            points = [
                (positions.index((row["share"], row["window"])), 1e3 * row[f"{metric}_{quantile}_s"])
                for row in windows
                if row["side"] == side and row[f"{metric}_{quantile}_s"] is not None
            ]
            if points:
                ax.plot(*columns(points), marker=marker, ms=5, ls=style, color=ROLE_COLOURS[side],
                        label=f"{side} {quantile.upper()}")  # fmt: skip
    for i in range(1, len(positions)):
        if positions[i][0] != positions[i - 1][0]:
            ax.axvline(i - 0.5, color="#BBBBBB", lw=1)
    ax.set_xticks(range(len(positions)), [f"{share} %\nw{window}" for share, window in positions], size=8)
    ax.set(ylabel=f"{metric.upper()}, ms", xlabel="candidate's share, window")
    ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    legend(ax, 2)


def _shares(ax: Axes, evidence: Evidence) -> None:
    """Who really served, in equal slices of time: counted from requests, not from what was ordered."""
    found = evidence.rows(
        "with mine as (select * from requests where release_id = $id and side = 'candidate')"
        " select epoch(time) as t, coalesce(role, side) as role from requests where not shadow"
        " and (gpu, model) in (select (gpu, model) from mine)"
        " and time between (select min(time) from mine) and (select max(time) from mine) order by t",
    )
    ax.set(xlabel="seconds since the first request", ylabel="share of requests")
    if not found:
        ax.text(0.5, 0.5, "no request rows", ha="center", transform=ax.transAxes)
        return
    start, end = found[0]["t"], found[-1]["t"]
    num_slices = max(1, min(40, len(found) // 8))
    width = max((end - start) / num_slices, 1e-3)
    counts: dict[str, list[int]] = {role: [0] * num_slices for role in ROLE_COLOURS}
    for row in found:
        if row["role"] in counts:
            counts[row["role"]][min(int((row["t"] - start) / width), num_slices - 1)] += 1
    bottom = [0.0] * num_slices
    lefts = [i * width for i in range(num_slices)]
    totals = [max(1, sum(counts[role][i] for role in counts)) for i in range(num_slices)]
    for (role, numbers), hatch in zip(counts.items(), ("", "//", ".."), strict=True):
        heights = [n / total for n, total in zip(numbers, totals, strict=True)]
        ax.bar(lefts, heights, width, bottom=bottom, align="edge", color=ROLE_COLOURS[role], hatch=hatch,
               edgecolor="white", lw=0.3, label=role)  # fmt: skip
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set(ylim=(0, 1), xlim=(0, num_slices * width))
    legend(ax)
