"""A folder of measured draws: what was asked (drill.json) and one Parquet file a draw, each written whole."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from attention.drill.plan import Draw, DrillPlan, draws
from attention.drill.rows import Row, read_rows, write_rows
from attention.errors import UserError
from attention.replaced import replaced
from attention.validated import validated
from attention.yaml_file import read_json


class Asked(BaseModel):
    """What a folder holds draws of. `frozen_sha256` is over the files that judge, taken before the seed was drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: DrillPlan
    seed: int
    frozen_sha256: str
    torch: str
    device: str  # the GPU by name, or the processor


def sha256_of(paths: Sequence[Path]) -> str:
    """One hash over files, and over the YAML files of folders: names and contents, in order of name.

    Raises UserError for a path that there is not: a hash of nothing freezes nothing.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"{', '.join(map(str, paths))}: no YAML file there, so nothing to freeze")
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UserError.of_system(error) from error
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def device_name(device: str) -> str:
    """What the rows were computed on."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return platform.machine()


class Folder:
    """Draws in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def _asked(self) -> Path:
        return self.path / "drill.json"

    def asked(self) -> Asked | None:
        """What was asked, None in a folder where nothing was."""
        if not self._asked.exists():
            return None
        return validated(Asked, read_json(self._asked), self._asked, Asked.model_fields)

    def begin(self, asked: Asked) -> None:
        with replaced(self._asked) as temporary:
            temporary.write_text(asked.model_dump_json(indent=1))

    def left(self, asked: Asked) -> Iterator[tuple[int, Draw]]:
        """Draws that have no file yet, by number."""
        return ((n, draw) for n, draw in enumerate(draws(asked.plan, asked.seed)) if not self._file(n).exists())

    def add(self, number: int, rows: Iterable[Row]) -> None:
        write_rows(self._file(number), rows)

    def rows(self, asked: Asked) -> Iterator[list[Row]]:
        """Rows draw by draw. Raises UserError where one was not measured, or a file is empty or of another draw."""
        missing = [number for number, _ in self.left(asked)]
        if missing:
            raise UserError(f"{self.path}: {len(missing)} draws are missing; measure on with --out {self.path}")
        return (self._rows_of(number, draw) for number, draw in enumerate(draws(asked.plan, asked.seed)))

    def _rows_of(self, number: int, draw: Draw) -> list[Row]:
        path, wanted = self._file(number), vars(draw)
        rows = read_rows(path)
        if not rows or any(getattr(row, name) != value for row in rows for name, value in wanted.items()):
            raise UserError(f"{path}: not the rows of draw {number}; delete it and measure on with --out {self.path}")
        return rows

    def _file(self, number: int) -> Path:
        return self.path / f"draw-{number:04}.parquet"
