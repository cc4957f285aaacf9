"""One fail-closed `evaluate()` over Great Expectations: nothing but a clean result is a pass.

A suite (gates/suites/<name>.yaml) is in GX's JSON form: a list of expectations with `type`, `kwargs`,
`severity` and `meta`. It judges one small summary frame that a gate made with SQL. GX's severities are
the gate's verdicts: a violated `critical` expectation is a fail, `warning` inconclusive (too little
evidence, or an interval across its limit), `info` is recorded and never blocks. `meta.check` names the
check; expectations of one name form one check and the worst wins, so an interval is two of them: its
lower end `critical`, its upper end `warning`. `meta.observed` is the column to show, `meta.violated:
error` says that a violation means broken evidence. Limits are `{$PARAMETER: name}`, never literals.
A figure is a count, a share, a ratio or the size of an error: below 0 none was measured, and that is an
error, though it lies below every upper limit; `meta.signed` says of a difference that it may be.

GX 1.24 lets evidence pass that is missing, so `evaluate` closes these traps: an expectation of an
unknown type or severity is silently dropped (counted here); NaN and null are skipped before a bound
is checked (refused here); an empty frame satisfies every bound (refused here); a missing column or a
metric that raised looks like an ordinary failure (an error here).

`great_expectations` takes 2.5 s to import and is imported inside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from attention.errors import UserError
from attention.yaml_file import read_yaml
from gates.thresholds import Limits, Threshold
from gates.verdict import Check, Direction, Verdict, error_check, worst

if TYPE_CHECKING:
    import pandas as pd

SUITES = Path(__file__).parent / "suites"
_VIOLATED = {"critical": Verdict.FAIL, "warning": Verdict.INCONCLUSIVE, "info": Verdict.PASS}
_SIGNS = {"max": "<=", "min": ">=", "equal": "="}


class Meta(BaseModel):
    """What the project adds to an expectation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: str
    observed: str | None = None  # column to show; default: the column that is bounded
    violated: Literal["error"] | None = None
    signed: bool = False  # a difference: it may lie below 0


class Expectation(BaseModel):
    """One expectation in GX's JSON form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    kwargs: dict[str, Any]
    severity: str = "critical"
    meta: Meta

    @property
    def column(self) -> str:
        return str(self.kwargs.get("column", ""))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the limits that it compares with."""
        bounds = (value for value in self.kwargs.values() if isinstance(value, dict))
        return tuple(bound["$PARAMETER"] for bound in bounds if "$PARAMETER" in bound)

    @property
    def direction(self) -> Direction:
        bounds = self.kwargs.keys() & {"min_value", "max_value"}
        if len(bounds) == 2:
            return "equal"
        return "min" if "min_value" in bounds else "max"


class Suite(BaseModel):
    """The expectations of one gate over one frame."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    expectations: tuple[Expectation, ...] = Field(min_length=1)

    @property
    def checks(self) -> tuple[str, ...]:
        """Names of the checks, in the order of the suite."""
        return tuple(dict.fromkeys(expectation.meta.check for expectation in self.expectations))


@dataclass(frozen=True)
class Note:
    """What a check says beside its figure."""

    detectable: str  # smallest effect that the evidence could have shown
    num_evidence: int
    detail: str = ""  # names of what went wrong; shown unless the check passed


@dataclass(frozen=True)
class _Outcome:
    """One expectation, judged."""

    expectation: Expectation
    verdict: Verdict
    observed: float | None
    problem: str = ""


@lru_cache
def load_suite(name: str, folder: Path = SUITES) -> Suite:
    """Raises UserError for a suite that is not in GX's form with our meta."""
    path = folder / f"{name}.yaml"
    try:
        return Suite.model_validate(read_yaml(path))
    except ValueError as error:
        raise UserError(f"{path}: not a suite: {str(error).splitlines()[0]}") from error


def evaluate(
    suite: Suite, frame: pd.DataFrame, limits: Limits, notes: Mapping[str, Note], *, prefix: str = ""
) -> list[Check]:
    """One check a name of the suite; `prefix` goes before each name ("tensor.float32.").

    Never raises: whatever keeps a check from being made is an error check, and an empty frame, or a
    check without evidence, is inconclusive.
    """
    if frame.empty:
        return [_no_evidence(prefix + name, "no row of evidence") for name in suite.checks]
    try:
        outcomes: dict[str, list[_Outcome]] = {name: [] for name in suite.checks}
        for outcome in _validate(suite, frame, limits):
            outcomes[outcome.expectation.meta.check].append(outcome)
        return [_check(prefix + name, outcomes[name], limits, notes.get(name)) for name in suite.checks]
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [error_check(prefix + name, text) for name in suite.checks]


def _validate(suite: Suite, frame: pd.DataFrame, limits: Limits) -> list[_Outcome]:
    import great_expectations as gx

    # That module sets its own level, and tells of a temporary folder at every gate otherwise.
    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
    expectations = [
        # The index finds each result again; GX promises no order.
        {**expectation.model_dump(include={"type", "kwargs", "severity"}), "meta": {"index": index}}
        for index, expectation in enumerate(suite.expectations)
    ]
    built = gx.ExpectationSuite(name=suite.name, expectations=expectations)
    if len(built.expectations) != len(expectations):
        raise ValueError(f"suite {suite.name}: GX dropped an expectation (unknown type or severity)")
    names = {name for expectation in suite.expectations for name in expectation.parameters}
    parameters = {name: limits.value(name) for name in sorted(names)}
    batch = _frames().get_batch({"dataframe": frame})
    found = batch.validate(built, expectation_parameters=parameters or None).results
    results = {result.expectation_config.meta["index"]: result for result in found}
    if sorted(results) != list(range(len(expectations))):
        raise ValueError(f"suite {suite.name}: {len(found)} results for {len(expectations)} expectations")
    return [_outcome(e, results[i], frame) for i, e in enumerate(suite.expectations)]


