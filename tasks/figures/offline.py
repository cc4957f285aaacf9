"""Figures of the stages that need no traffic: fingerprint, probe, replay, baseline."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.figures.canvas import (
    BAD,
    CANDIDATE,
    CHAMPION,
    CONTROL,
    GOOD,
    Evidence,
    Row,
    blank,
    columns,
    empty,
    legend,
    limit_line,
    named,
    stacked,
)
from tasks.figures.measured import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def fingerprint(evidence: Evidence) -> Figure:
    found = evidence.rows(
        "select side, any_value(fingerprint_id) as id, any_value(identity_json) as identity from fingerprints"
        " where release_id = $id group by side",
    )
    sides = {row["side"]: row for row in found}
    candidate, champion = sides.get("candidate"), sides.get("champion")
    if candidate is None:
        return empty("fingerprint", "fingerprints")
    ours = _flat(json.loads(candidate["identity"]))
    theirs = _flat(json.loads(champion["identity"])) if champion else {}
    names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name)) if champion else sorted(ours)
    shown = names[:16]
    lines = [(name, theirs.get(name, "-"), ours.get(name, "-")) for name in shown]
    if len(names) > len(shown):
        lines.append((f"and {len(names) - len(shown)} more", "", ""))
    if not lines:
        lines = [("no field differs", "", "")]
    figure, (ax,) = blank(1, 1.3 + 0.24 * len(lines))
    ids = f"candidate {candidate['id']}" + (f", champion {champion['id']}" if champion else ", no champion to compare")
    figure.suptitle(f"Fingerprint: what differs ({ids})" if champion else f"Fingerprint ({ids})")
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(len(lines), -1))
    for x, head in zip((0.0, 0.36, 0.68), ("field", "champion", "candidate"), strict=True):
        ax.text(x, -0.5, head, weight="bold", va="center")
    for y, line in enumerate(lines):
        for x, text in zip((0.0, 0.36, 0.68), line, strict=True):
            ax.text(x, y + 0.5, _short(text, 36), family="monospace", size=8.5, va="center", parse_math=False)
        ax.axhline(y, color="#DDDDDD", lw=0.6)
    return figure


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested JSON as dotted names and texts."""
    if isinstance(value, dict):
        parts = (_flat(child, f"{prefix}.{key}" if prefix else str(key)) for key, child in value.items())
        return {name: text for part in parts for name, text in part.items()}
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


_WORST_FIRST = ("fail", "known_bad", "unknown", "pass")


def probe(evidence: Evidence) -> Figure:
    found = evidence.rows(
        # A static rule that allows a case proves nothing; one that forbids it does.
        "select backend, probe, status, count(*) as n from probes where release_id = $id"
        " and side = 'candidate' and (level = 'execute' or status <> 'pass') group by all",
    )
    if not found:
        return empty("probe", "probes")
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for row in found:
        counts[row["backend"], row["probe"]][row["status"]] = row["n"]
    backends = sorted({backend for backend, _ in counts})
    probes = sorted({probe for _, probe in counts})
    figure, (ax,) = blank(1, 2.3 + 0.42 * len(backends))
    figure.suptitle("Probes: the worst answer of each backend, and how many cells gave it")
    colours = {"pass": "#BFE5D8", "fail": "#F4B48F", "known_bad": "#F4B48F", "unknown": "#E4E4E4"}
    words = {"pass": "pass", "fail": "FAIL", "known_bad": "BAD", "unknown": "?"}
    from matplotlib.patches import Rectangle

    for y, backend in enumerate(backends):
        for x, probe in enumerate(probes):
            cell = counts.get((backend, probe), {})
            worst = next((status for status in _WORST_FIRST if status in cell), None)
            colour = colours[worst] if worst else "white"
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=2))
            text = f"{words[worst]}\n{cell[worst]}/{sum(cell.values())}" if worst else "not run"
            bold = "bold" if worst in ("fail", "known_bad") else "normal"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=8, weight=bold)
    ax.set(xlim=(0, len(probes)), ylim=(len(backends), 0))
    ax.set_xticks([x + 0.5 for x in range(len(probes))], probes, rotation=35, ha="right", rotation_mode="anchor")
    ax.set_yticks([y + 0.5 for y in range(len(backends))], backends)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def replay(evidence: Evidence) -> Figure:
    ratios = evidence.rows(
        "select concat_ws(', ', split_part(case_id, '-', 1), inputs, dtype_class) as kind, case_id,"
        " max(r_rms) as r_rms, max(r_max) as r_max, max(r_row) as r_row from tensor_replay"
        " where release_id = $id and side = 'candidate' group by all order by kind",
    )
    kls = evidence.rows(
        "select mode, kl from model_replay where release_id = $id and side = 'candidate' and kl is not null"
    )
    if not ratios and not kls:
        return empty("replay", "tensor_replay, model_replay")
    kinds = sorted({row["kind"] for row in ratios}, reverse=True)
    figure, (left, right) = blank(2, max(4.0, 1.6 + 0.3 * len(kinds)))
    figure.suptitle("Replay: error against fp64 and distance of the model's distributions")
    limits = evidence.limits("replay")
    marks = {"r_rms": ("o", CANDIDATE), "r_max": ("^", CONTROL), "r_row": ("s", CHAMPION)}
    for lane, (name, (marker, colour)) in enumerate(marks.items()):
        points = [(row[name], kinds.index(row["kind"]) + 0.25 * (lane - 1)) for row in ratios if row[name] is not None]
        left.scatter(*columns(points), marker=marker, s=16, color=colour, alpha=0.75, label=name, linewidths=0)
        for limit in named(limits, name):
            limit_line(left, limit, f"{name} <= {limit:g}", colour, "--")
    left.set_yticks(range(len(kinds)), kinds)
    left.set_xlabel("R: error / error of the dtype class itself\n(a point: worst seed of a case)")
    if any(row["r_rms"] for row in ratios):  # a log axis without a figure cannot be drawn
        left.set_xscale("log")
    legend(left)
    _survival(right, kls)
    for name, style in (("kl_mean", "-."), ("kl_p999", ":")):
        for limit in named(limits, name):
            limit_line(right, limit, f"{name} <= {limit:g}", style=style)
    legend(right, 1)
    return figure


