"""Gate of the drill: does the tensor layer catch every fault that changes an answer, and no sound kernel?

Checks are the expectations of the replay gate's own suites, bounded by its own limits, so that a limit or an
expectation that is taken out there is missed here. Great Expectations takes tens of milliseconds a frame and a drill
has thousands: `tripped` does the comparison itself, and a test holds it to `evaluate()`.

A run is what a replay sees of one candidate: all kinds of inputs of one draw together, judged by its worst row, as
gates/replay.py judges a dtype class. A fault counts unless it is a no-op: injected into the float64 oracle it changes
neither output nor LSE beyond the class's own error, makes nothing non-finite and gives equal repeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from attention.drill.rows import Figures, Row
from attention.errors import UserError, nearest
from gates.evaluate import Expectation, load_suite
from gates.thresholds import Limits, load_limits

SUITES = ("replay_tensor", "replay_lse", "drill_repeat")
PLAN = "full"
OURS = "ours"


@dataclass(frozen=True)
class Single:
    """One problem that a fault changes, judged by itself: who rejects it (`ours`, and published rules)."""

    inputs: str
    rejected_by: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One candidate's replay of one draw: which checks tripped, and what each published rule said.

    `no_op` is False for what is sound; `singles` are the problems in it that the fault changes.
    """

    role: str
    subject: str
    where: str
    no_op: bool
    tripped: tuple[str, ...]
    published: tuple[str, ...]
    singles: tuple[Single, ...] = ()


@lru_cache
def expectations() -> tuple[Expectation, ...]:
    """Every expectation of the tensor layer that can fail a release; recorded ones cannot."""
    found = tuple(e for name in SUITES for e in load_suite(name).expectations if e.severity == "critical")
    for one in found:
        if one.direction != "max" or len(one.parameters) != 1:
            raise ValueError(f"{one.meta.check}: the drill judges upper limits by name only")
    return found


def checks(without: str | None = None) -> tuple[str, ...]:
    """Names of the checks, less the one left out. Raises UserError for a name that is none."""
    names = tuple(dict.fromkeys(one.meta.check for one in expectations()))
    if without is not None and without not in names:
        raise UserError(f"--without {without}: no such check; {nearest(without, names)}")
    return tuple(name for name in names if name != without)


def tripped(figures: Sequence[Figures], limits: Limits, asked: Sequence[str]) -> tuple[str, ...]:
    """Names of the checks that the worst of some figures fails. No figure at all, or a NaN, is a failure.

    One exception, that of gates/replay.py: a backend that never gives an LSE has none to judge.
    """
    found = []
    for one in expectations():
        values = [value for value in (getattr(f, one.column) for f in figures) if value is not None]
        held = all(value <= limits.value(one.parameters[0]) for value in values)
        absent = not values and one.meta.check != "lse"
        if one.meta.check in asked and (absent or not held):
            found.append(one.meta.check)
    return tuple(found)


def is_no_op(rows: Sequence[Row], limit: float) -> bool:
    """Whether a fault left the oracle as it is, within the class's own error, on every row."""
    return not any(_changes(row, limit) for row in rows)


def _changes(row: Row, limit: float) -> bool:
    effect = row.effect
    if effect is None:
        return False
    ratios = (effect.r_rms, effect.r_max, effect.r_row, row.lse_effect)
    # A NaN is a change: it is no number within the limit.
    return bool(effect.num_masks or effect.num_changed) or not all(ratio <= limit for ratio in ratios)


def runs(rows: Iterable[Row], without: str | None = None) -> list[Run]:
    """Rows of one draw or more as judged runs, in the order of the rows."""
    asked, effect = checks(without), load_limits("drill", PLAN).value("effect")
    ordered = sorted(rows, key=lambda row: row.run)
    return [_judged(list(group), asked, effect) for _, group in groupby(ordered, key=lambda row: row.run)]


def _judged(rows: list[Row], asked: Sequence[str], effect: float) -> Run:
    first = rows[0]
    limits = load_limits("replay", PLAN).of_class(first.dtype)
    changing = [row for row in rows if _changes(row, effect)]
    return Run(
        role=first.role,
        subject=first.subject,
        where=f"{first.dtype} {first.phase} {first.batch} {first.layout} {first.feature} seed {first.seed}",
        no_op=first.role == "fault" and not changing,
        tripped=tripped([row.figures for row in rows], limits, asked),
        published=tuple(rule for rule in first.published if any(row.published[rule] for row in rows)),
        singles=tuple(_single(row, limits, asked) for row in changing),
    )


