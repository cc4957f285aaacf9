"""One draw of a drill: every kind of fault and every sound variant on its problems, as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attention.backends import create
from attention.backends.oracle import Truth
from attention.cases import REPLAY_INPUTS, Inputs
from attention.drill.emulator import EXACT, Variant, kernel_numbers
from attention.drill.kernel import SOUND, Fault, Written, run
from attention.drill.kinds import FEATURES, KINDS, Kind
from attention.drill.plan import Draw
from attention.drill.published import eager, exceeded
from attention.drill.rows import Figures, Row
from attention.replay.figures import compare
from attention.replay.problems import Problem, make

BACKENDS = ("torch_sdpa:flash", "torch_sdpa:math")

#: The inputs on which every call is made twice, once a run: repeats are equal or not whatever the numbers are.
REPEATED: Inputs = "normal"


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: the tensors are small, and a seed gives the same bits on any number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def rows_of(draw: Draw, variants: tuple[Variant, ...], kinds: tuple[Kind, ...] = KINDS) -> Iterator[Row]:
    """All rows of a draw."""
    with torch.inference_mode(), _one_thread():
        for inputs in REPLAY_INPUTS:
            for feature in FEATURES:
                yield from _feature_rows(draw, feature, inputs, variants, kinds)


def _feature_rows(
    draw: Draw, feature: str, inputs: Inputs, variants: tuple[Variant, ...], kinds: tuple[Kind, ...]
) -> Iterator[Row]:
    case = draw.case(feature)
    problem = make(case, inputs, draw.seed)
    reference = eager(problem)
    fixed: dict[str, Any] = {**vars(draw), "feature": feature, "inputs": inputs}
    num_calls = 2 if inputs == REPEATED else 1

    def row(role: str, subject: str, calls: list[Written], **more: Any) -> Row:
        out = calls[0].out_THD
        published = exceeded(out, reference, problem)
        return Row(
            role=role,  # type: ignore[arg-type]
            subject=subject,
            figures=figures_of(calls, problem.truth, problem.spec.dtype),
            published=published,
            **fixed,
            **more,
        )

    for variant in variants:
        yield row("benign", f"emulated, {variant}", _emulated(problem, num_calls, draw.seed, variant, SOUND))
    for name in BACKENDS:
        backend = create(name)
        if not backend.check(case):
            planned = backend.plan(problem.batch, problem.spec)
            calls = [_written(planned.run(problem.q_THD, problem.k, problem.v)) for _ in range(num_calls)]
            yield row("benign", name, calls)
    for kind in kinds:
        if kind.feature == feature:
            effect, lse_effect = effect_of(problem, num_calls, kind.fault, draw.seed)
            calls = _emulated(problem, num_calls, draw.seed, Variant(), kind.fault)
            yield row("fault", kind.name, calls, effect=effect, lse_effect=lse_effect)


def _emulated(problem: Problem, num_calls: int, seed: int, variant: Variant, fault: Fault) -> list[Written]:
    numbers = kernel_numbers(problem.spec.dtype)
    return [run(problem, numbers, seed=seed, variant=variant, fault=fault, call=call) for call in range(num_calls)]


def _written(result: tuple[torch.Tensor, torch.Tensor | None]) -> Written:
    out, lse = result
    return Written(out, torch.full(out.shape[:2], math.nan) if lse is None else lse)


def figures_of(calls: list[Written], truth: Truth, dtype: torch.dtype) -> Figures:
    """What the checks read of the first call's output, and how many of the others gave other bits."""
    first, *others = calls
    has_lse = not bool(first.lse_TH.isnan().all())
    found = compare(first.out_THD, first.lse_TH if has_lse else None, truth, dtype)
    return Figures(
        num_masks=0.0 if found.finite_mask_equal else 1.0,
        r_rms=found.r_rms,
        r_max=found.r_max,
        r_row=found.r_row,
        lse=found.lse_max_abs if found.finite_mask_equal else (math.nan if has_lse else None),
        num_changed=float(sum(not _same(first, other) for other in others)) if others else None,
    )


def _same(one: Written, other: Written) -> bool:
    return _same_bits(one.out_THD, other.out_THD) and _same_bits(one.lse_TH, other.lse_TH)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals NaN here: a NaN is no change from call to call."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def effect_of(problem: Problem, num_calls: int, fault: Fault, seed: int) -> tuple[Figures, float]:
    """What the fault changes in the float64 oracle, and its change of the LSE over the class's own error.

    The class's own error of an LSE: half an ulp of the float32 in which it is returned, or what half an ulp of the
    dtype is as a change of every weight, whichever is larger.
    """
    exact = replace(problem, q_THD=problem.q_THD.double())
    # What is no race gives float64's own bits again.
    num_calls = num_calls if fault.race else 1
    calls = [run(exact, EXACT, seed=seed, fault=fault, call=call) for call in range(num_calls)]
    dtype = problem.spec.dtype
    found = figures_of(calls, problem.truth, dtype)
    size = float(problem.truth.lse_QH.nan_to_num(neginf=0.0).abs().max())
    own = max(torch.finfo(torch.float32).eps / 2 * size, torch.finfo(dtype).eps / 2)
    return found, math.nan if found.lse is None else found.lse / own
