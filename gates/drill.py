"""Gate of the drill: does every layer catch the faults that it is there for, and nothing sound?

Tensor checks are the expectations of the replay gate's own suites, bounded by its own limits, so that a limit or an
expectation that is taken out there is missed here. Great Expectations takes tens of milliseconds a frame and a drill
has thousands: `tripped` does the comparison itself, and a test holds it to `evaluate()`. What a whole release shows is
judged by the gates' own `judge` (tasks/drill_release.py); its outcomes are counted here.

A run is what a replay sees of one candidate: all kinds of inputs of one draw together, judged as gates/replay.py judges
a dtype class. A fault counts unless it is a no-op: injected into the float64 oracle it changes neither output nor LSE
beyond the class's own error, and makes nothing non-finite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from attention.drill.rows import Figures, Row
from gates.evaluate import Expectation, load_suite
from gates.thresholds import Limits, load_limits

SUITES = ("replay_tensor", "replay_beside", "replay_lse")
#: Columns that are there only where a backend gives an LSE, or the champion ran too.
_OPTIONAL = ("lse", "times_champion", "pooled_times_champion")
PLAN = "full"
OURS = "ours"


@dataclass(frozen=True)
class Single:
    """One problem that a fault changes, judged by itself: who rejects it (`ours`, and published rules)."""

    inputs: str
    rejected_by: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One candidate's replay: which checks tripped, and which published rules reject it (None: they judge none).

    `kind` is the fault, None for what is sound; `no_op` is False for that. `singles` are the problems in it that the
    fault changes.
    """

    kind: str | None
    subject: str
    where: str
    no_op: bool
    tripped: tuple[str, ...]
    published: tuple[str, ...] | None = ()
    singles: tuple[Single, ...] = ()


@lru_cache
def expectations() -> tuple[Expectation, ...]:
    """Every expectation of the tensor layer's figures that can fail a release; recorded ones cannot."""
    found = tuple(e for name in SUITES for e in load_suite(name).expectations if e.severity == "critical")
    for one in found:
        if one.direction != "max" or len(one.parameters) != 1:
            raise ValueError(f"{one.meta.check}: the drill judges upper limits by name only")
    return found


def checks() -> tuple[str, ...]:
    """Names of the tensor layer's checks of figures."""
    return tuple(dict.fromkeys(_name(one) for one in expectations()))


def _name(one: Expectation) -> str:
    return f"tensor.{one.meta.check}"


def tripped(figures: Sequence[Figures], limits: Limits, without: str | None = None) -> tuple[str, ...]:
    """Names of the checks that some figures together fail. No figure at all, or a NaN, is a failure.

    Exceptions are those of gates/replay_tensor.py: an LSE that a backend never gives, a champion that ran no such case.
    """
    found = []
    for one in expectations():
        values = _column(figures, one.column)
        held = all(0 <= value <= limits.value(one.parameters[0]) for value in values)
        absent = not values and one.column not in _OPTIONAL
        if _name(one) != without and (absent or not held):
            found.append(_name(one))
    return tuple(found)


def _column(figures: Sequence[Figures], column: str) -> list[float]:
    """Figures of one column of the gate's frame, as gates/replay_tensor.py has it."""
    pairs = [(one.r_rms, _finite(one.champion_r_rms)) for one in figures if one.champion_r_rms is not None]
    if column == "times_champion":
        return [r_rms / max(champion, 1.0) for r_rms, champion in pairs]
    if column == "pooled_times_champion":
        mine, theirs = (math.hypot(*(pair[side] for pair in pairs)) for side in (0, 1))
        return [mine / theirs if theirs else math.nan] if pairs else []
    return [value for value in (getattr(one, column) for one in figures) if value is not None]


def _finite(value: float) -> float:
    """NaN for a champion of infinite error, beside whom all would be well."""
    return value if 0 <= value < math.inf else math.nan


def is_no_op(rows: Sequence[Row], limit: float) -> bool:
    """Whether a fault left the oracle as it is, within the class's own error, on every row."""
    return not any(_changes(row, limit) for row in rows)


