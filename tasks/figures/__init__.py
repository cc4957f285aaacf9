"""One figure a stage, drawn from the lake: what a reviewer looks at before believing a verdict.

    save("replay", lake, release_id, folder)      # folder/replay.png, 900 px wide

A figure holds numbers, names of cases and names of backends; never a prompt, an output or a token
(a copy goes to MLflow). It is a copy of evidence and decides nothing, so a figure that cannot be
drawn becomes an event and not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attention.schemas import write_rows
from tasks.figures import live, offline
from tasks.figures.canvas import DPI, Evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWERS: dict[str, Callable[[Evidence], Figure]] = {
    "fingerprint": offline.fingerprint,
    "probe": offline.probe,
    "replay": offline.replay,
    "baseline": offline.baseline,
    "shadow": live.shadow,
    "canary": live.canary,
    "expand": live.expand,
}


def save(stage: str, lake: Path, release_id: str, folder: Path) -> Path | None:
    """Draw the stage's figure into `folder/<stage>.png`; None, and an event, where that fails."""
    try:
        figure = draw(stage, lake, release_id)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stage}.png"
        figure.savefig(path, dpi=DPI)
    except Exception as error:  # whatever matplotlib or DuckDB raise: a picture never stops a release
        event = {
            "kind": "figure_failed",
            "severity": "warning",
            "subject": stage,
            "message": f"{type(error).__name__}: {error}",
            "time": datetime.now(UTC),
        }
        write_rows(lake, "events", [event], release_id=release_id)
        return None
    return path


def draw(stage: str, lake: Path, release_id: str) -> Figure:
    """The stage's figure; one that says "no evidence" where the lake has no row.

    Raises KeyError for an unknown stage.
    """
    from data.lake import Lake

    with Lake(lake) as opened:
        return DRAWERS[stage](Evidence(opened, release_id))
