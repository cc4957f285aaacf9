"""The business layer of the replay gate: too little to judge, worse, different, broken."""

from __future__ import annotations

from typing import Any

import pytest

from data.lake import Lake
from data.plan import Plan, load_plan
from gates.business import business_checks
from gates.thresholds import load_limits
from gates.verdict import GateReport, Verdict

CATEGORIES = ("copy", "json", "refusal")
NUM_PROMPTS = 150  # of which the champion passes 40 a category


def business(evidence: Any, plan: Plan, num_planned: int = 48) -> GateReport:
    with Lake(evidence.lake) as tables:
        limits = load_limits("replay", plan.name)
        found = business_checks(tables, evidence.release, plan, limits, num_planned=num_planned)
    return GateReport(stage="replay", checks=tuple(found))


def numbered(row: dict[str, Any]) -> int:
    return int(row["prompt_id"][1:])


def losing(*numbers: int) -> Any:
    return lambda r: r | {"passed": r["passed"] and not (r["side"] == "candidate" and numbered(r) in numbers)}


def test_five_lost_prompts_and_none_won_are_worse(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(losing(1, 2, 3, 5, 6))
    found = judged(business(evidence, plan))
    assert "business.mcnemar_p" in found.named(Verdict.FAIL)
    assert found.checks["business.mcnemar_p"].message.endswith("lost: g1, g2, g3, g5, g6")


def test_four_lost_prompts_are_not_shown_to_be_worse_and_the_pass_says_what_would(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.golden(losing(1, 2, 3, 5))
    found = judged(business(evidence, plan))
    assert found.checks["business.mcnemar_p"].verdict is Verdict.PASS
    assert found.checks["business.mcnemar_p"].detectable == "5 prompts lost of 48 (10 %)"


def test_as_many_won_as_lost_fails_the_flip_rate_alone(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(lambda r: r | {"passed": numbered(r) % 4 > 0 if r["side"] == "champion" else numbered(r) % 4 < 3})
    assert judged(business(evidence, plan)).named(Verdict.FAIL) == {"business.flip_rate"}


def test_a_champion_that_passes_too_little_cannot_show_a_loss(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(lambda r: r | {"passed": numbered(r) < 10})
    assert judged(business(evidence, plan)).named(Verdict.INCONCLUSIVE) == {"business.champion_passes"}


def test_a_plan_that_asks_for_less_than_a_loss_takes_is_inconclusive_still(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    """Four successes: even if all were lost, the paired test would not call it worse."""
    few = plan.model_copy(update={"replay": plan.replay.model_copy(update={"min_golden_passes": 1})})
    evidence.golden(lambda r: r | {"passed": numbered(r) < 4})
    found = judged(business(evidence, few))
    assert found.named(Verdict.INCONCLUSIVE) == {"business.champion_passes"}
    assert "champion passed 4 of 48; 5 lost would show" in found.report.reason


def test_a_prompt_with_an_error_or_without_a_grade_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    broken = {"error": "timeout", "passed": None}
    evidence.golden(lambda r: r | broken if r["side"] == "candidate" and r["prompt_id"] == "g4" else r)
    assert "business.errors" in judged(business(evidence, plan)).named(Verdict.ERROR)


def test_a_prompt_that_only_the_champion_answered_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(lambda r: None if r["side"] == "candidate" and r["prompt_id"] == "g4" else r)
    assert "business.lost_prompts" in judged(business(evidence, plan)).named(Verdict.ERROR)


def test_fewer_prompts_than_planned_are_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(lambda row: row if numbered(row) < 20 else None)
    assert judged(business(evidence, plan, num_planned=21)).named(Verdict.ERROR) == {"business.planned_prompts"}


def test_without_any_row_nothing_passes(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.model()
    found = judged(business(evidence, plan))
    assert found.named(Verdict.INCONCLUSIVE) == set(found.checks)


def test_a_prompt_graded_twice_passed_if_it_always_did(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden(losing(1, 2, 3, 5, 6))
    evidence.golden()
    assert "business.mcnemar_p" in judged(business(evidence, plan)).named(Verdict.FAIL)


def in_categories(mend: Any) -> Any:
    """The evidence of a whole set: prompt g<n> is in category n % 3, the champion passes its first 40 of 50."""

    def change(row: dict[str, Any]) -> dict[str, Any]:
        number = numbered(row)
        return mend(row | {"category": CATEGORIES[number % 3], "passed": number // 3 < 40}, number)

    return change


@pytest.fixture
def full() -> Plan:
    return load_plan("full")


def judge_set(evidence: Any, plan: Plan, judged: Any, mend: Any) -> Any:
    evidence.golden(in_categories(mend), num=NUM_PROMPTS)
    return judged(business(evidence, plan, num_planned=NUM_PROMPTS))


def test_each_category_states_the_smallest_loss_that_it_could_have_shown(
    evidence: Any, full: Plan, judged: Any
) -> None:
    """Three categories share the error rate: six losses a category, five in the whole set."""
    found = judge_set(evidence, full, judged, lambda row, number: row)
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["business.mcnemar_p"].detectable == "5 prompts lost of 150 (3.3 %)"
    assert found.checks["business.json.mcnemar_p"].detectable == "6 prompts lost of 50 (12 %)"
    assert found.checks["business.json.flip_rate"].detectable == "flip rate 7.9 % (0 of 50, 98.3 %)"
    assert found.checks["business.json.champion_passes"].observed == 40


def test_a_category_that_the_champion_passes_too_seldom_is_inconclusive(evidence: Any, full: Plan, judged: Any) -> None:
    """29 right answers of one category are too few, however many there are in the others."""
    found = judge_set(
        evidence,
        full,
        judged,
        lambda row, number: row | {"passed": row["passed"] and (number % 3 != 1 or number // 3 < 29)},
    )
    assert found.named(Verdict.INCONCLUSIVE) == {"business.json.champion_passes"}
    assert found.verdict is Verdict.INCONCLUSIVE


def test_a_loss_in_one_category_fails_there_and_is_named(evidence: Any, full: Plan, judged: Any) -> None:
    found = judge_set(
        evidence,
        full,
        judged,
        lambda row, n: row | {"passed": row["passed"] and not (row["side"] == "candidate" and n % 3 == 1 and n < 21)},
    )
    assert found.named(Verdict.FAIL) == {"business.mcnemar_p", "business.json.mcnemar_p"}
    assert "g1, g10" in found.checks["business.json.mcnemar_p"].message


def test_flips_that_cancel_in_one_category_fail_its_flip_rate_though_the_set_passes(
    evidence: Any, full: Plan, judged: Any
) -> None:
    def mend(row: dict[str, Any], number: int) -> dict[str, Any]:
        swapped = number % 3 == 1 and (number // 3 < 5 or number // 3 >= 45)
        return row | {"passed": row["passed"] != (swapped and row["side"] == "candidate")}

    evidence.golden(in_categories(mend), num=NUM_PROMPTS)
    found = judged(business(evidence, full, num_planned=NUM_PROMPTS))
    assert found.named(Verdict.FAIL) == {"business.json.flip_rate"}


def test_the_demo_judges_its_small_sample_as_a_whole(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.golden()
    assert {name.count(".") for name in judged(business(evidence, plan)).checks} == {1}
