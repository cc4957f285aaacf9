"""What a qualification leaves of itself beside its evidence: who against whom, and how it ended.

A release has the record of its cell for that. A qualification touches no record, so it keeps one small file in its own
folder, `data/state/<cell>/work/<id>/qualification.json`, from which `flows why` tells of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attention.validated import validated
from attention.yaml_file import read_json
from data.paths import cell_dir, cells
from tasks.files import write_atomically
from tasks.story import Story

_WHO = {"release_id", "candidate", "gpu", "family", "champion", "tags", "policy_yaml"}
_HOW = {"state", "failed_gate", "reason"}
_NAME = "qualification.json"


def keep(story: Story, folder: Path) -> None:
    """Write what the lake does not hold of a story into the folder of a qualification."""
    write_atomically(folder / _NAME, story.model_dump_json(include=_WHO | _HOW, indent=1))


def find(qualification_id: str) -> Story | None:
    """The story as it was kept, without evidence; None where no cell has such a qualification."""
    path = next((path for path in _files() if path.parent.name == qualification_id), None)
    return None if path is None else validated(Story, read_json(path), path)


def known() -> list[str]:
    """Ids of all qualifications."""
    return [path.parent.name for path in _files()]


def _files() -> Iterator[Path]:
    for gpu, family in cells():
        yield from sorted((cell_dir(gpu, family) / "work").glob(f"*/{_NAME}"))
