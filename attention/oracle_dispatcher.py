"""The float64 oracle in a dispatcher's place: what a model would say if its attention were exact."""

from __future__ import annotations

from typing import Any

import torch

from attention.backends.base import AttentionSpec, Batch, Planned
from attention.backends.oracle import OracleBackend
from attention.cases import phase_of
from attention.dispatch import PHASES, PhaseRun, StepRecord


class OracleDispatcher:
    """Serves every phase. Nothing is confirmed, for no kernel runs."""

    def __init__(self, specs: list[AttentionSpec]) -> None:
        self.specs, self.device = specs, "cpu"
        self.resolved = self.confirmed = dict.fromkeys(PHASES, "oracle")
        self._planned: dict[AttentionSpec, Planned] = {}
        self._batch: Batch | None = None
        self._record = StepRecord()
        self.retired: dict[str, Any] = {}

    def plan(self, batch: Batch, avoid: Any = None) -> None:
        self._planned, self._batch = {}, batch
        phases = [phase_of(*lens) for lens in zip(batch.q_lens, batch.kv_lens, strict=True)]
        self._record = StepRecord(members=[PhaseRun(phase, "", "oracle", "oracle", "oracle", 1) for phase in phases])

    def foresee(self, *way: Any) -> None:
        """The oracle serves whatever is asked."""

    def run(self, layer: int, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor) -> torch.Tensor:
        spec = self.specs[layer]
        if spec not in self._planned:
            assert self._batch is not None, "a step is planned before it runs"
            self._planned[spec] = OracleBackend().plan(self._batch, spec, lse=False)
        return self._planned[spec].run(q_THD, k_NPGD, v_NPGD)[0]

    def last_step(self) -> StepRecord:
        """Nothing to confirm: no kernel ran."""
        return self._record
