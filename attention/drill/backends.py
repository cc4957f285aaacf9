"""Backends in a drill: real ones with a fault around them, and the pseudo-kernel as one.

Problems and outputs are on the CPU; a real backend gets copies on its device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec, Batch, Planned, case_of
from attention.cases import AttentionCase
from attention.drill.emulator import Variant, kernel_numbers
from attention.drill.kernel import SOUND, Fault, Written, run, spoilt
from attention.reasons import Reason
from attention.replay.problems import Problem


def can_run(name: str, problem: Problem, fault: Fault, device: str) -> bool:
    """Whether a backend takes the problem and, with a fault in its arguments, those too."""
    batch, spec = problem.batch, problem.spec
    specs = (spec,) if fault.misread is None else (spec, fault.misread(spec))
    backend = create(name, device)
    return fault.outside and not any(backend.check(case_of(batch, one)) for one in specs)


def run_sound(name: str, problem: Problem, device: str) -> tuple[Written, str]:
    """A backend's own run: what it left in memory, and what the execution layer says ran."""
    call = _planned(name, problem, problem.spec, problem.q_THD, device)
    result, confirmed = confirm.watch(call, device=device)
    return _written(result), confirmed


def run_around(name: str, problem: Problem, fault: Fault, seed: int, device: str) -> Written:
    """A backend's own run with a fault around it. What ran is not asked again: a profile takes longer than the call."""
    spec = problem.spec if fault.misread is None else fault.misread(problem.spec)

    def before(q_THD: torch.Tensor) -> torch.Tensor:
        return _written(_planned(name, problem, problem.spec, q_THD, device)()).out_THD

    written = _written(_planned(name, problem, spec, problem.q_THD, device)())
    return spoilt(written, problem, seed, fault, before)


Result = tuple[torch.Tensor, torch.Tensor | None]


def _planned(
    name: str, problem: Problem, spec: AttentionSpec, q_THD: torch.Tensor, device: str
) -> Callable[[], Result]:
    """A call that runs the kernel and nothing else."""
    batch = problem.batch
    if batch.masks is not None:
        batch = replace(batch, masks=tuple(mask.to(device) for mask in batch.masks))
    q, k, v = (tensor.to(device) for tensor in (q_THD, problem.k, problem.v))
    planned = create(name, device).plan(batch, spec)
    return lambda: planned.run(q, k, v)


def _written(result: Result) -> Written:
    out, lse = result
    return Written(out.cpu(), None if lse is None else lse.cpu())


_USUAL = Variant()


@dataclass
class Emulated:
    """The pseudo-kernel as a Backend: for checks that call a backend themselves."""

    name: str
    variant: Variant = _USUAL
    fault: Fault = SOUND

    def check(self, case: AttentionCase) -> list[Reason]:
        return []

    def plan(self, batch: Batch, spec: AttentionSpec, *, graph: bool = False, lse: bool = True) -> Planned:
        return _PlannedEmulated(self, batch, spec)


class _PlannedEmulated(Planned):
    """Calls are counted over the backend's plans: a race does not end with a plan."""

    def __init__(self, kernel: Emulated, batch: Batch, spec: AttentionSpec) -> None:
        super().__init__(kernel.name, batch, spec)
        self._kernel, self._calls = kernel, 0

    def run(
        self, q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check_tokens(q_THD)
        problem = Problem(self.batch, self.spec, q_THD, k_NPGD, v_NPGD, truth=None)  # type: ignore[arg-type]
        kernel, numbers = self._kernel, kernel_numbers(q_THD.dtype)
        written = run(problem, numbers, seed=0, variant=kernel.variant, fault=kernel.fault, call=self._calls)
        self._calls += 1
        return written.out_THD, written.lse_TH
