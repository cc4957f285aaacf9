"""Heat maps of a baseline: who is the fastest where, and where the candidate differs from the champion.

A colour never stands alone: each cell holds its number, or the outcome in a word over hatching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attention.cases import AttentionCase
from tasks.figures.canvas import BAD, Evidence, Row, empty, stacked, tokens
from tasks.figures.measured import FAMILIES, Measured, fastest, is_compared, kernels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 18  # at 900 px a number still fits into its cell; more become a panel of their own
MAX_VERDICTS = 7  # likewise, with an interval in each
_LEAST_COLUMNS = 6  # fewer are as narrow, so that a lone case does not fill the page
_BEST, _LOST = "#BFE5D8", "#EEEEEE"
_SLOWER = ("#FFFFFF", "#F4B48F", BAD)  # from the best's time to _DARKEST times that, on a log scale
_DARKEST = 4.0
_VERDICTS = {"FAST": "#BFE5D8", "SAME": "#EEEEEE", "AMBG": "#FBE3A8", "SLOW": "#F4B48F"}
_WORDS = {
    "out_of_memory": "OOM",
    "illegal_access": "illegal",
    "compile_failed": "compile",
    "capture_failed": "capture",
    "timed_out": "timeout",
    "crashed": "crash",
    "wrong_kernel": "other\nkernel",
    "wrong_numbers": "wrong",
    "warm_cache": "warm\ncache",
    "above_limit": "above\nlimit",
}
_METRICS = {"kernel_s": "kernel time", "ttft_s": "TTFT", "tpot_s": "TPOT"}


def best(evidence: Evidence, family: str) -> Figure | None:
    """Time of each backend over that of the best on the same case; a panel a service. None for a comparison, and for
    a family that was not measured."""
    found = [one for one in kernels(evidence) if one.family == family]
    if not found or is_compared(evidence):
        return None
    panels = [panel for _, mine in _by_setting(found) for panel in _panels(mine)]
    heights = [0.25 * len({one.backend for one in panel}) for panel in panels]
    title = f"{family.capitalize()}: time of each backend / time of the best (1.00)"
    figure, axes = stacked(title, heights, 1.1)
    width = max(_LEAST_COLUMNS, *(len(_columns(panel)) for panel in panels))
    for ax, panel in zip(axes, panels, strict=True):
        _best_panel(ax, panel, width)
    return figure


def _by_setting(found: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    ordered = sorted(found, key=lambda one: one.setting)
    return [(setting, list(mine)) for setting, mine in groupby(ordered, key=lambda one: one.setting)]


def _panels(mine: Sequence[Measured]) -> list[list[Measured]]:
    """The cells of one service, at most MAX_COLUMNS cases a panel, in order of batch and length."""
    cases = _columns(mine)
    parts = [cases[i : i + MAX_COLUMNS] for i in range(0, len(cases), MAX_COLUMNS)]
    return [[one for one in mine if one.case_id in {case.case_id for case in part}] for part in parts]


def _columns(mine: Sequence[Measured]) -> list[Measured]:
    """One a case, in order of batch and length."""
    cases = {one.case_id: one for one in mine}
    return sorted(cases.values(), key=lambda one: (one.num_sequences, one.kv_len, one.q_len))


def _best_panel(ax: Axes, panel: Sequence[Measured], width: int) -> None:
    cases = _columns(panel)
    backends = sorted({one.backend for one in panel})
    cells = {(one.backend, one.case_id): one for one in panel}
    least = fastest(panel)
    for y, backend in enumerate(backends):
        row = [cells.get((backend, case.case_id)) for case in cases]
        outcomes = {"not run" if one is None else one.outcome for one in row}
        if len(outcomes) == 1 and outcomes != {"measured"}:
            (outcome,) = outcomes
            _hatched(ax, 0, y, len(cases), outcome.replace("_", " ") + (" on all" if len(cases) > 1 else ""))
            continue
        for x, one in enumerate(row):
            if one is not None and one.p50_s:
                _ratio_cell(ax, x, y, one.p50_s / least[one.case_id])
            else:
                _hatched(ax, x, y, 1, "not run" if one is None else _WORDS.get(one.outcome, one.outcome))
    _grid(ax, width, backends)
    ax.set_title(cases[0].setting, fontsize=9, loc="left", pad=20 if cases[-1].num_sequences > 1 else 5)
    ax.set_xticks([x + 0.5 for x in range(len(cases))], [_length(case) for case in cases], size=7)
    ax.set_xlabel(_axis(cases[0].family), size=8, loc="left")
    _batches(ax, cases)


def _axis(family: str) -> str:
    return {
        "prefill": "prompt up to (tokens), share of the prefill work",
        "decode": "KV up to (tokens), share of the decode work",
        "extend": "new tokens of KV up to (tokens), share of the extend work",
    }[family]


def _length(one: Measured) -> str:
    length = f"{tokens(one.q_len)} of\n{tokens(one.kv_len)}" if one.family == "extend" else tokens(one.kv_len)
    return f"{length}\n{_share(one.weight)}"


def _share(weight: float) -> str:
    return f"{100 * weight:.0f} %" if weight >= 0.0095 else "<1 %"


def _batches(ax: Axes, cases: Sequence[Measured]) -> None:
    """Above a batch's columns its size, and a line between two batches."""
    if cases[-1].num_sequences == 1:
        return
    start = 0
    for size, group in groupby(cases, key=lambda one: one.num_sequences):
        end = start + len(list(group))
        text = f"batch {size}" if end - start > 1 else f"b. {size}"
        ax.text((start + end) / 2, -0.15, text, ha="center", va="bottom", size=8)
        if start:
            ax.axvline(start, color="black", lw=1.2, zorder=2)
        start = end


