"""A gate's report as plain rows, for a terminal table and for report.html alike."""

from __future__ import annotations

from dataclasses import dataclass

from gates.verdict import Check, GateReport

_SIGNS = {"max": "<=", "min": ">=", "equal": "="}


@dataclass(frozen=True)
class Row:
    """One check, every field ready to print."""

    check: str
    verdict: str
    observed: str
    limit: str  # with its sign: `<= 2`, `>= 30`, `= 0`
    detectable: str
    num_evidence: int
    owner: str
    reason: str
    message: str


def table(report: GateReport) -> list[Row]:
    """One row a check, the worst first, otherwise in the order they were made."""
    ranked = sorted(report.checks, key=lambda check: -check.verdict.badness)
    return [_row(check) for check in ranked]


def _row(check: Check) -> Row:
    return Row(
        check=check.check,
        verdict=check.verdict.value,
        observed=figure(check.observed),
        limit="" if check.limit is None else f"{_SIGNS[check.direction]} {figure(check.limit)}",
        detectable=check.detectable,
        num_evidence=check.num_evidence,
        owner=check.owner,
        reason=check.reason,
        message=check.message,
    )


def figure(value: float | None) -> str:
    """Four significant digits, whole numbers as such, `-` for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"