def _changes(row: Row, limit: float) -> bool:
    effect = row.effect
    if effect is None:
        return False
    ratios = (effect.r_rms, effect.r_max, effect.r_row, row.lse_effect)
    # A NaN is a change: it is no number within the limit.
    return bool(effect.num_masks) or not all(ratio <= limit for ratio in ratios)


def runs(rows: Iterable[Row], without: str | None = None) -> list[Run]:
    """Rows of one draw or more as judged runs, in the order of the rows."""
    effect = load_limits("drill", PLAN).value("effect")
    ordered = sorted(rows, key=lambda row: row.run)
    return [_judged(list(group), without, effect) for _, group in groupby(ordered, key=lambda row: row.run)]


def _judged(rows: list[Row], without: str | None, effect: float) -> Run:
    first = rows[0]
    limits = load_limits("replay", PLAN).of_class(first.dtype)
    changing = [row for row in rows if _changes(row, effect)]
    found = tripped([row.figures for row in rows if row.figures is not None], limits, without)
    return Run(
        kind=first.kind,
        subject=first.subject,
        where=f"{first.dtype} {first.phase} {first.batch} {first.layout} {first.feature} seed {first.seed}",
        no_op=first.kind is not None and not changing,
        tripped=found + _not_run(rows),
        published=tuple(sorted({rule for row in rows for rule, rejects in row.published.items() if rejects})),
        singles=tuple(_single(row, limits, without) for row in changing),
    )


def _not_run(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the replay gate's `errors` and `confirmed` say: a call that raised, and another kernel than was asked."""
    found = []
    if any(row.error is not None for row in rows):
        found.append("tensor.errors")
    if any(row.confirmed not in (None, row.backend) for row in rows):
        found.append("tensor.confirmed")
    return tuple(found)


def _single(row: Row, limits: Limits, without: str | None) -> Single:
    ours = (OURS,) if tripped([] if row.figures is None else [row.figures], limits, without) else ()
    return Single(row.inputs, (*ours, *(rule for rule, rejects in row.published.items() if rejects)))


def singles(found: Sequence[Run], judges: Sequence[str], inputs: str | None = None) -> tuple[int, dict[str, int]]:
    """Problems that a fault changes, of one kind of inputs or all, and how many each judge rejects by itself."""
    mine = [one for run in found for one in run.singles if inputs in (None, one.inputs)]
    return len(mine), {judge: sum(judge in one.rejected_by for one in mine) for judge in judges}


@dataclass(frozen=True)
class Expected:
    """A kind of fault by name, and the check that must catch it: `layer.check`."""

    kind: str
    check: str


@dataclass(frozen=True)
class KindResult:
    """All runs of one kind of fault. `caught` by the check that the kind names, `escaped` it; `tripped` counts the
    effective runs that each check trips, `published` those that each rule rejects (empty where they judge nothing)."""

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


def kind_result(expected: Expected, found: Sequence[Run], rules: Sequence[str]) -> KindResult:
    mine = [run for run in found if run.kind == expected.kind]
    effective = [run for run in mine if not run.no_op]
    missed = [run for run in effective if expected.check not in run.tripped]
    escaped = tuple(f"{run.subject}, {run.where}: tripped {', '.join(run.tripped) or 'nothing'}" for run in missed)
    return KindResult(
        kind=expected.kind,
        check=expected.check,
        effective=len(effective),
        no_ops=len(mine) - len(effective),
        caught=len(effective) - len(escaped),
        tripped=dict(Counter(name for run in effective for name in run.tripped)),
        published=_rejected(mine, effective, rules),
        escaped=escaped,
    )


def _rejected(mine: Sequence[Run], counted: Sequence[Run], rules: Sequence[str]) -> dict[str, int]:
    if any(run.published is None for run in mine):
        return {}
    return {rule: sum(rule in (run.published or ()) for run in counted) for rule in rules}


def benign_result(found: Sequence[Run], rules: Sequence[str]) -> BenignResult:
    mine = [run for run in found if run.kind is None]
    alarms = [run for run in mine if run.tripped]
    return BenignResult(
        num_runs=len(mine),
        subjects=dict(Counter(run.subject for run in mine)),
        false_alarms=len(alarms),
        published={rule: sum(rule in (run.published or ()) for run in mine) for rule in rules},
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
