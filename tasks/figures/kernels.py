"""What kernels take, and how near that is to what the machine can do: latency by KV length, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from tasks.figures.canvas import (
    CANDIDATE,
    CONTROL,
    GOOD,
    ROLE_COLOURS,
    End,
    Evidence,
    columns,
    empty,
    end_labels,
    look,
    plain_log_ticks,
    stacked,
    tokens,
)
from tasks.figures.measured import FAMILIES, Measured, fastest, is_compared, kernels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES_IN = 2.5
_FAMILY_LOOKS = {"prefill": ("o", CANDIDATE), "decode": ("s", CONTROL), "extend": ("^", GOOD)}
_SIDE_MARKERS = {"champion": "s", "candidate": "o"}


def latency(evidence: Evidence) -> Figure | None:
    """P50 to P95 against KV length, a panel a family, beside the least that the machine could need."""
    found = kernels(evidence)
    if not found:
        return None
    measured = [one for one in found if one.p50_s]
    if not measured:
        return empty("latency", "perf_backends (no kernel was measured)")
    looks = _looks(measured, compared=is_compared(evidence))
    panels = {family: _shown([one for one in measured if one.family == family]) for family in FAMILIES}
    panels = {family: shown for family, shown in panels.items() if shown}
    figure, axes = stacked("Kernel time against KV length: P50, whisker to P95", [_AXES_IN] * len(panels))
    for ax, (family, shown) in zip(axes, panels.items(), strict=True):
        _latency_panel(ax, family, shown, looks)
    return figure


def _looks(measured: Sequence[Measured], *, compared: bool) -> dict[str, tuple[str, str]]:
    """Colour and marker by name, the same in every panel."""
    if compared:
        return {one.name: (ROLE_COLOURS.get(one.side, CANDIDATE), _SIDE_MARKERS.get(one.side, "D")) for one in measured}
    return {name: look(nth) for nth, name in enumerate(sorted({one.name for one in measured}))}


def _shown(found: Sequence[Measured]) -> list[Measured]:
    """The one service and batch that most was measured of: a curve holds all but the length."""
    settings: dict[tuple[str, int], list[Measured]] = {}
    for one in found:
        settings.setdefault((one.setting, one.num_sequences), []).append(one)
    return max(settings.values(), key=lambda mine: (len(mine), mine[0].num_sequences), default=[])


def _latency_panel(ax: Axes, family: str, shown: Sequence[Measured], looks: dict[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import NullLocator

    ends = []
    for name, (colour, marker) in looks.items():
        if points := sorted((one.kv_len, one.p50_s, _tail(one)) for one in shown if one.name == name and one.p50_s):
            lengths, p50, tails = zip(*points, strict=True)
            ax.errorbar(lengths, p50, yerr=[[0.0] * len(tails), tails], color=colour, marker=marker, ms=4, lw=1.2,
                        capsize=2)  # fmt: skip
            ends.append(End(lengths[-1], p50[-1], name, colour, marker))
    if limits := sorted({one.kv_len: one.limit_s for one in shown if one.limit_s}.items()):
        ax.plot(*columns(limits), color="#888888", ls="--", lw=1.5, marker="_", ms=10)
        ends.append(End(*limits[-1], "limit of the machine", "#666666", "_"))
    ax.set(xscale="log", yscale="log", ylabel="time of a call", xlabel="KV length up to, tokens")
    ticks = sorted({one.kv_len for one in shown})
    ax.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [tokens(length) for length in ticks])
    low, high = ax.get_ylim()
    ax.set_ylim(low / 1.5, high * 1.5)  # a lone length too has two ticks beside it
    plain_log_ticks(ax.yaxis, unit="s")
    batch = f"batch {shown[0].num_sequences}, " if family == "decode" else ""
    ax.set_title(f"{family}: {batch}{shown[0].setting}", fontsize=9, loc="left")
    ax.grid(visible=True, axis="y", color="#EEEEEE")
    end_labels(ax, ends, _AXES_IN)


def _tail(one: Measured) -> float:
    """Seconds from P50 to P95."""
    return max(0.0, one.p95_s - one.p50_s) if one.p95_s and one.p50_s else 0.0


def roofline(evidence: Evidence) -> Figure | None:
    """FLOP/s reached against FLOPs a byte, under the roofs that were measured beside the cases.

    Work and bytes are those of AttentionCase: what the mathematics needs, not what a kernel moves.
    """
    found = kernels(evidence)
    if not found:
        return None
    measured = [one for one in found if one.p50_s and one.case.flops()]
    if not measured:
        return empty("roofline", "perf_backends (no kernel was measured)")
    from matplotlib.ticker import EngFormatter

    compared = is_compared(evidence)
    figure, (ax,) = stacked("Roofline: what kernels reach of the measured ceilings", [4.6])
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOPs a byte", ylabel="FLOPs a second")
    least = fastest(measured)
    for family, (marker, colour) in _FAMILY_LOOKS.items():
        front: list[Measured] = []
        behind: list[Measured] = []
        for one in (one for one in measured if one.family == family):
            is_front = one.side == "candidate" if compared else one.p50_s == least[one.case_id]
            (front if is_front else behind).append(one)
        hollow, filled = (columns([_point(one) for one in part]) for part in (behind, front))
        ax.scatter(*hollow, marker=marker, s=20, facecolors="none", edgecolors=colour, lw=0.8, alpha=0.7)
        label = f"{family}: {_nearest(front)}" if front or behind else None
        ax.scatter(*filled, marker=marker, s=34, color=colour, lw=0, zorder=3, label=label)
    _roofs(ax, *_ceilings(evidence, measured), [_point(one) for one in measured])
    said = "filled: the candidate, hollow: the champion" if compared else "filled: the fastest of its case"
    # Above the roof there is no point that it could cover.
    ax.legend(loc="upper left", fontsize=8.5, frameon=False, title=said, title_fontsize=8.5, alignment="left")
    ax.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s"))
    ax.grid(visible=True, color="#EEEEEE")
    return figure


def _point(one: Measured) -> tuple[float, float]:
    assert one.p50_s
    return one.case.flops() / one.case.num_bytes(), one.case.flops() / one.p50_s


def _nearest(front: Sequence[Measured]) -> str:
    """`flash_attn:fa4 reaches 0.88 of the limit on q8k`: the case that comes nearest."""
    ratios = [(one.limit_s / one.p50_s, one) for one in front if one.limit_s and one.p50_s]
    if not ratios:
        return "none has a figure and a limit"
    ratio, one = max(ratios, key=lambda pair: pair[0])
    return f"{one.backend} reaches {ratio:.2f} of the limit on {one.case.batch}"


def _ceilings(evidence: Evidence, measured: Sequence[Measured]) -> tuple[dict[str, float], list[float]]:
    """FLOP/s of a matrix product by dtype, and bytes/s of the read beside each case: medians over the rounds."""
    rates = evidence.rows(
        "select kind, case_id, median(work / seconds) as rate from perf_ceilings where release_id = $id"
        " and seconds > 0 group by all"
    )
    dtypes = {one.case_id: one.case.dtype for one in measured}
    products: dict[str, list[float]] = {}
    for row in rates:
        if row["kind"] == "matmul" and row["case_id"] in dtypes:
            products.setdefault(dtypes[row["case_id"]], []).append(row["rate"])
    peaks = {dtype: median(found) for dtype, found in sorted(products.items())}
    return peaks, [row["rate"] for row in rates if row["kind"] == "read"]


def _roofs(ax: Axes, peaks: dict[str, float], reads: Sequence[float], points: Sequence[tuple[float, float]]) -> None:
    """Flat a matrix product a dtype, slanted the read of memory with its range over the cases; then the limits."""
    read = median(reads) if reads else None
    low = min(x for x, _ in points) / 4
    ridges = [peak / read for peak in peaks.values()] if read else []
    high = max(3 * max(x for x, _ in points), *(2 * ridge for ridge in ridges), 2 * low)
    top = max(*peaks.values(), *(y for _, y in points), 0.0)
    for dtype, peak in peaks.items():
        ax.plot([max(low, peak / read) if read else low, high], [peak, peak], color="black", lw=1.5)
        text = f"{dtype} matrix product {_rounded(peak, 'FLOP/s')}"
        ax.text(high, 1.06 * peak, text, ha="right", va="bottom", size=8.5)
    if read:
        ends = [low, top / read]
        ax.plot(ends, [read * x for x in ends], color="black", lw=1.5)
        slow, fast = ([rate * x for x in ends] for rate in (min(reads), max(reads)))
        ax.fill_between(ends, slow, fast, color="#DDDDDD", lw=0, zorder=0)
        height = top / 1.5
        ax.text(0.8 * height / max(reads), height, f"read {_rounded(read, 'B/s')}", ha="right", va="center", size=8.5)
    ax.set(xlim=(low / 1.2, high * 1.2), ylim=(min(y for _, y in points) / 2, 10 * top))


def _rounded(value: float, unit: str) -> str:
    """Three digits: `712 TFLOP/s`."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit)(float(f"{value:.3g}"))
