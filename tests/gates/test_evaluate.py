"""Great Expectations lets missing evidence pass; `evaluate` does not. One test a trap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attention.errors import UserError
from gates.evaluate import SUITES, Note, Suite, evaluate, load_suite
from gates.thresholds import Limits, Threshold, load_limits
from gates.verdict import Check, Verdict

LIMITS = Limits("test", "demo", (("limit", Threshold(value=1.0, owner="me", reason="because")),))
NOTES = {"error": Note("error +50 %", 3, "case 7")}


def suite(*, kind: str = "expect_column_max_to_be_between", **more: Any) -> Suite:
    meta = more.pop("meta", {})
    kwargs = more.pop("kwargs", {"column": "err", "max_value": {"$PARAMETER": "limit"}})
    one = {"type": kind, "kwargs": kwargs, "meta": {"check": "error", **meta}, **more}
    return Suite.model_validate({"name": "t", "expectations": [one]})


def judge(values: list[Any], made: Suite | None = None, limits: Limits = LIMITS) -> Check:
    [check] = evaluate(made or suite(), pd.DataFrame({"err": values}), limits, NOTES)
    return check


def test_a_figure_within_its_limit_passes_with_owner_reason_and_detectable_effect() -> None:
    check = judge([0.5, 0.7])
    assert check.verdict is Verdict.PASS
    assert (check.observed, check.limit, check.direction) == (0.7, 1.0, "max")
    assert (check.owner, check.reason, check.detectable, check.num_evidence) == ("me", "because", "error +50 %", 3)


def test_a_figure_beyond_its_limit_fails_and_names_the_case() -> None:
    check = judge([0.5, 1.5])
    assert check.verdict is Verdict.FAIL
    assert check.message == "error: 1.5 is not <= 1; case 7"


def test_an_expectation_of_an_unknown_type_is_not_silently_dropped() -> None:
    check = judge([0.5], suite(kind="expect_nope"))
    assert check.verdict is Verdict.ERROR
    assert "dropped" in check.message


def test_a_mistyped_severity_is_not_silently_dropped() -> None:
    assert judge([0.5], suite(severity="fatal")).verdict is Verdict.ERROR


def test_a_mistyped_argument_is_an_error() -> None:
    bad = suite(kwargs={"column": "err", "maxvalue": 1.0})
    assert judge([0.5], bad).verdict is Verdict.ERROR


@pytest.mark.parametrize("kind", ["expect_column_max_to_be_between", "expect_column_values_to_be_between"])
@pytest.mark.parametrize("values", [[0.5, float("nan")], [None, 0.5], [float("nan")], [None]])
def test_a_null_or_nan_figure_is_an_error(kind: str, values: list[Any]) -> None:
    assert judge(values, suite(kind=kind)).verdict is Verdict.ERROR


def test_an_infinite_figure_never_passes_on_either_side() -> None:
    assert judge([float("inf")]).verdict is Verdict.FAIL
    assert judge([float("-inf")]).verdict is Verdict.ERROR
    least = suite(
        kind="expect_column_min_to_be_between", kwargs={"column": "err", "min_value": {"$PARAMETER": "limit"}}
    )
    assert judge([float("inf")], least).verdict is Verdict.ERROR


@pytest.mark.parametrize("kind", ["expect_column_max_to_be_between", "expect_column_values_to_be_between"])
def test_an_empty_frame_is_inconclusive(kind: str) -> None:
    assert judge([], suite(kind=kind)).verdict is Verdict.INCONCLUSIVE


def test_a_missing_column_is_an_error() -> None:
    [check] = evaluate(suite(), pd.DataFrame({"other": [0.5]}), LIMITS, NOTES)
    assert check.verdict is Verdict.ERROR


def test_a_column_of_text_is_an_error() -> None:
    assert judge(["much"]).verdict is Verdict.ERROR


def test_a_missing_parameter_is_an_error() -> None:
    check = judge([0.5], limits=Limits("test", "demo", ()))
    assert check.verdict is Verdict.ERROR
    assert "no limit 'limit'" in check.message


def test_a_check_that_states_no_detectable_effect_cannot_pass() -> None:
    [check] = evaluate(suite(), pd.DataFrame({"err": [0.5]}), LIMITS, {})
    assert check.verdict is Verdict.ERROR


def test_a_check_without_evidence_is_inconclusive() -> None:
    [check] = evaluate(suite(), pd.DataFrame({"err": [0.5]}), LIMITS, {"error": Note("x 1 %", 0)})
    assert check.verdict is Verdict.INCONCLUSIVE


def test_severities_are_verdicts() -> None:
    assert judge([1.5], suite(severity="critical")).verdict is Verdict.FAIL
    assert judge([1.5], suite(severity="warning")).verdict is Verdict.INCONCLUSIVE
    assert judge([1.5], suite(meta={"violated": "error"})).verdict is Verdict.ERROR
    recorded = judge([1.5], suite(severity="info"))
    assert recorded.verdict is Verdict.PASS
    assert "recorded only" in recorded.message
    assert recorded.detectable.startswith("recorded: ")


def interval(low: float, high: float) -> Check:
    made = [
        {
            "type": "expect_column_max_to_be_between",
            "kwargs": {"column": column, "max_value": {"$PARAMETER": "limit"}},
            "severity": severity,
            "meta": {"check": "error", "observed": "value"},
        }
        for column, severity in (("low", "critical"), ("high", "warning"))
    ]
    frame = pd.DataFrame([{"value": (low + min(high, 9)) / 2, "low": low, "high": high}])
    [check] = evaluate(Suite.model_validate({"name": "t", "expectations": made}), frame, LIMITS, NOTES)
    return check


def test_an_interval_passes_below_its_limit_fails_above_it_and_is_inconclusive_across() -> None:
    assert interval(0.5, 0.9).verdict is Verdict.PASS
    assert interval(0.5, 1.2).verdict is Verdict.INCONCLUSIVE
    assert interval(0.5, float("inf")).verdict is Verdict.INCONCLUSIVE
    assert interval(1.1, 1.9).verdict is Verdict.FAIL
    assert interval(1.1, 1.9).observed == pytest.approx(1.5)


@pytest.mark.parametrize("value", [-1e-9, -3.0, float("-inf")])
def test_a_figure_below_zero_is_no_pass_however_it_is_limited(value: float) -> None:
    check = judge([0.5, value])
    assert check.verdict is Verdict.ERROR
    assert check.message == f"error: err is {value:.4g}, and no such figure is below 0; case 7"
    for severity in ("warning", "info"):
        assert judge([0.5, value], suite(severity=severity)).verdict is Verdict.ERROR
        assert judge([1.5, value], suite(severity=severity)).verdict is Verdict.ERROR
    assert judge([1.5, value]).verdict is Verdict.FAIL, "what is beyond its limit stays so"
    assert interval(value, 0.9).verdict is interval(value, 1.2).verdict is Verdict.ERROR


def test_the_figure_that_is_shown_is_not_below_zero_either() -> None:
    shown = suite(meta={"observed": "shown"})
    [check] = evaluate(shown, pd.DataFrame({"err": [0.5], "shown": [-0.5]}), LIMITS, NOTES)
    assert check.verdict is Verdict.ERROR and "shown is -0.5" in check.message


def test_a_difference_may_be_below_zero_but_not_infinitely() -> None:
    assert judge([-0.5], suite(meta={"signed": True})).verdict is Verdict.PASS
    assert judge([float("-inf")], suite(meta={"signed": True})).verdict is Verdict.ERROR


SIGNED = {"nll_low", "nll_high", "length_change"}


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("value", [-1e-9, float("-inf")])
def test_no_suite_passes_a_figure_below_zero_but_a_difference(path: Path, value: float) -> None:
    made = load_suite(path.stem)
    names = {name for one in made.expectations for name in one.parameters}
    one = Threshold(value=1.0, owner="me", reason="because")
    limits = Limits("test", "demo", tuple((name, one) for name in sorted(names)))
    columns = {column for one in made.expectations for column in (one.column, one.meta.observed or one.column)}
    notes = {check: Note("any", 3) for check in made.checks}
    sound = evaluate(made, pd.DataFrame([dict.fromkeys(columns, 1.0)]), limits, notes)
    assert {check.verdict for check in sound} == {Verdict.PASS}
    assert {one.column for one in made.expectations if one.meta.signed} == columns & SIGNED
    differences = {one.meta.check for one in made.expectations if one.meta.signed}
    for check in evaluate(made, pd.DataFrame([dict.fromkeys(columns, value)]), limits, notes):
        assert check.verdict in (Verdict.ERROR, Verdict.FAIL) or check.check in differences


def test_every_suite_loads_into_gx_and_takes_its_limits_from_data() -> None:
    import great_expectations as gx

    for path in sorted(SUITES.glob("*.yaml")):
        loaded = load_suite(path.stem)
        form = [e.model_dump(include={"type", "kwargs", "severity"}) for e in loaded.expectations]
        assert len(gx.ExpectationSuite(name=path.stem, expectations=form).expectations) == len(form)
        assert all(expectation.parameters for expectation in loaded.expectations), path


def test_every_limit_of_the_thresholds_is_used_by_a_suite_or_the_gate_itself() -> None:
    gates = ("fingerprint", "probe", "replay", "baseline", "selection", "shadow", "canary")
    gates += ("expand", "drill")
    for gate in gates:
        source = "".join(path.read_text() for path in SUITES.parent.glob(f"{gate}*.py"))
        suites = [load_suite(path.stem) for path in SUITES.glob(f"{gate}*.yaml")]
        used = {name for one in suites for e in one.expectations for name in e.parameters}
        for name, _ in load_limits(gate, "demo").thresholds:
            name = name.partition(".")[0]  # r_rms.float32 stands in for r_rms
            assert name in used or f'"{name}"' in source, f"{gate}.{name}"


def test_a_suite_that_is_not_in_form_is_one_line_to_mend(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("name: odd\nexpectations: []\n")
    with pytest.raises(UserError, match="not a suite"):
        load_suite("odd", tmp_path)


def test_importing_a_gate_imports_neither_great_expectations_nor_torch() -> None:
    code = (
        "import sys, gates.replay, gates.drill, gates.canary, gates.expand, gates.shadow, gates.report\n"
        "print([m for m in ('great_expectations', 'torch', 'prefect', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