def _survival(ax: Axes, kls: Sequence[Row]) -> None:
    """Share of positions whose KL exceeds x: a straight look at the tail, where the limits are."""
    floor = 1e-14  # a log axis needs a start; sound float32 kernels are at 1e-13 and above
    for mode, colour, style in (("prefill", CANDIDATE, "-"), ("decode", CONTROL, "--")):
        values = sorted(max(row["kl"], floor) for row in kls if row["mode"] == mode)
        if values:
            shares = [1 - i / len(values) for i in range(len(values))]
            ax.step(values, shares, where="pre", color=colour, ls=style, label=f"{mode}, {len(values)} positions")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="KL(champion || candidate), nats per position",
        ylabel="share above",
    )


def baseline(evidence: Evidence) -> Figure:
    cells = evidence.rows(
        "select family, metric, shape_bucket, weight, ratio, ratio_low, ratio_high, verdict from perf_cells"
        " where release_id = $id and metric <> 'first_call_s'"  # compiling is no steady state
        " qualify row_number() over (partition by family, metric, case_id, backend order by time desc) = 1",
    )
    if not cells:
        return empty("baseline", "perf_cells")
    cells.sort(key=lambda cell: (cell["metric"], _kv_len(cell["shape_bucket"])))
    families = [family for family in FAMILIES if any(c["family"] == family for c in cells)]
    rows = [sum(c["family"] == family for c in cells) for family in families]
    title = "Baseline: time of the candidate / time of the champion, with its interval"
    figure, axes = stacked(title, [0.25 * num + 0.1 for num in rows])
    limits = evidence.limits("baseline")
    for ax, family in zip(axes, families, strict=True):
        _forest(ax, [cell for cell in cells if cell["family"] == family])
        mine = {name: limit for name, limit in limits.items() if name.startswith(f"{family}.")}
        for name, text, style in (("ratio", "limit of the mean", "-."), ("worst_cell", "limit of a cell", ":")):
            for limit in named(mine, name):
                limit_line(ax, limit, f"{text} {limit:g}", style=style)
        ax.set_xlabel(f"{family}: ratio (left of 1: faster)")
        legend(ax, 6)
    bounds = [ax.get_xlim() for ax in axes]
    for ax in axes:  # the same scale: the families are read beside each other
        ax.set_xlim(min(low for low, _ in bounds), max(high for _, high in bounds))
    return figure


_MARKS = {"FAST": ("<", GOOD), "SAME": ("o", CHAMPION), "AMBG": ("D", CONTROL), "SLOW": (">", BAD)}


def _forest(ax: Axes, cells: Sequence[Row]) -> None:
    ax.axvline(1.0, color="#888888", lw=1)
    seen: set[str] = set()
    for y, cell in enumerate(cells):
        if cell["ratio"] is None or not math.isfinite(cell["ratio"]):
            ax.text(1.0, y, " no figure", color=BAD, va="center", size=8)
            continue
        marker, colour = _MARKS.get(cell["verdict"], ("x", BAD))
        low, high = cell["ratio_low"], cell["ratio_high"]
        if low is not None and high is not None:
            ax.plot([low, high], [y, y], color=colour, lw=2)
        label = cell["verdict"] if cell["verdict"] not in seen else None
        seen.add(cell["verdict"])
        ax.plot([cell["ratio"]], [y], marker=marker, color=colour, ms=6, ls="none", label=label)
    names = [f"{c['metric']} {_bucket(c['shape_bucket'])} ({100 * (c['weight'] or 0):.0f} %)" for c in cells]
    ax.set_yticks(range(len(cells)), names, size=8)
    ax.set_ylim(len(cells) - 0.4, -0.6)


def _kv_len(shape_bucket: str | None) -> int:
    digits = (shape_bucket or "").rpartition("=")[2]
    return int(digits) if digits.isdigit() else 0


def _bucket(shape_bucket: str | None) -> str:
    return (shape_bucket or "?").partition("/")[2] or (shape_bucket or "?")


def _short(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[: num_chars - 3] + "..."
