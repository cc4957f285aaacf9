"""Rows of a drill: what the gate judges. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attention.cases import Inputs


@dataclass(frozen=True)
class Figures:
    """What the tensor layer's checks read of one output; the columns of gates/suites/replay_tensor.yaml and others."""

    num_masks: float  # 1 where the finite masks differ
    r_rms: float
    r_max: float
    r_row: float
    lse: float | None  # None where the backend gives none
    num_changed: float | None  # calls that gave other bits than the first; None where there was one call


@dataclass(frozen=True)
class Row:
    """One output of one problem.

    `subject` is a kind of fault, or a sound variant or backend by name. `effect` holds the same figures of the fault
    in the float64 oracle, `lse_effect` its LSE error over the class's own; None for what is sound.
    """

    role: Literal["fault", "benign"]
    subject: str
    feature: str
    dtype: str
    phase: str
    batch: str
    layout: str
    inputs: Inputs
    seed: int
    figures: Figures
    published: dict[str, bool]
    effect: Figures | None = None
    lse_effect: float = 0.0

    @property
    def run(self) -> tuple[str, str, str, str, str, str, str, int]:
        """A run: what a replay of one candidate sees of this draw, all kinds of inputs together."""
        return (
            self.role,
            self.subject,
            self.feature,
            self.dtype,
            self.phase,
            self.batch,
            self.layout,
            self.seed,
        )