def _ratio_cell(ax: Axes, x: int, y: int, ratio: float) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    text = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"
    is_best = text == "1.00"
    scale = LinearSegmentedColormap.from_list("slower", _SLOWER)
    colour = _BEST if is_best else scale(min(1.0, math.log(ratio) / math.log(_DARKEST)))
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=1.5))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=7.5, weight="bold" if is_best else "normal")


def _hatched(ax: Axes, x: float, y: float, width: int, text: str, size: float = 6.5) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, 1, facecolor=_LOST, edgecolor="#BBBBBB", hatch="////", lw=0))
    ax.add_patch(Rectangle((x, y), width, 1, fill=False, edgecolor="white", lw=1.5))
    box = {"facecolor": _LOST, "edgecolor": "none", "pad": 0.6}
    ax.text(x + width / 2, y + 0.5, text, ha="center", va="center", size=size, linespacing=1.0, bbox=box)


def _grid(ax: Axes, num_columns: int, rows: Sequence[str]) -> None:
    ax.set(xlim=(0, num_columns), ylim=(len(rows), 0))
    ax.set_yticks([y + 0.5 for y in range(len(rows))], rows, size=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def verdicts(evidence: Evidence) -> Figure | None:
    """Candidate over champion on each cell with its verdict, families apart. None where nobody was compared."""
    if not is_compared(evidence):
        return None
    found = evidence.rows(
        # What one side lost has no ratio: its outcome stands there instead.
        "with cells as (select * from perf_cells where release_id = $id"
        " qualify row_number() over (partition by metric, case_id, backend order by time desc) = 1),"
        " backends as (select * from perf_backends where release_id = $id"
        " qualify row_number() over (partition by side, metric, case_id order by time desc) = 1)"
        " select family, metric, case_id, any_value(kv_len) as kv_len, any_value(backends.weight) as weight,"
        " any_value(case_json) as case_json,"
        " max(backends.backend) filter (backends.side = 'champion') as champion,"
        " max(backends.backend) filter (backends.side = 'candidate') as candidate,"
        " max(outcome) filter (backends.side = 'champion') as champion_outcome,"
        " max(outcome) filter (backends.side = 'candidate') as candidate_outcome,"
        " any_value(ratio) as ratio, any_value(ratio_low) as low, any_value(ratio_high) as high,"
        " any_value(verdict) as verdict"
        " from backends left join cells using (family, metric, case_id)"
        " where metric <> 'first_call_s' group by all",
    )
    families = [family for family in FAMILIES if any(row["family"] == family for row in found)]
    if not families:
        return empty("baseline", "perf_backends")
    panels = [
        panel for family in families for panel in _verdict_panels([row for row in found if row["family"] == family])
    ]
    heights = [0.58 * len({_pair(row) for row in panel}) for panel in panels]
    figure, axes = stacked("Time of the candidate / time of the champion, with its verdict", heights, 1.0)
    width = max(_LEAST_COLUMNS, *(len({row["case_id"] for row in panel}) for panel in panels))
    for ax, panel in zip(axes, panels, strict=True):
        _verdict_panel(ax, panel, width)
    return figure


def _verdict_panels(mine: Sequence[Row]) -> list[list[Row]]:
    """The cells of one family, at most MAX_VERDICTS cases a panel, in order of batch and length."""
    cases = list(dict.fromkeys(row["case_id"] for row in sorted(mine, key=_place)))
    parts = [cases[i : i + MAX_VERDICTS] for i in range(0, len(cases), MAX_VERDICTS)]
    return [[row for row in mine if row["case_id"] in part] for part in parts]


def _place(row: Row) -> tuple[int, int, str]:
    return _num_sequences(row), row["kv_len"] or 0, row["case_id"]


def _num_sequences(row: Row) -> int:
    return len(AttentionCase.model_validate_json(row["case_json"]).members) if row["case_json"] else 1


def _pair(row: Row) -> str:
    """The row of a cell: what is measured, and who is compared."""
    return f"{_METRICS.get(row['metric'], row['metric'])}\n{row['candidate']}\nover {row['champion']}"


def _verdict_panel(ax: Axes, panel: Sequence[Row], width: int) -> None:
    lengths = {row["case_id"]: row for row in sorted(panel, key=_place)}
    cases, family = list(lengths), panel[0]["family"]
    pairs = sorted({_pair(row) for row in panel})
    for y, pair in enumerate(pairs):
        mine = {row["case_id"]: row for row in panel if _pair(row) == pair}
        for x, case_id in enumerate(cases):
            if case_id in mine:
                _verdict_cell(ax, x, y, mine[case_id])
    _grid(ax, width, pairs)
    ax.set_title(family, fontsize=9, loc="left")
    labels = [f"{_sized(row)}\n{_share(row['weight'] or 0.0)}" for row in lengths.values()]
    ax.set_xticks([x + 0.5 for x in range(len(cases))], labels, size=8)
    ax.set_xlabel(f"KV up to (tokens), share of the {family} work", size=8, loc="left")


def _sized(row: Row) -> str:
    """`64 x 4k`: sequences, and the bucket's KV length; the length alone of one sequence."""
    num = _num_sequences(row)
    return f"{num} x {tokens(row['kv_len'] or 0)}" if num > 1 else tokens(row["kv_len"] or 0)


def _verdict_cell(ax: Axes, x: int, y: int, row: Row) -> None:
    from matplotlib.patches import Rectangle

    ratio = row["ratio"]
    lost = [
        f"{side}\n{_WORDS.get(outcome, outcome)}"
        for side in ("champion", "candidate")
        if (outcome := row[f"{side}_outcome"] or "not run") != "measured"
    ]
    if lost or ratio is None or not math.isfinite(ratio):
        return _hatched(ax, x, y, 1, "\n".join(lost) or "no figure", 8)
    verdict = row["verdict"] or "?"
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=_VERDICTS.get(verdict, "white"), edgecolor="white", lw=2))
    bold = "bold" if verdict in ("FAST", "SLOW") else "normal"
    ax.text(x + 0.5, y + 0.33, f"{ratio:.3f} {verdict}", ha="center", va="center", size=8.5, weight=bold)
    if row["low"] is not None and row["high"] is not None:
        ax.text(x + 0.5, y + 0.7, f"{row['low']:.3f} to {row['high']:.3f}", ha="center", va="center", size=7)
    return None