@cache
def _frames() -> Any:
    """What makes a batch of a frame; one context a process, since a new one takes a fifth of an evaluation."""
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("lake").add_dataframe_asset("summary")
    return asset.add_batch_definition_whole_dataframe("all")


def _outcome(expectation: Expectation, result: Any, frame: pd.DataFrame) -> _Outcome:
    violated = Verdict(expectation.meta.violated) if expectation.meta.violated else None
    violated = violated or _VIOLATED[expectation.severity]
    raised = _exception_of(result)
    if raised:
        return _Outcome(expectation, Verdict.ERROR, None, raised)
    problem = _unusable(expectation.column, frame)
    if problem:
        return _Outcome(expectation, Verdict.ERROR, None, problem)
    observed = _shown(expectation, frame)
    verdict = Verdict.PASS if result.success else violated
    impossible = _below_zero(expectation, frame)
    if impossible and verdict is not Verdict.FAIL:
        return _Outcome(expectation, Verdict.ERROR, observed, impossible)
    infinite = any(math.isinf(value) for value in _values(expectation.column, frame))
    if verdict is Verdict.PASS and (infinite or observed is None):
        # An infinite figure can lie within a bound, but nobody measured it.
        return _Outcome(expectation, Verdict.ERROR, None, f"{expectation.column} has no finite figure")
    return _Outcome(expectation, verdict, observed, "" if result.success else "violated")


def _exception_of(result: Any) -> str:
    """Message of the exception that a metric of this expectation raised, if one did."""
    info = result.exception_info or {}
    entries = [info, *(value for value in info.values() if isinstance(value, dict))]
    for entry in entries:
        if entry.get("raised_exception"):
            return f"GX could not compute it: {str(entry.get('exception_message'))[:200]}"
    return ""


def _unusable(column: str, frame: pd.DataFrame) -> str:
    """Why the bounded column proves nothing; empty where it does."""
    if column not in frame.columns:
        return f"column {column!r} is missing"
    if any(math.isnan(value) for value in _values(column, frame)):
        return f"{column} is null or NaN: it was not measured"
    return ""


def _below_zero(expectation: Expectation, frame: pd.DataFrame) -> str:
    """Which figure, bounded or shown, is below 0 and so none; empty where there is none."""
    if expectation.meta.signed:
        return ""
    for column in dict.fromkeys((expectation.column, expectation.meta.observed or expectation.column)):
        least = min(_values(column, frame))
        if least < 0:
            return f"{column} is {least:.4g}, and no such figure is below 0"
    return ""


def _values(column: str, frame: pd.DataFrame) -> list[float]:
    import pandas as pd

    return [float(value) for value in pd.to_numeric(frame[column], errors="raise").astype(float)]


def _shown(expectation: Expectation, frame: pd.DataFrame) -> float | None:
    """Worst value of the column to show; None where it has no finite value."""
    values = _values(expectation.meta.observed or expectation.column, frame)
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values) or not finite:
        return None
    return min(finite) if expectation.direction == "min" else max(finite)


def _check(name: str, outcomes: Sequence[_Outcome], limits: Limits, note: Note | None) -> Check:
    if note is None:
        return error_check(name, "the gate states no detectable effect for it")
    verdict = worst(outcome.verdict for outcome in outcomes)
    decisive = next(outcome for outcome in outcomes if outcome.verdict is verdict)
    threshold = _threshold(decisive.expectation, limits)
    if note.num_evidence < 1 and verdict is not Verdict.FAIL:
        return _no_evidence(name, "no evidence", threshold, decisive.expectation.direction)
    # A figure that cannot hold a release says so where its effect is shown.
    judges = any(outcome.expectation.severity != "info" for outcome in outcomes)
    return Check(
        check=name,
        verdict=verdict,
        observed=decisive.observed,
        limit=threshold.value if threshold else None,
        direction=decisive.expectation.direction,
        detectable=note.detectable if judges else f"recorded: {note.detectable}",
        num_evidence=note.num_evidence,
        owner=threshold.owner if threshold else "",
        reason=threshold.reason if threshold else "",
        message=_message(name, verdict, decisive, threshold, note),
    )


def _threshold(expectation: Expectation, limits: Limits) -> Threshold | None:
    return limits[expectation.parameters[0]] if expectation.parameters else None


def _no_evidence(name: str, why: str, threshold: Threshold | None = None, direction: Direction = "max") -> Check:
    return Check(
        check=name,
        verdict=Verdict.INCONCLUSIVE,
        limit=threshold.value if threshold else None,
        direction=direction,
        owner=threshold.owner if threshold else "",
        reason=threshold.reason if threshold else "",
        message=f"{name}: {why}",
    )


def _message(name: str, verdict: Verdict, outcome: _Outcome, threshold: Threshold | None, note: Note) -> str:
    observed = "-" if outcome.observed is None else f"{outcome.observed:.4g}"
    limit = f" {_SIGNS[outcome.expectation.direction]} {threshold.value:.4g}" if threshold else ""
    if verdict is Verdict.PASS:
        aside = " (recorded only)" if outcome.problem else ""
        return f"{name}: {observed}{limit}{aside}"
    what = {
        Verdict.FAIL: f"{observed} is not{limit}",
        Verdict.INCONCLUSIVE: f"{observed} is not shown to be{limit}",
        Verdict.ERROR: outcome.problem if outcome.problem != "violated" else f"{observed} is not{limit}",
    }[verdict]
    return f"{name}: {what}" + (f"; {note.detail}" if note.detail else "")
