"""The knee of the stress run: candidate against champion, at every concurrency."""

from __future__ import annotations

import math
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from data.lake import Lake
from data.plan import StressPlan
from gates import stress
from gates.stress import Level, knee
from gates.thresholds import load_limits
from gates.verdict import Check, Verdict, worst

LIMITS = load_limits("stress", "full")
SHARE = LIMITS.value("good_share")
PLAN = StressPlan(max_running=(4,), saturation_requests=16, duration_s=100, slo_ttft_s=2, slo_tpot_s=0.2)
BENT = (100, 160, 160, 60)  # good of 100, 160, 200 and 240 requests: the knee lies between 80 % and 100 %


def levels(*good: int, scale: int = 1) -> list[Level]:
    """At 1, 1.6, 2 and 2.4 requests a second."""
    rates = (1.0, 1.6, 2.0, 2.4)
    return [Level(r, round(100 * r) * scale, g * scale) for r, g in zip(rates, good, strict=False)]


def rows(evidence: Any, side: str, *good: int, running: int = 4, **changed: Any) -> list[dict[str, Any]]:
    return [
        {
            **evidence.common(side),
            "max_running": running,
            "level": level,
            "rate_per_s": one.rate_per_s,
            "num_offered": one.num_offered,
            "num_good": one.num_good,
            "num_failed": 0,
            "num_fallbacks": 0,
            "num_out_of_memory": 0,
            **changed,
        }
        for level, one in zip(PLAN.levels, levels(*good), strict=True)
    ]


def judge(evidence: Any, plan: StressPlan = PLAN) -> dict[str, Check]:
    with Lake(evidence.lake, release_id=evidence.release) as tables:
        found = stress.checks(tables, evidence.release, plan, LIMITS)
    return {check.check.removeprefix("stress.4_running."): check for check in found}


def compared(evidence: Any, champion: Any, candidate: Any) -> dict[str, Check]:
    evidence.write("perf_stress", [*champion, *candidate])
    return judge(evidence)


def verdict(checks: dict[str, Check]) -> Verdict:
    return worst(check.verdict for check in checks.values())


def blamed(checks: dict[str, Check], kind: Verdict) -> set[str]:
    return {name for name, check in checks.items() if check.verdict is kind}


def test_the_knee_lies_where_the_share_of_good_requests_crosses_its_limit() -> None:
    found = knee(levels(100, 160, 160, 60), 0.9)
    assert found.value == pytest.approx(1.8), "100 % at 1.6/s, 80 % at 2/s"
    assert 1.6 < found.low < found.value < found.high < 2.0


def test_a_level_that_holds_above_one_that_fell_is_not_credited() -> None:
    assert knee(levels(100, 80, 200, 240), 0.9).value == knee(levels(100, 80, 0, 0), 0.9).value == pytest.approx(1.12)


def test_a_side_that_always_holds_has_its_knee_at_the_highest_rate_and_one_that_never_does_has_none() -> None:
    always = knee(levels(100, 160, 200, 240), 0.9)
    assert (always.value, always.low, always.high) == (2.4, 2.4, 2.4)
    never = knee(levels(10, 0, 0, 0), 0.9)
    assert math.isnan(never.value)
    assert (never.low, never.high) == (0.0, 1.0)


def test_more_good_requests_never_lower_the_knee_and_more_requests_narrow_it() -> None:
    knees = [knee(levels(100, 160, good, 100), 0.9) for good in range(0, 201, 10)]
    assert all(a.value <= b.value and a.low <= b.low and a.high <= b.high for a, b in pairwise(knees))
    few, many = knee(levels(*BENT), 0.9), knee(levels(*BENT, scale=20), 0.9)
    assert few.value == many.value
    assert many.high - many.low < 0.3 * (few.high - few.low)


def test_equal_sides_pass_with_the_loss_that_would_have_shown(evidence: Any) -> None:
    found = compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", *BENT))
    assert verdict(found) is Verdict.PASS
    assert found["knee"].observed == 1.0
    assert found["knee"].detectable.startswith("knee -")
    assert found["knee"].num_evidence == 700


def test_two_that_carry_all_that_was_offered_pass_and_say_how_much_that_was(evidence: Any) -> None:
    all_good = (100, 160, 200, 240)
    found = compared(evidence, rows(evidence, "champion", *all_good), rows(evidence, "candidate", *all_good))
    assert verdict(found) is Verdict.PASS
    assert found["knee"].detectable == "a knee below 2.4/s, the highest rate offered"


def test_a_candidate_that_carries_far_less_fails_and_says_how_much(evidence: Any) -> None:
    found = compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", 100, 40, 0, 0))
    assert blamed(found, Verdict.FAIL) == {"knee"}
    assert "the candidate carries 1.08/s (" in found["knee"].message
    assert "the champion 1.8/s (" in found["knee"].message


def test_a_candidate_that_carries_nothing_fails(evidence: Any) -> None:
    found = compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", 0, 0, 0, 0))
    assert blamed(found, Verdict.FAIL) == {"knee"}
    assert "the candidate carries no level (1/s at most)" in found["knee"].message


