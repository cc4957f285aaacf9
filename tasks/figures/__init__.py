"""Pictures of each stage, drawn from the lake: what a reviewer looks at before believing a verdict.

    save("replay", lake, release_id, folder)      # folder/replay.png, 900 px wide; of a baseline several

A picture holds numbers, names of cases and names of backends; never a prompt, an output or a token
(a copy goes to MLflow). It is a copy of evidence and decides nothing, so one that cannot be
drawn becomes an event and not an error.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attention.schemas import write_rows
from tasks.figures import live, offline, performance
from tasks.figures.canvas import DPI, Evidence, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SINGLE = (
    Picture("fingerprint", "Fields of the identity that differ between champion and candidate.", offline.fingerprint),
    Picture("probe", "The worst answer of each backend to each probe, and how many cells gave it.", offline.probe),
    Picture(
        "replay",
        "Error against fp64 in units of the dtype class's own, and distance of the model's distributions.",
        offline.replay,
    ),
    Picture("shadow", "The same requests answered by champion and candidate.", live.shadow),
    Picture("canary", "Candidate and control under equal load, window by window, and who served.", live.canary),
    Picture("expand", "The candidate alone, window by window, and who served.", live.expand),
)

#: By stage; the first is the stage's main picture, and says so where it has no evidence.
PICTURES: dict[str, tuple[Picture, ...]] = {
    "baseline": performance.PICTURES,
    **{picture.name: (picture,) for picture in _SINGLE},
}


def save(stage: str, lake: Path, release_id: str, folder: Path) -> list[Path]:
    """Draw the stage's pictures into `folder/<name>.png`, the main one first; what fails is left out, and an event.

    Raises KeyError for an unknown stage.
    """
    saved = []
    for picture in PICTURES[stage]:
        try:
            figure = draw(picture, lake, release_id)
            if figure is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{picture.name}.png"
            figure.savefig(path, dpi=DPI)
        except Exception as error:  # whatever matplotlib or DuckDB raise: a picture never stops a release
            event = {
                "kind": "figure_failed",
                "severity": "warning",
                "subject": picture.name,
                "message": f"{type(error).__name__}: {error}",
                "time": datetime.now(UTC),
            }
            write_rows(lake, "events", [event], release_id=release_id)
        else:
            saved.append(path)
    return saved


def draw(picture: Picture, lake: Path, release_id: str) -> Figure | None:
    """One picture; a main one says "no evidence" where the lake has no row, another is None."""
    from data.lake import Lake

    with Lake(lake) as opened:
        return picture.draw(Evidence(opened, release_id))
