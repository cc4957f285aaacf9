"""A folder of measured draws: what was asked (drill.json), a Parquet file a draw, and what they hold (measured.json).

Each is written whole. measured.json names every file with its hash, rows and kinds, and is complete only when all draws
are there: what was taken out of the folder later, or never got there, is seen by whoever judges it.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from attention.drill.kinds import KINDS
from attention.drill.plan import Draw, DrillPlan, draws
from attention.drill.rows import Row, read_rows, write_rows
from attention.errors import UserError
from attention.held import held
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


class Part(BaseModel):
    """One file as it was written. `kinds` counts its rows of each kind of fault, sound ones under `sound`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    num_rows: int
    kinds: dict[str, int]

    @classmethod
    def of(cls, path: Path, rows: Sequence[Row]) -> Part:
        return cls(sha256=_digest(path), num_rows=len(rows), kinds=dict(Counter(row.kind or SOUND for row in rows)))


class Manifest(BaseModel):
    """What a folder holds. `kinds` are all that were tried, whether or not a backend could carry them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked_sha256: str  # over drill.json
    kinds: tuple[str, ...]
    complete: bool
    parts: dict[str, Part]  # by the name of the file


SOUND = "sound"


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

    @property
    def _manifest(self) -> Path:
        return self.path / "measured.json"

    def held(self) -> AbstractContextManager[None]:
        """The folder for this process alone. Raises UserError where another measures into it."""
        return held(self.path)

    def asked(self) -> Asked | None:
        """What was asked, None in a folder where nothing was."""
        if not self._asked.exists():
            return None
        return validated(Asked, read_json(self._asked), self._asked, Asked.model_fields)

    def begin(self, asked: Asked) -> None:
        with replaced(self._asked) as temporary:
            temporary.write_text(asked.model_dump_json(indent=1))
        self._put({}, complete=False)

    def left(self, asked: Asked) -> Iterator[tuple[int, Draw]]:
        """Draws by number that have no file yet, or not the one that was written."""
        parts = self._known().parts if self._manifest.exists() else {}
        for number, draw in enumerate(draws(asked.plan, asked.seed)):
            path = self._file(number)
            if path.name not in parts or not path.exists() or parts[path.name].sha256 != _digest(path):
                yield number, draw

    def add(self, number: int, rows: Sequence[Row]) -> None:
        """One draw's rows. By one process at a time."""
        path = self._file(number)
        write_rows(path, rows)
        parts = self._known().parts if self._manifest.exists() else {}
        self._put({**parts, path.name: Part.of(path, rows)}, complete=False)

    def finish(self) -> None:
        """Every draw is there."""
        self._put(self._known().parts, complete=True)

    def rows(self, asked: Asked) -> Iterator[list[Row]]:
        """Rows draw by draw. Raises UserError where one was not measured, or a file is not as it was measured."""
        if not self._manifest.exists():
            raise UserError(f"{self.path}: no {self._manifest.name}, so nobody knows what is missing; {self._remedy}")
        known, planned = self._known(), list(draws(asked.plan, asked.seed))
        names = [self._file(number).name for number in range(len(planned))]
        missing = [name for name in names if name not in known.parts or not (self.path / name).exists()]
        if missing:
            raise UserError(f"{self.path}: {len(missing)} draws are missing, {missing[0]} first; {self._remedy}")
        if not known.complete:
            raise UserError(f"{self._manifest}: says that the drill is not complete; {self._remedy}")
        return (self._rows_of(number, draw, known.parts) for number, draw in enumerate(planned))

    @property
    def _remedy(self) -> str:
        return f"measure on with --out {self.path}"

    def _known(self) -> Manifest:
        """The manifest. Raises UserError where it is of another drill.json, or of kinds that are not today's."""
        known = validated(Manifest, read_json(self._manifest), self._manifest, Manifest.model_fields)
        if known.asked_sha256 != _digest(self._asked):
            raise UserError(f"{self._asked}: not the one that was measured; put it back, or measure into a new folder")
        if known.kinds != _kinds():
            other = ", ".join(sorted(set(known.kinds) ^ set(_kinds()))) or "their order"
            raise UserError(f"{self._manifest}: of other kinds of fault ({other}); measure into a new folder")
        return known

    def _put(self, parts: dict[str, Part], *, complete: bool) -> None:
        manifest = Manifest(asked_sha256=_digest(self._asked), kinds=_kinds(), complete=complete, parts=parts)
        with replaced(self._manifest) as temporary:
            temporary.write_text(manifest.model_dump_json(indent=1))

    def _rows_of(self, number: int, draw: Draw, parts: dict[str, Part]) -> list[Row]:
        path, wanted = self._file(number), vars(draw)
        part, remedy = parts[path.name], f"delete it and {self._remedy}"
        intact = part.sha256 == _digest(path)
        rows = read_rows(path)
        if not intact or len(rows) != part.num_rows or not rows:
            raise UserError(f"{path}: not as it was measured ({_difference(part, rows)}); {remedy}")
        if any(getattr(row, name) != value for row in rows for name, value in wanted.items()):
            raise UserError(f"{path}: not the rows of draw {number}; {remedy}")
        return rows

    def _file(self, number: int) -> Path:
        return self.path / f"draw-{number:04}.parquet"


def _kinds() -> tuple[str, ...]:
    return tuple(kind.name for kind in KINDS)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _difference(part: Part, rows: Sequence[Row]) -> str:
    """What a file holds against what was written into it."""
    found = Counter(row.kind or SOUND for row in rows)
    fewer = [f"{kind} {found[kind]} of {count}" for kind, count in part.kinds.items() if found[kind] < count]
    return f"{len(rows)} of {part.num_rows} rows" + (f": {', '.join(fewer)}" if fewer else "")
