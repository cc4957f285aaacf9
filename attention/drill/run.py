"""One draw of a drill: every kind of fault and everything sound on its problems, as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attention.backends.oracle import Truth
from attention.cases import REPLAY_INPUTS, Inputs
from attention.drill.backends import can_run, run_around, run_sound
from attention.drill.emulator import EXACT, Variant, kernel_numbers
from attention.drill.kernel import SOUND, Fault, Written, run
from attention.drill.kinds import FEATURES, KINDS, Kind
from attention.drill.plan import Draw, DrillPlan
from attention.drill.published import eager, exceeded
from attention.drill.rows import EMULATED, Figures, Row
from attention.replay.figures import compare
from attention.replay.problems import Problem, make


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: the tensors are small, and a seed gives the same bits on any number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def rows_of(draw: Draw, plan: DrillPlan, kinds: tuple[Kind, ...] = KINDS) -> Iterator[Row]:
    """All rows of a draw."""
    with torch.inference_mode(), one_thread():
        for inputs in REPLAY_INPUTS:
            for feature in FEATURES:
                problem = make(draw.case(feature, plan), inputs, draw.seed)
                scene = _Scene(draw, plan, feature, inputs, problem, eager(problem))
                yield from scene.sound()
                for kind in kinds:
                    if kind.feature == feature:
                        yield from scene.faulty(kind)


@dataclass(frozen=True)
class _Scene:
    """One problem of a draw, with eager attention's output for the published rules."""

    draw: Draw
    plan: DrillPlan
    feature: str
    inputs: Inputs
    problem: Problem
    eager_THD: torch.Tensor

    @cached_property
    def champion_r_rms(self) -> float | None:
        """R_rms of the plan's champion here, which stands beside every candidate; None where it cannot run, or raises:
        its own row has the error."""
        name, problem = self.plan.champion, self.problem
        if not can_run(name, problem, SOUND, self.plan.device):
            return None
        try:
            written, _ = run_sound(name, problem, self.plan.device)
        except Exception:
            return None
        return figures_of(written, problem.truth, problem.spec.dtype).r_rms

    def sound(self) -> Iterator[Row]:
        for variant in self.plan.variants:
            yield self._row(None, EMULATED, self._emulated(variant, SOUND), variant=str(variant))
        for name in self.plan.backends:
            if can_run(name, self.problem, SOUND, self.plan.device):
                yield self._around(None, name)

    def faulty(self, kind: Kind) -> Iterator[Row]:
        names = [name for name in self.plan.faulted if name == EMULATED or self._can_carry(name, kind.fault)]
        if not names:
            return
        effect, lse_effect = effect_of(self.problem, kind.fault, self.draw.seed)
        for name in names:
            if name == EMULATED:
                row = self._row(kind, name, self._emulated(Variant(), kind.fault))
            else:
                row = self._around(kind, name)
            # A fault of an LSE does not exist where a backend gives none.
            if kind.check != "lse" or row.figures is None or row.figures.lse is not None:
                yield replace(row, effect=effect, lse_effect=lse_effect)

    def _can_carry(self, name: str, fault: Fault) -> bool:
        return can_run(name, self.problem, fault, self.plan.device)

    def _emulated(self, variant: Variant, fault: Fault) -> Written:
        numbers = kernel_numbers(self.problem.spec.dtype)
        return run(self.problem, numbers, seed=self.draw.seed, variant=variant, fault=fault)

    def _around(self, kind: Kind | None, name: str) -> Row:
        confirmed = None
        try:
            if kind is None:
                written, confirmed = run_sound(name, self.problem, self.plan.device)
            else:
                written = run_around(name, self.problem, kind.fault, self.draw.seed, self.plan.device)
        except Exception as error:  # a call that raises is a row, never the end of the run
            return self._row(kind, name, None, error=f"{type(error).__name__}: {error}"[:500])
        return self._row(kind, name, written, confirmed=confirmed)

    def _row(
        self,
        kind: Kind | None,
        backend: str,
        written: Written | None,
        *,
        variant: str = "",
        confirmed: str | None = None,
        error: str | None = None,
    ) -> Row:
        problem, figures = self.problem, None
        if written is not None:
            figures = replace(
                figures_of(written, problem.truth, problem.spec.dtype), champion_r_rms=self.champion_r_rms
            )
        return Row(
            kind=None if kind is None else kind.name,
            backend=backend,
            variant=variant,
            confirmed=confirmed,
            feature=self.feature,
            inputs=self.inputs,
            **vars(self.draw),
            figures=figures,
            published={} if written is None else exceeded(written.out_THD, self.eager_THD, problem),
            error=error,
        )


def figures_of(written: Written, truth: Truth, dtype: torch.dtype) -> Figures:
    """What the checks read of an output."""
    found = compare(written.out_THD, written.lse_TH, truth, dtype)
    lse = found.lse_max_abs
    if not found.finite_mask_equal and written.lse_TH is not None:
        lse = math.nan
    return Figures(0.0 if found.finite_mask_equal else 1.0, found.r_rms, found.r_max, found.r_row, lse)


def effect_of(problem: Problem, fault: Fault, seed: int) -> tuple[Figures, float]:
    """What the fault changes in the float64 oracle, and its change of the LSE over the class's own error.

    The class's own error of an LSE: half an ulp of the float32 in which it is returned, or what half an ulp of the
    dtype is as a change of every weight, whichever is larger.
    """
    exact = replace(problem, q_THD=problem.q_THD.double())
    dtype = problem.spec.dtype
    found = figures_of(run(exact, EXACT, seed=seed, fault=fault), problem.truth, dtype)
    size = float(problem.truth.lse_QH.nan_to_num(neginf=0.0).abs().max())
    own = max(torch.finfo(torch.float32).eps / 2 * size, torch.finfo(dtype).eps / 2)
    return found, math.nan if found.lse is None else found.lse / own
