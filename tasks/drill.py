"""The drill: faults and sound kernels over all draws of a plan, judged by the limits that release.

What judges is frozen before anything is drawn: its files are hashed first and hashed again at the end. Each draw has a
seed of its own, drawn from one that is fresh unless it is given. Draws run in processes of their own, one a core;
`judge_rows` judges what another machine measured (attention/drill/measure.py).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from attention.errors import UserError, nearest
from gates import drill as gate
from gates.evaluate import SUITES
from gates.thresholds import THRESHOLDS_FILE

if TYPE_CHECKING:
    from attention.drill.plan import Draw, DrillPlan

FROZEN = (THRESHOLDS_FILE, SUITES)

Say = Callable[[str], None]


class Drill(BaseModel):
    """What a drill found. `problems` is empty exactly when it passed."""

    seed: int
    plan: str
    device: str
    without: str | None
    limits_sha256: str
    checks: tuple[str, ...]
    rules: tuple[str, ...]
    num_draws: int
    kinds: tuple[gate.KindResult, ...]
    not_carried: tuple[str, ...] = ()  # kinds that no backend could carry where it was measured
    no_ops: tuple[str, ...]
    singles: dict[str, tuple[int, dict[str, int]]]
    benign: gate.BenignResult
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0


def drill(
    plan_name: str, *, seed: int | None = None, without: str | None = None, say: Say = lambda line: None
) -> Drill:
    """Run and judge. Raises UserError for a plan or a check that there is not, and for limits that changed."""
    from attention.drill.measured import device_name
    from attention.drill.plan import draws, load_plan

    plan = load_plan(plan_name)
    if plan.device != "cpu":
        raise UserError(f"plan {plan_name} measures on {plan.device}: python -m attention.drill.measure, then --rows")
    expected = _expected(plan)
    _check_name(without, expected)
    with _frozen() as limits:
        drawn = secrets.randbits(32) if seed is None else seed
        say(f"limits {limits[:12]}, seed {drawn} (repeat with --seed {drawn})")
        planned = list(draws(plan, drawn))
        found = _runs(plan, planned, drawn, without, say)
    return _result(plan_name, device_name("cpu"), drawn, without, limits, len(planned), expected, found)


def judge_rows(folder: Path, *, without: str | None = None, say: Say = lambda line: None) -> Drill:
    """Judge a folder of measured rows. Raises UserError where anything that was measured is missing, or limits are not
    those it names."""
    from attention.drill.kinds import KINDS
    from attention.drill.measured import Folder, sha256_of

    asked = Folder(folder).asked()
    if asked is None:
        raise UserError(f"--rows {folder}: no drill.json there; measure with python -m attention.drill.measure")
    if asked.frozen_sha256 != sha256_of(FROZEN):
        names = " ".join(str(path) for path in FROZEN)
        raise UserError(f"--rows {folder}: measured under other limits; measure again with --frozen {names}")
    expected = tuple(gate.Expected(kind.name, f"tensor.{kind.check}") for kind in KINDS)
    _check_name(without, expected)
    found: list[gate.Run] = []
    num_draws = 0
    for rows in Folder(folder).rows(asked):
        found += gate.runs(rows, without)
        num_draws += 1
    say(f"{num_draws} draws of {asked.device}, torch {asked.torch}, {len(found)} runs")
    known = {run.kind for run in found}
    # Only what goes around a backend was measured there; what sits inside a kernel is the pseudo-kernel's to show.
    carried = tuple(one for one in expected if one.kind in known)
    not_carried = tuple(one.kind for one in expected if one.kind not in known)
    told = _result(folder.name, asked.device, asked.seed, without, asked.frozen_sha256, num_draws, carried, found)
    return told.model_copy(update={"not_carried": not_carried})


def _expected(plan: DrillPlan) -> tuple[gate.Expected, ...]:
    from attention.drill.kinds import KINDS

    tensor = tuple(gate.Expected(kind.name, f"tensor.{kind.check}") for kind in KINDS)
    if plan.whole is None:
        return tensor
    from tasks import drill_release, drill_serving

    return tensor + drill_release.expected(plan) + drill_serving.expected()


def _check_name(without: str | None, expected: Iterable[gate.Expected]) -> None:
    names = tuple(dict.fromkeys(one.check for one in expected))
    if without is not None and without not in names:
        raise UserError(f"--without {without}: no check of this plan; {nearest(without, names)}")


@contextmanager
def _frozen() -> Iterator[str]:
    """Hash of what judges. Raises UserError if it is another at the end."""
    from attention.drill.measured import sha256_of

    before = sha256_of(FROZEN)
    yield before
    if sha256_of(FROZEN) != before:
        raise UserError(f"{THRESHOLDS_FILE.parent}: the limits changed while the drill ran; run it again")


def _runs(plan: DrillPlan, planned: list[Draw], seed: int, without: str | None, say: Say) -> list[gate.Run]:
    """Every run of the plan, judged; rows are dropped draw by draw."""
    from attention.drill.workers import mapped

    judge = partial(_judged, plan=plan, without=without)
    found: list[gate.Run] = []
    with mapped(min(len(os.sched_getaffinity(0)), len(planned))) as spread:
        each = spread(judge, planned)
        if plan.whole is not None:  # beside the draws
            from tasks import drill_release, drill_serving

            found += drill_release.runs(plan, seed, without, say)
            found += drill_serving.runs(plan.whole.model, without, say)
        for done, runs in enumerate(each, start=1):
            found += runs
            if done % max(1, len(planned) // 12) == 0 or done == len(planned):
                say(f"{done} of {len(planned)} draws, {len(found)} runs")
    return found


def _judged(draw: Draw, plan: DrillPlan, without: str | None) -> list[gate.Run]:
    from attention.drill.run import rows_of

    return gate.runs(rows_of(draw, plan), without)


def _result(
    plan_name: str,
    device: str,
    seed: int,
    without: str | None,
    limits: str,
    num_draws: int,
    expected: tuple[gate.Expected, ...],
    found: list[gate.Run],
) -> Drill:
    from attention.drill.published import RULES

    kinds = tuple(gate.kind_result(one, found, RULES) for one in expected)
    benign = gate.benign_result(found, RULES)
    checks = tuple(dict.fromkeys(one.check for one in expected if one.check != without))
    return Drill(
        seed=seed,
        plan=plan_name,
        device=device,
        without=without,
        limits_sha256=limits,
        checks=checks,
        rules=RULES,
        num_draws=num_draws,
        kinds=kinds,
        no_ops=tuple(f"{run.kind}: {run.subject}, {run.where}" for run in found if run.no_op),
        singles={
            "all inputs": gate.singles(found, (gate.OURS, *RULES)),
            "normal inputs": gate.singles(found, (gate.OURS, *RULES), "normal"),
        },
        benign=benign,
        problems=tuple(gate.problems(kinds, benign)),
    )