def test_too_few_requests_decide_nothing(evidence: Any) -> None:
    few = {"num_offered": 40, "num_good": 40}
    champion, candidate = (
        [
            row | (few if row["level"] < 1 else {"num_offered": 40, "num_good": good})
            for row in rows(evidence, side, *BENT)
        ]
        for side, good in (("champion", 32), ("candidate", 31))
    )
    assert blamed(compared(evidence, champion, candidate), Verdict.INCONCLUSIVE) == {"knee"}


@pytest.mark.parametrize("good", [(20, 10, 0, 0), (92, 0, 0, 0)])
def test_a_champion_without_a_knee_leaves_nothing_to_compare_with(evidence: Any, good: tuple[int, ...]) -> None:
    found = compared(evidence, rows(evidence, "champion", *good), rows(evidence, "candidate", *BENT))
    assert blamed(found, Verdict.INCONCLUSIVE) == {"knee"}
    assert f"at the lowest {good[0]} of 100 were; offer more requests" in found["knee"].message


@pytest.mark.parametrize("column", ["num_good", "num_offered", "num_failed", "rate_per_s"])
@pytest.mark.parametrize("side", ["champion", "candidate"])
def test_a_level_without_a_figure_is_an_error(evidence: Any, side: str, column: str) -> None:
    champion, candidate = (
        [row | ({column: None} if (one, row["level"]) == (side, 1.0) else {}) for row in rows(evidence, one, *BENT)]
        for one in ("champion", "candidate")
    )
    found = compared(evidence, champion, candidate)
    assert "levels" in blamed(found, Verdict.ERROR)
    assert found["levels"].message.endswith(f"{side} at 100% has no figures: its process was lost")
    assert "knee" not in found


def test_a_side_or_a_level_that_is_missing_is_an_error(evidence: Any) -> None:
    found = compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", *BENT)[:3])
    assert found["levels"].message.endswith("; candidate at 120% is missing")
    evidence.write("perf_stress", rows(evidence, "champion", *BENT, running=8))
    eight = judge(evidence, PLAN.model_copy(update={"max_running": (8,)}))
    assert eight["stress.8_running.levels"].verdict is Verdict.ERROR
    assert eight["stress.8_running.levels"].observed == 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_good": 500}, "candidate at 80%: 500 of 160 good at 1.6/s"),
        ({"num_offered": 0, "num_good": 0}, "candidate at 80%: 0 of 0 good at 1.6/s"),
        ({"rate_per_s": math.nan}, "candidate at 80% has no figures"),
        ({"rate_per_s": 1.7}, "at 80% the candidate was offered 1.7/s, the champion 1.6/s"),
    ],
)
def test_counts_that_cannot_be_and_rates_that_differ_are_errors(
    evidence: Any, changed: dict[str, Any], said: str
) -> None:
    candidate = [row | (changed if row["level"] == 0.8 else {}) for row in rows(evidence, "candidate", *BENT)]
    found = compared(evidence, rows(evidence, "champion", *BENT), candidate)
    assert "levels" in blamed(found, Verdict.ERROR)
    assert said in found["levels"].message


def test_a_request_that_fails_under_load_fails_the_candidate_and_of_the_champion_compares_with_nothing(
    evidence: Any,
) -> None:
    lost = rows(evidence, "candidate", *BENT, num_failed=2, num_out_of_memory=1)
    found = compared(evidence, rows(evidence, "champion", *BENT), lost)
    assert blamed(found, Verdict.FAIL) == {"failed"}
    assert found["failed"].message.endswith("2 at 50%, 2 at 80%, 2 at 100%, 2 at 120%")
    assert found["out_of_memory"].observed == 4
    evidence.write("perf_stress", _later(rows(evidence, "champion", *BENT, num_failed=1)))
    evidence.write("perf_stress", _later(rows(evidence, "candidate", *BENT)))
    assert blamed(judge(evidence), Verdict.INCONCLUSIVE) == {"comparable"}


def test_a_level_measured_again_replaces_its_earlier_row(evidence: Any) -> None:
    compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", 0, 0, 0, 0))
    evidence.write("perf_stress", _later(rows(evidence, "candidate", *BENT)))
    assert verdict(judge(evidence)) is Verdict.PASS


def test_each_concurrency_is_judged_by_itself_and_none_may_be_left_out(evidence: Any) -> None:
    both = PLAN.model_copy(update={"max_running": (4, 8)})
    compared(evidence, rows(evidence, "champion", *BENT), rows(evidence, "candidate", *BENT))
    found = judge(evidence, both)
    assert {found[name].verdict for name in ("levels", "knee")} == {Verdict.PASS}
    assert {check.verdict for name, check in found.items() if name.startswith("stress.8_running.")} == {
        Verdict.INCONCLUSIVE
    }


def test_a_lake_without_a_stress_run_is_inconclusive(evidence: Any) -> None:
    found = judge(evidence)
    assert set(found) == {"levels", "failed", "comparable", "fallbacks", "out_of_memory", "knee"}
    assert {check.verdict for check in found.values()} == {Verdict.INCONCLUSIVE}


def _later(again: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"time": row["time"] + timedelta(seconds=9)} for row in again]
