"""The drill: faults and sound variants over all draws of a plan, judged by the replay gate's limits.

Limits are frozen before anything is drawn: files are hashed first and hashed again at the end. Each draw has a seed
of its own, drawn from one that is fresh unless it is given.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from pydantic import BaseModel

from attention.errors import UserError
from gates import drill as gate
from gates.evaluate import SUITES
from gates.thresholds import THRESHOLDS_FILE

SEED_BYTES = 4


class Drill(BaseModel):
    """What a drill found. `problems` is empty exactly when it passed."""

    seed: int
    small: bool
    without: str | None
    limits_sha256: str
    checks: tuple[str, ...]
    rules: tuple[str, ...]
    num_draws: int
    kinds: tuple[gate.KindResult, ...]
    no_ops: tuple[str, ...]
    singles: dict[str, tuple[int, dict[str, int]]]
    elsewhere: tuple[dict[str, str], ...]
    benign: gate.BenignResult
    problems: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(SEED_BYTES), "big")


def limits_sha256() -> str:
    """One hash over the files that decide what trips: limits and suites."""
    digest = hashlib.sha256()
    for path in (THRESHOLDS_FILE, *(SUITES / f"{name}.yaml" for name in gate.SUITES)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def drill(
    *,
    small: bool,
    seed: int | None = None,
    without: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Drill:
    """Run and judge. Raises UserError for a check to leave out that there is not, and for limits that changed."""
    gate.checks(without)
    frozen = limits_sha256()
    drawn = fresh_seed() if seed is None else seed
    say(f"limits {frozen[:12]}, seed {drawn} (repeat with --seed {drawn})")
    found, num_draws = _runs(small, drawn, without, say)
    if limits_sha256() != frozen:
        raise UserError(f"{THRESHOLDS_FILE.parent}: the limits changed while the drill ran; run it again")
    # torch takes seconds to import: a mistyped option has been answered by now.
    from attention.drill.kinds import ELSEWHERE, KINDS
    from attention.drill.published import RULES

    kinds = tuple(gate.kind_result(kind.name, kind.check, found, RULES) for kind in KINDS)
    benign = gate.benign_result(found, RULES)
    return Drill(
        seed=drawn,
        small=small,
        without=without,
        limits_sha256=frozen,
        checks=gate.checks(without),
        rules=RULES,
        num_draws=num_draws,
        kinds=kinds,
        no_ops=tuple(f"{run.subject}: {run.where}" for run in found if run.no_op),
        singles={
            "all inputs": gate.singles(found, (gate.OURS, *RULES)),
            "normal inputs": gate.singles(found, (gate.OURS, *RULES), "normal"),
        },
        elsewhere=tuple(vars(one) for one in ELSEWHERE),
        benign=benign,
        problems=tuple(gate.problems(kinds, benign)),
    )


def _runs(small: bool, seed: int, without: str | None, say: Callable[[str], None]) -> tuple[list[gate.Run], int]:
    """Every run of the plan, judged, and the number of its draws; rows are dropped draw by draw."""
    from attention.drill.plan import FULL, SMALL, draws
    from attention.drill.run import rows_of

    plan = SMALL if small else FULL
    planned = list(draws(plan, seed))
    found: list[gate.Run] = []
    for done, draw in enumerate(planned, start=1):
        found += gate.runs(rows_of(draw, plan.variants), without)
        if done % max(1, len(planned) // 12) == 0 or done == len(planned):
            say(f"{done} of {len(planned)} draws, {len(found)} runs")
    return found, len(planned)