def _single(row: Row, limits: Limits, asked: Sequence[str]) -> Single:
    # Where a problem was called once, there is no repeat to judge; the run has one.
    mine = [name for name in asked if name != "repeat" or row.figures.num_changed is not None]
    ours = (OURS,) if tripped([row.figures], limits, mine) else ()
    return Single(row.inputs, (*ours, *(rule for rule, rejects in row.published.items() if rejects)))


def singles(found: Sequence[Run], judges: Sequence[str], inputs: str | None = None) -> tuple[int, dict[str, int]]:
    """Problems that a fault changes, of one kind of inputs or all, and how many each judge rejects by itself."""
    mine = [one for run in found for one in run.singles if inputs in (None, one.inputs)]
    return len(mine), {judge: sum(judge in one.rejected_by for one in mine) for judge in judges}


@dataclass(frozen=True)
class KindResult:
    """All runs of one kind of fault. `caught` by the check that the kind names, `escaped` it; `tripped` counts the
    effective runs that each check trips."""

    kind: str
    check: str
    effective: int
    no_ops: int
    caught: int
    tripped: dict[str, int]
    published: dict[str, int]
    escaped: tuple[str, ...]


@dataclass(frozen=True)
class BenignResult:
    """All sound runs: how many of which variants and backends, and how many each rule rejects."""

    num_runs: int
    subjects: dict[str, int]
    false_alarms: int
    published: dict[str, int]
    named: tuple[str, ...]


def kind_result(kind: str, check: str, found: Sequence[Run], rules: Sequence[str]) -> KindResult:
    mine = [run for run in found if run.role == "fault" and run.subject == kind]
    effective = [run for run in mine if not run.no_op]
    missed = [run for run in effective if check not in run.tripped]
    escaped = tuple(f"{run.where}: tripped {', '.join(run.tripped) or 'nothing'}" for run in missed)
    return KindResult(
        kind=kind,
        check=check,
        effective=len(effective),
        no_ops=len(mine) - len(effective),
        caught=len(effective) - len(escaped),
        tripped={name: sum(name in run.tripped for run in effective) for name in checks()},
        published={rule: sum(rule in run.published for run in effective) for rule in rules},
        escaped=escaped,
    )


def benign_result(found: Sequence[Run], rules: Sequence[str]) -> BenignResult:
    mine = [run for run in found if run.role == "benign"]
    alarms = [run for run in mine if run.tripped]
    return BenignResult(
        num_runs=len(mine),
        subjects=dict(Counter(run.subject for run in mine)),
        false_alarms=len(alarms),
        published={rule: sum(rule in run.published for run in mine) for rule in rules},
        named=tuple(f"{run.subject}, {run.where}: {', '.join(run.tripped)}" for run in alarms),
    )


def problems(kinds: Sequence[KindResult], benign: BenignResult) -> list[str]:
    """Why the drill fails, a line each; empty when every effective fault was caught and nothing sound was.

    Too little evidence fails too: a kind without an effective run, too many no-ops, too few sound runs.
    """
    limits, found = load_limits("drill", PLAN), []
    for one in kinds:
        if not one.effective:
            found.append(f"{one.kind}: no run changed the oracle, so nothing was shown")
        if one.escaped:
            found.append(f"{one.kind}: {len(one.escaped)} of {one.effective} escaped {one.check}; {one.escaped[0]}")
    if benign.false_alarms:
        found.append(f"{benign.false_alarms} of {benign.num_runs} sound runs raised an alarm; {benign.named[0]}")
    if benign.num_runs < limits.value("min_benign"):
        found.append(f"{benign.num_runs} sound runs; at least {limits.value('min_benign'):.0f}")
    total = sum(one.effective + one.no_ops for one in kinds)
    share = sum(one.no_ops for one in kinds) / total if total else math.nan
    if not share <= limits.value("no_ops"):
        found.append(f"{share:.1%} of the faults are no-ops; at most {limits.value('no_ops'):.0%}")
    return found
