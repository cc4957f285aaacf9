"""How near a measurement came to what the machine can do, by the machine's own figures and by its datasheet.

    limit = max(FLOPs / matrix product, bytes / read)     seconds; formulas: AttentionCase.flops, num_bytes

The run's ceilings are measured between the cells: a large matrix product, and a read-only reduction. A figure above
MOST_OF_CEILING of them, or above its datasheet, was not measured right: a warm cache, a kernel that was not run, a
clock that stood still.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from attention.cases import AttentionCase
from attention.yaml_file import read_yaml

DATASHEETS = Path(__file__).parent / "datasheets.yaml"
MOST_OF_CEILING = 1.02
MOST_OF_DATASHEET = 1.0


class Datasheet(BaseModel):
    """One GPU's dense TFLOP/s by dtype, and TB/s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    tflops: dict[str, float]
    tbytes: float


class Ceilings(BaseModel):
    """Rates of a machine: FLOP/s of a matrix product in the case's dtype, bytes/s of a read."""

    model_config = ConfigDict(frozen=True)

    flops_per_s: float
    bytes_per_s: float


class Limit(BaseModel):
    """Least seconds of a case, and what they are spent on."""

    model_config = ConfigDict(frozen=True)

    seconds: float
    limited_by: Literal["flops", "bytes"]


@cache
def _datasheets() -> tuple[Datasheet, ...]:
    return tuple(TypeAdapter(list[Datasheet]).validate_python(read_yaml(DATASHEETS)))


def datasheet_of(device_name: str, dtype: str) -> Ceilings | None:
    """The vendor's ceilings of a device by its name; None for one that is not listed, or a CPU."""
    for sheet in _datasheets():
        if sheet.name in device_name and dtype in sheet.tflops:
            return Ceilings(flops_per_s=sheet.tflops[dtype] * 1e12, bytes_per_s=sheet.tbytes * 1e12)
    return None


def limit_of(case: AttentionCase, ceilings: Ceilings) -> Limit:
    """The roofline of a case (Williams, Waterman and Patterson 2009)."""
    compute_s, read_s = case.flops() / ceilings.flops_per_s, case.num_bytes() / ceilings.bytes_per_s
    if compute_s > read_s:
        return Limit(seconds=compute_s, limited_by="flops")
    return Limit(seconds=read_s, limited_by="bytes")


def too_fast(run_ratio: float, datasheet_ratio: float | None) -> str | None:
    """Why a measurement cannot be right, by its ratios limit / seconds; None where it can."""
    if run_ratio > MOST_OF_CEILING:
        return f"{run_ratio:.3f} of the ceiling that was measured beside it, more than {MOST_OF_CEILING}"
    if datasheet_ratio is not None and datasheet_ratio > MOST_OF_DATASHEET:
        return f"{datasheet_ratio:.3f} of the datasheet, more than {MOST_OF_DATASHEET:g}"
    return None
