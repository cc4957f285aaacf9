"""What the figures share: colours, an empty figure, limits, rows of one release.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers; a marker, a line
style or a word always says the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from data.lake import Lake

Row = dict[str, Any]  # one row of a query, by column

CHAMPION, CONTROL, CANDIDATE = "#555555", "#E69F00", "#0072B2"
GOOD, BAD = "#009E73", "#D55E00"
ROLE_COLOURS = {"champion": CHAMPION, "control": CONTROL, "candidate": CANDIDATE}
DPI, WIDTH_IN = 100, 9.0  # 900 px
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^DvPX<>*"
_LINE_IN = 0.15  # of a line of 8 points


@dataclass(frozen=True)
class Evidence:
    """What the lake holds of one release."""

    lake: Lake
    release_id: str

    def rows(self, sql: str, **parameters: Any) -> list[Row]:
        """Rows by column name; `$id` in the query is the release id."""
        whole = f"select evidence_row from ({sql}) evidence_row"  # noqa: S608 - the modules' own SQL
        fetched = self.lake.rows(whole, id=self.release_id, **parameters)
        return [row for (row,) in fetched]

    def limits(self, stage: str) -> dict[str, float]:
        """Upper limits that the stage's gate held its checks to, by check."""
        found = self.rows(
            'select "check", max("limit") as x from gate_results where release_id = $id and stage = $stage'
            " and \"limit\" is not null and direction = 'max' group by all",
            stage=stage,
        )
        return {row["check"]: row["x"] for row in found if math.isfinite(row["x"])}


@dataclass(frozen=True)
class Picture:
    """A figure by the name of its file, and what a reader may take from it."""

    name: str
    caption: str
    draw: Callable[[Evidence], Figure | None]  # None: nothing of its kind was asked for


def named(limits: dict[str, float], word: str) -> list[float]:
    """Limits of the checks whose last part is the word: `r_rms` of `tensor.float32.r_rms`."""
    return sorted({limit for check, limit in limits.items() if check.rpartition(".")[2] == word})


def blank(num_axes: int, height_in: float) -> tuple[Figure, list[Axes]]:
    """A figure on its own Agg canvas: without pyplot there is no global state that a thread could share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    axes = [figure.add_subplot(1, num_axes, i + 1) for i in range(num_axes)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def stacked(title: str, axes_in: Sequence[float], around_in: float = 0.9) -> tuple[Figure, list[Axes]]:
    """Axes one above the other: the height of each, and about what its title and labels need."""
    figure, _ = blank(0, sum(axes_in) + around_in * len(axes_in) + 0.4)
    figure.suptitle(title)
    grid = figure.add_gridspec(len(axes_in), 1, height_ratios=axes_in)
    axes = [figure.add_subplot(grid[i, 0]) for i in range(len(axes_in))]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def empty(stage: str, tables: str) -> Figure:
    """A figure that says that there is nothing to draw, so that nobody takes its absence for peace."""
    figure, (ax,) = blank(1, 1.6)
    ax.set_axis_off()
    ax.text(0.5, 0.5, f"{stage}: no evidence in {tables}", ha="center", va="center", color=BAD, size=12)
    return figure


def limit_line(ax: Axes, limit: float, text: str, colour: str = BAD, style: str = ":") -> None:
    """A vertical limit; its text stands in the legend, where it cannot cover a point."""
    ax.axvline(limit, color=colour, ls=style, lw=1.5, label=text)


def legend(ax: Axes, num_columns: int = 3) -> None:
    """A legend above the axes: inside, it would cover evidence."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=num_columns, fontsize=8, frameon=False,
            borderaxespad=0.2, handletextpad=0.5, columnspacing=1.2,
        )  # fmt: skip


def plain_log_ticks(*axes: Axis, unit: str = "") -> None:
    """1, 2, 5, 10, ... in place of powers of ten; with a unit also its prefix: `20 µs`."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter(unit) if unit else FuncFormatter(lambda value, _: f"{value:g}"))


def look(nth: int) -> tuple[str, str]:
    """Colour and marker of the nth of many; no two of the first 70 are alike."""
    return _HUES[nth % len(_HUES)], _MARKERS[nth % len(_MARKERS)]


@dataclass(frozen=True)
class End:
    """Where a line ends, in units of the data, and what it is called."""

    x: float
    y: float
    text: str
    colour: str
    marker: str = ""


def end_labels(ax: Axes, ends: Sequence[End], axes_in: float) -> None:
    """Names lines right of the axes, at the height of their ends, moved apart where they would cover each other.

    Call it last: it goes by the limits as they are. `axes_in`: the height of the axes, about.
    """
    from matplotlib.colors import to_rgb

    to_axes = ax.transScale + ax.transLimits
    ordered = sorted(ends, key=lambda end: end.y)
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ordered]
    for end, height in zip(ordered, apart(wanted, _LINE_IN / axes_in), strict=True):
        line = {"arrowstyle": "-", "color": end.colour, "lw": 0.5, "alpha": 0.7, "relpos": (0, 0.5)}
        ax.annotate("", (end.x, end.y), (1.03, height), textcoords="axes fraction", annotation_clip=False,
                    arrowprops={**line, "shrinkA": 0, "shrinkB": 3})  # fmt: skip
        ax.plot(1.04, height, marker=end.marker, ms=4, color=end.colour, transform=ax.transAxes, clip_on=False)
        ink = tuple(0.75 * part for part in to_rgb(end.colour))  # thin letters need more contrast than lines
        ax.text(1.055, height, end.text, transform=ax.transAxes, color=ink, size=8, va="center", parse_math=False)


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending heights in 0..1, moved up and then down until neighbours are `gap` apart."""
    placed: list[float] = []
    for height in wanted:
        placed.append(max(height, placed[-1] + gap if placed else 0.0))
    top = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], top)
        top = placed[i] - gap
    return placed


def tokens(number: float) -> str:
    """`512`, `4k`, as the grammar of batches spells lengths."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
