"""Rows of a drill: what the gate judges, and how they travel in Parquet. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attention.cases import Inputs
from attention.errors import UserError
from attention.replaced import replaced

#: Name of the pseudo-kernel in the column `backend`; its variants are named in `variant`.
EMULATED = "emulated"


@dataclass(frozen=True)
class Figures:
    """What the tensor layer's checks read of one output: columns of replay_tensor.yaml, _beside and _lse."""

    num_masks: float  # 1 where the finite masks differ
    r_rms: float
    r_max: float
    r_row: float
    lse: float | None  # None where the backend gives none
    champion_r_rms: float | None = None  # of the same problem; None where the champion cannot run it


@dataclass(frozen=True)
class Row:
    """One output of one problem.

    `kind` is the fault, None for what is sound; `backend` computed it, as `variant` where that is the pseudo-kernel.
    `effect` holds the figures of the fault in the float64 oracle, `lse_effect` its LSE error over the class's own;
    None and 0 for what is sound. A call that raised has an `error` and no figures.
    """

    kind: str | None
    backend: str
    variant: str
    confirmed: str | None  # what the execution layer says ran; None for the pseudo-kernel and where a fault is
    feature: str
    dtype: str
    phase: str
    batch: str
    layout: str
    inputs: Inputs
    seed: int
    figures: Figures | None
    published: dict[str, bool]
    effect: Figures | None = None
    lse_effect: float = 0.0
    error: str | None = None

    @property
    def subject(self) -> str:
        """Who computed it, by name."""
        return f"{self.backend}, {self.variant}" if self.variant else self.backend

    @property
    def run(self) -> tuple[str, ...]:
        """A run: what a replay of one candidate sees of this draw, all kinds of inputs together."""
        where = (self.feature, self.dtype, self.phase, self.batch, self.layout, str(self.seed))
        return (self.kind or "", self.subject, *where)


_FIGURES = pa.struct(
    [(name, pa.float64()) for name in ("num_masks", "r_rms", "r_max", "r_row", "lse", "champion_r_rms")]
)
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("kind", "backend", "variant", "confirmed", "feature", "dtype")),
        *((name, pa.string()) for name in ("phase", "batch", "layout", "inputs")),
        ("seed", pa.int64()),
        ("figures", _FIGURES),
        ("published", pa.map_(pa.string(), pa.bool_())),
        ("effect", _FIGURES),
        ("lse_effect", pa.float64()),
        ("error", pa.string()),
    ]
)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one file of rows; a reader never sees half of it."""
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=_SCHEMA)
    with replaced(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_rows(path: Path) -> list[Row]:
    """The rows of one file. Raises UserError for a file of something else."""
    try:
        return [_row(one) for one in pq.read_table(path, schema=_SCHEMA).to_pylist()]
    except (OSError, pa.ArrowException, TypeError, KeyError) as error:
        raise UserError(f"{path}: no rows of a drill: {error}; delete it, and measure on") from error


def _row(one: dict[str, Any]) -> Row:
    figures = {name: None if one[name] is None else Figures(**one[name]) for name in ("figures", "effect")}
    return Row(**{**one, **figures, "published": dict(one["published"] or {})})
