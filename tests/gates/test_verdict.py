"""The verdict is the worst of the checks, and a pass without evidence cannot be built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from attention.errors import UserError
from data.lake import Lake
from gates.report import figure, table
from gates.verdict import Check, GateReport, Verdict, error_check, fail_closed, worst

PASS = Check(check="a", verdict=Verdict.PASS, observed=0.0, limit=1.0, detectable="1 of 9", num_evidence=9)


def test_the_worst_verdict_wins() -> None:
    order = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL]
    for index, verdict in enumerate(order):
        assert worst(order[: index + 1]) is verdict


def test_a_gate_without_checks_is_an_error() -> None:
    assert GateReport(stage="probe", checks=()).verdict is Verdict.ERROR


@pytest.mark.parametrize("lacking", [{"observed": None}, {"detectable": ""}, {"num_evidence": 0}])
def test_a_pass_without_figure_evidence_or_detectable_effect_cannot_be_built(lacking: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="pass needs"):
        Check.model_validate(PASS.model_dump() | lacking)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_cannot_be_reported(value: float) -> None:
    with pytest.raises(ValidationError):
        Check(check="a", verdict=Verdict.FAIL, observed=value)


def test_the_reason_names_the_worst_check_and_how_many_more() -> None:
    fail = Check(check="b", verdict=Verdict.FAIL, observed=3.0, limit=2.0, message="b: 3 is not <= 2")
    report = GateReport(stage="replay", checks=(PASS, error_check("c", "broke"), fail, fail))
    assert report.verdict is Verdict.FAIL
    assert report.reason == "replay: b: 3 is not <= 2 (and 1 more)"
    assert GateReport(stage="replay", checks=(PASS,)).reason == "replay: 1 checks passed"


def test_an_exception_inside_a_gate_is_an_error_and_a_users_mistake_passes_through() -> None:
    @fail_closed("canary")
    def broken() -> list[Check]:
        raise ZeroDivisionError("no rows")

    @fail_closed("canary")
    def mistyped() -> list[Check]:
        raise UserError("thresholds.yaml: no such limit")

    assert broken().verdict is Verdict.ERROR
    assert "ZeroDivisionError: no rows" in broken().reason
    with pytest.raises(UserError):
        mistyped()


def test_a_report_is_one_gate_results_row_a_check_and_serialises_with_its_verdict(tmp_path: Path) -> None:
    report = GateReport(stage="probe", checks=(PASS, error_check("c", "broke")))
    report.write(tmp_path, "r1", gpu="cpu", model="m", fingerprint_id="f")
    with Lake(tmp_path) as lake:
        rows = lake.rows('select stage, "check", verdict, observed, num_evidence from gate_results order by "check"')
    assert rows == [("probe", "a", "pass", 0.0, 9), ("probe", "c", "error", None, 0)]
    assert json.loads(report.model_dump_json())["verdict"] == "error"


def test_the_table_shows_the_worst_first_with_limits_and_their_sign() -> None:
    fail = Check(check="b", verdict=Verdict.FAIL, observed=12.5, limit=40.0, direction="min")
    rows = table(GateReport(stage="probe", checks=(PASS, fail)))
    assert [(row.check, row.observed, row.limit) for row in rows] == [("b", "12.5", ">= 40"), ("a", "0", "<= 1")]
    assert [figure(x) for x in (None, 0.001234567, 3.0)] == ["-", "0.001235", "3"]
