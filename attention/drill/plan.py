"""Which problems a drill draws, who computes them, and into whom faults go: data in attention/drill/plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attention.cases import AttentionCase, DType, Layout, Phase
from attention.drill.emulator import Variant
from attention.drill.kinds import FEATURES
from attention.errors import UserError, is_file, nearest
from attention.validated import validated
from attention.yaml_file import read_yaml

FOLDER = Path(__file__).parent / "plans"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(_Strict):
    """A phase and a batch of it. Two members of unlike length: a kernel may read past the shorter one."""

    phase: Phase
    batch: str


class WholePlan(_Strict):
    """How much of a release is recorded, for faults that only a whole model or its evidence shows."""

    model: str  # a folder of data/models
    prompts: int = Field(ge=1)  # of the golden set, drawn with the seed; teacher-forced
    tokens: int = Field(ge=8)  # kept of each
    decode_tokens: int = Field(ge=1)  # of these, forced one by one
    golden_prompts: int = Field(ge=1)  # answered
    answer_tokens: int = Field(ge=1)


class DrillPlan(_Strict):
    """How much a drill runs."""

    device: str = "cpu"
    heads_q: int = Field(ge=1)
    heads_kv: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    page_size: int = Field(ge=1)
    dtypes: tuple[DType, ...] = Field(min_length=1)
    shapes: tuple[Shape, ...] = Field(min_length=1)
    layouts: tuple[Layout, ...] = Field(min_length=1)
    variants: tuple[Variant, ...] = ()  # sound pseudo-kernels
    backends: tuple[str, ...] = ()  # sound backends
    champion: str  # the backend whose error stands beside a candidate's
    faulted: tuple[str, ...] = Field(min_length=1)  # who gets the faults: `emulated`, or backends
    repeats: int = Field(default=1, ge=1)  # draws of each case
    whole: WholePlan | None = None  # None: tensors alone


@dataclass(frozen=True)
class Draw:
    """One draw of one (dtype, phase, batch, layout); all kinds and variants run on it, under one seed."""

    dtype: DType
    phase: Phase
    batch: str
    layout: Layout
    seed: int

    def case(self, feature: str, plan: DrillPlan) -> AttentionCase:
        fields: dict[str, Any] = {
            "phase": self.phase,
            "batch": self.batch,
            "heads_q": plan.heads_q,
            "heads_kv": plan.heads_kv,
            "head_dim_qk": plan.head_dim,
            "head_dim_vo": plan.head_dim,
            "dtype": self.dtype,
            "layout": self.layout,
            "page_size": plan.page_size if self.layout.startswith("paged") else None,
        }
        return AttentionCase.model_validate({**fields, **FEATURES[feature]})

    def __str__(self) -> str:
        return f"{self.dtype} {self.phase} {self.batch} {self.layout} seed {self.seed}"


def load_plan(name: str) -> DrillPlan:
    """A plan by name (attention/drill/plans/<name>.yaml) or by path. Raises UserError with what is wrong where."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not is_file(path):
        known = sorted(p.stem for p in FOLDER.glob("*.yaml"))
        raise UserError(f"drill plan {name!r}: no file {path}; {nearest(name, known)}")
    return validated(DrillPlan, read_yaml(path), path, DrillPlan.model_fields)


def draws(plan: DrillPlan, seed: int) -> Iterator[Draw]:
    """Every draw of the plan; each has a seed of its own, drawn from `seed`."""
    generator = random.Random(seed)  # noqa: S311 - repeatable, no secret
    for _ in range(plan.repeats):
        for dtype in plan.dtypes:
            for shape in plan.shapes:
                for layout in plan.layouts:
                    yield Draw(dtype, shape.phase, shape.batch, layout, generator.randrange(1 << 31))
