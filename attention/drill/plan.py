"""Which problems a drill draws: dtypes x phases x layouts, and how many of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attention.cases import AttentionCase, DType, Layout, Phase
from attention.drill.emulator import Variant
from attention.drill.kinds import FEATURES

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE = 6, 2, 64, 16


@dataclass(frozen=True)
class DrillPlan:
    """How much a drill runs. Two members of unlike length a batch: a kernel may read past the shorter one."""

    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[Phase, str], ...]
    layouts: tuple[Layout, ...]
    variants: tuple[Variant, ...]
    repeats: int  # draws of each case


@dataclass(frozen=True)
class Draw:
    """One draw of one (dtype, phase, batch, layout); all kinds and variants run on it, under one seed."""

    dtype: DType
    phase: Phase
    batch: str
    layout: Layout
    seed: int

    def case(self, feature: str) -> AttentionCase:
        fields: dict[str, Any] = {
            "phase": self.phase,
            "batch": self.batch,
            "heads_q": HEADS_Q,
            "heads_kv": HEADS_KV,
            "head_dim_qk": HEAD_DIM,
            "head_dim_vo": HEAD_DIM,
            "dtype": self.dtype,
            "layout": self.layout,
            "page_size": PAGE if self.layout.startswith("paged") else None,
        }
        return AttentionCase.model_validate({**fields, **FEATURES[feature]})

    def __str__(self) -> str:
        return f"{self.dtype} {self.phase} {self.batch} {self.layout} seed {self.seed}"


# Each has a member of 130 keys or more, on purpose: the limits do not see everything below. A bfloat16 accumulator
# over 33 keys moves rows by one to two of the class's own errors, under R_row's limit of 2 (12 draws of
# prefill q33_q17 in bfloat16: 12 changed the oracle, R_row caught 0 and any check 4; of q70_q33 R_row caught 9).
_SMALL_SHAPES: tuple[tuple[Phase, str], ...] = (
    ("prefill", "q130_q33"),
    ("decode", "q1s300_q1s65"),
    ("extend", "q16s144_q5s90"),
)
_VARIANTS = (
    Variant(64),
    Variant(128),
    Variant(16, reverse=True),
    Variant(64, splits=3),
    Variant(32, splits=8),
)

SMALL = DrillPlan(
    dtypes=("bfloat16", "float32"),
    shapes=_SMALL_SHAPES,
    layouts=("paged_nhd", "ragged"),
    variants=_VARIANTS[1:],
    repeats=1,
)
FULL = DrillPlan(
    dtypes=("bfloat16", "float16", "float32"),
    shapes=(
        ("prefill", "q130_q33"),
        ("prefill", "q257_q64"),
        ("decode", "q1s300_q1s65"),
        ("decode", "q1s4k_q1s63"),
        ("extend", "q16s144_q5s90"),
        ("extend", "q48s49_q17s300"),
    ),
    layouts=("paged_nhd", "paged_hnd", "ragged", "contiguous"),
    variants=_VARIANTS,
    repeats=1,
)


def draws(plan: DrillPlan, seed: int) -> Iterator[Draw]:
    """Every draw of the plan; each has a seed of its own, drawn from `seed`."""
    generator = random.Random(seed)  # noqa: S311 - repeatable, no secret
    for _ in range(plan.repeats):
        for dtype in plan.dtypes:
            for phase, batch in plan.shapes:
                for layout in plan.layouts:
                    yield Draw(dtype, phase, batch, layout, generator.randrange(1 << 31))
