"""What a gate says: a verdict for each check, the worst of them for the gate.

`pass < inconclusive < error < fail`. A pass cannot be built without a finite figure, evidence behind
it and the smallest effect that this evidence could have shown; a report without checks is an error.
`fail_closed` turns any exception inside a gate into an error check, so nothing passes by accident.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal, ParamSpec

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from attention.errors import EvidenceError, UserError
from attention.schemas import write_rows

P = ParamSpec("P")
Direction = Literal["max", "min", "equal"]


class Verdict(StrEnum):
    """In the order of badness: the worst wins."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    FAIL = "fail"

    @property
    def badness(self) -> int:
        return list(Verdict).index(self)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst verdict; `error` for none at all, because a gate that checked nothing is broken."""
    return max(verdicts, key=lambda verdict: verdict.badness, default=Verdict.ERROR)


class Check(BaseModel):
    """One judged figure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    verdict: Verdict
    observed: float | None = Field(default=None, allow_inf_nan=False)
    limit: float | None = Field(default=None, allow_inf_nan=False)
    direction: Direction = "max"  # max: observed must not exceed the limit
    detectable: str = ""  # smallest effect that this evidence could have shown, with a figure
    num_evidence: int = Field(default=0, ge=0)  # rows, pairs or cases behind the figure
    owner: str = ""  # who may change the limit
    reason: str = ""  # why the limit is what it is
    message: str = ""

    @model_validator(mode="after")
    def _a_pass_shows_its_evidence(self) -> Check:
        if self.verdict is Verdict.PASS:
            if self.observed is None:
                raise ValueError(f"check {self.check}: a pass needs an observed figure")
            if not self.detectable:
                raise ValueError(f"check {self.check}: a pass needs its smallest detectable effect")
            if self.num_evidence < 1:
                raise ValueError(f"check {self.check}: a pass needs evidence")
        return self


class GateReport(BaseModel):
    """What one gate found. `verdict` follows from the checks and cannot be set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    checks: tuple[Check, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        return worst(check.verdict for check in self.checks)

    @property
    def decisive(self) -> tuple[Check, ...]:
        """The checks that gave the verdict; empty for a pass."""
        if self.verdict is Verdict.PASS:
            return ()
        return tuple(check for check in self.checks if check.verdict is self.verdict)

    @property
    def reason(self) -> str:
        """One line: why the gate did not pass, or how many checks passed."""
        if not self.checks:
            return f"{self.stage}: nothing was checked"
        if not self.decisive:
            return f"{self.stage}: {len(self.checks)} checks passed"
        first, others = self.decisive[0], len(self.decisive) - 1
        return f"{self.stage}: {first.message or first.check}" + (f" (and {others} more)" if others else "")

    def write(
        self,
        lake: Path,
        release_id: str,
        *,
        gpu: str,
        model: str,
        fingerprint_id: str | None = None,
        side: str = "candidate",
    ) -> Path | None:
        """Append one `gate_results` row a check; returns the file."""
        common = {
            "gpu": gpu,
            "model": model,
            "fingerprint_id": fingerprint_id,
            "side": side,
            "node": platform.node(),
            "time": datetime.now(UTC),
            "stage": self.stage,
        }
        rows = [{**common, **check.model_dump(mode="json")} for check in self.checks]
        return write_rows(lake, "gate_results", rows, release_id=release_id)


@dataclass(frozen=True)
class Breach:
    """Why a candidate must lose its traffic at once: in words, and as a figure above its limit where there is one."""

    why: str
    observed: float | None = None
    limit: float | None = None

    def check(self, num_evidence: int = 0) -> Check:
        """The failed check of the stage that it ended."""
        return Check(
            check="breach",
            verdict=Verdict.FAIL,
            observed=self.observed,
            limit=self.limit,
            num_evidence=num_evidence,
            message=f"breach: {self.why}",
        )


def error_check(check: str, message: str) -> Check:
    """A check that could not be made."""
    return Check(check=check, verdict=Verdict.ERROR, message=f"{check}: {message}")


def fail_closed(stage: str) -> Callable[[Callable[P, list[Check]]], Callable[P, GateReport]]:
    """Make a function that lists checks into a gate: an exception becomes an error check.

    UserError passes through: a mistyped threshold is the user's to mend, not a verdict.
    """

    def decorate(list_checks: Callable[P, list[Check]]) -> Callable[P, GateReport]:
        @functools.wraps(list_checks)
        def judge(*args: P.args, **kwargs: P.kwargs) -> GateReport:
            try:
                checks = list_checks(*args, **kwargs)
            except Exception as error:
                if isinstance(error, UserError) and not isinstance(error, EvidenceError):
                    raise
                text = " ".join(str(error).split())[:300]
                checks = [error_check(stage, f"the gate itself broke: {type(error).__name__}: {text}")]
            return GateReport(stage=stage, checks=tuple(checks))

        return judge

    return decorate
