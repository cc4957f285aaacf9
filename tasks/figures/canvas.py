"""What the figures share: colours, an empty figure, limits, rows of one release.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers; a marker, a line
style or a word always says the same again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from data.lake import Lake

Row = dict[str, Any]  # one row of a query, by column

CHAMPION, CONTROL, CANDIDATE = "#555555", "#E69F00", "#0072B2"
GOOD, BAD = "#009E73", "#D55E00"
ROLE_COLOURS = {"champion": CHAMPION, "control": CONTROL, "candidate": CANDIDATE}
DPI, WIDTH_IN = 100, 9.0  # 900 px


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


def plain_log_ticks(ax: Axes) -> None:
    """1, 2, 5, 10, ... in place of powers of ten, on both axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
