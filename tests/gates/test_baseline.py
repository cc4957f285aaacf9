"""The baseline gate: prefill and decode apart, weighted by the traffic's work."""

from __future__ import annotations

import math
from typing import Any

import pytest

from data.plan import Plan
from gates import baseline
from gates.verdict import GateReport, Verdict


def judge(evidence: Any, plan: Plan, outcomes: Any = lambda row: row) -> GateReport:
    evidence.fingerprints()
    evidence.outcomes(outcomes)
    return baseline.judge(evidence.lake, evidence.release, plan)


def slower(factor: float, spread: float = 0.05) -> dict[str, Any]:
    return {"ratio": factor, "ratio_low": factor - spread, "ratio_high": factor + spread, "verdict": "SLOW"}


def test_a_faster_candidate_passes_with_the_slowdown_that_would_have_shown(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.samples()
    evidence.cells()
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["decode.kernel_s.ratio"].detectable == "decode kernel_s +8.8 %"
    assert found.checks["prefill.kernel_s.ratio"].observed == pytest.approx(0.9)


def test_a_slow_decode_fails_though_prefill_gained(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | slower(1.5) if row["family"] == "decode" else row | slower(0.5))
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"decode.kernel_s.ratio"}


def test_an_interval_across_the_margin_is_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | slower(1.25, spread=0.3))
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.INCONCLUSIVE) == {"decode.kernel_s.ratio", "prefill.kernel_s.ratio"}


def test_one_heavy_cell_that_is_far_slower_fails_and_a_light_one_does_not(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | slower(2.5) | {"weight": 0.005} if row["case_id"] == "decode2" else row)
    assert judge(evidence, plan).verdict is Verdict.PASS
    evidence.cells(
        lambda row: row | slower(2.5) | {"weight": 0.05, "case_id": "decode9"} if row["case_id"] == "decode2" else None
    )
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"decode.kernel_s.worst_cell"}
    assert "decode9" in found.report.reason


def test_cells_that_cover_too_little_work_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | {"weight": 0.1})
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.INCONCLUSIVE) == {"decode.kernel_s.weight", "prefill.kernel_s.weight"}


def test_too_few_blocks_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | {"num_blocks": 3})
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.INCONCLUSIVE) == {"decode.kernel_s.blocks", "prefill.kernel_s.blocks"}


def test_a_family_that_was_not_measured_is_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row if row["family"] == "prefill" else None)
    found = judged(judge(evidence, plan, lambda row: row if row["family"] == "prefill" else None))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert all(name.startswith("decode.") for name in found.named(Verdict.INCONCLUSIVE))


@pytest.mark.parametrize("column", ["ratio", "ratio_high", "weight"])
@pytest.mark.parametrize("value", [math.nan, None])
def test_a_cell_without_a_figure_is_an_error(evidence: Any, plan: Plan, column: str, value: float | None) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | {column: value} if row["case_id"] == "decode2" else row)
    assert judge(evidence, plan).verdict is Verdict.ERROR


def test_a_sample_of_another_kernel_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples(lambda row: row | {"confirmed_backend": evidence.math} if row["block"] == 3 else row)
    evidence.cells()
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"confirmed"}
    assert "torch_sdpa:math ran for torch_sdpa:flash" in found.report.reason


def test_ttft_and_tpot_are_judged_where_measured_and_need_not_cover_all_work(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.samples()
    evidence.cells()
    step = {"metric": "tpot_s", "case_id": "step", "weight": 0.2}
    evidence.cells(lambda row: row | step | slower(1.8) if row["case_id"] == "decode0" else None)
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"decode.tpot_s.ratio"}


def test_a_cell_measured_again_replaces_its_earlier_row(evidence: Any, plan: Plan) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | slower(1.5))
    evidence.cells(lambda row: row | {"time": evidence.span.end})
    assert judge(evidence, plan).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("side", "outcome", "verdict", "check"),
    [
        ("candidate", "out_of_memory", Verdict.FAIL, "lost"),
        ("candidate", "timed_out", Verdict.FAIL, "lost"),
        ("champion", "crashed", Verdict.INCONCLUSIVE, "comparable"),
        ("candidate", "above_limit", Verdict.ERROR, "possible"),
        ("champion", "warm_cache", Verdict.ERROR, "possible"),
        ("champion", None, Verdict.ERROR, "possible"),
    ],
)
def test_a_cell_that_was_lost_is_told_by_whose_it_was(
    evidence: Any, plan: Plan, judged: Any, side: str, outcome: str | None, verdict: Verdict, check: str
) -> None:
    evidence.samples()
    is_compared = outcome in ("above_limit", None)
    evidence.cells(lambda row: row if is_compared or row["case_id"] != "decode2" else None)

    def lose(row: dict[str, Any]) -> dict[str, Any]:
        lost = {"outcome": outcome, "error": "it went wrong"}
        return row | lost if (row["side"], row["case_id"]) == (side, "decode2") else row

    found = judged(judge(evidence, plan, lose))
    assert (found.verdict, found.named(verdict)) == (verdict, {check})
    assert "decode2" in found.checks[check].message
    kind = found.checks["out_of_memory"]
    assert (kind.verdict, kind.observed) == (Verdict.PASS, float(outcome == "out_of_memory"))


def test_a_machine_on_which_the_champion_differs_from_itself_decides_nothing(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | {"aa_floor": 1.2})
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.INCONCLUSIVE) == {"aa_floor"}
    evidence.cells(lambda row: row | {"aa_floor": None} if row["case_id"] == "decode1" else None)
    assert "aa_floor" in judged(judge(evidence, plan)).named(Verdict.ERROR)


def test_an_empty_lake_is_inconclusive(evidence: Any, plan: Plan) -> None:
    assert judge(evidence, plan, lambda row: None).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("missing", ["cells", "outcomes"])
def test_a_cell_that_was_measured_and_not_compared_is_an_error_and_the_other_way_round(
    evidence: Any, plan: Plan, judged: Any, missing: str
) -> None:
    def without(row: dict[str, Any]) -> dict[str, Any] | None:
        return None if row["case_id"] == "decode2" else row

    evidence.samples()
    evidence.cells(without if missing == "cells" else lambda row: row)
    found = judged(judge(evidence, plan, without if missing == "outcomes" else lambda row: row))
    assert found.named(Verdict.ERROR) == {"paired"}
    assert "decode2" in found.checks["paired"].message


def test_rows_of_a_backend_that_is_not_the_last_one_count_no_more(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | {"backend": evidence.math})
    evidence.cells(lambda row: row | slower(1.5) | {"time": evidence.span.end})
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"decode.kernel_s.ratio", "prefill.kernel_s.ratio"}


@pytest.mark.parametrize("said", ["SAME", "AMBG"])
def test_a_slow_cell_fails_whatever_its_word(evidence: Any, plan: Plan, judged: Any, said: str) -> None:
    evidence.samples()
    evidence.cells(
        lambda row: row | slower(2.6) | {"weight": 0.02, "verdict": said} if row["case_id"] == "decode2" else row
    )
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"decode.kernel_s.worst_cell"}


@pytest.mark.parametrize("seconds", [math.nan, None, 0.0, -1.0, math.inf])
def test_a_sample_that_no_clock_gives_is_an_error(
    evidence: Any, plan: Plan, judged: Any, seconds: float | None
) -> None:
    evidence.samples(lambda row: row | {"seconds": seconds} if row["block"] == 3 else row)
    evidence.cells()
    assert judged(judge(evidence, plan)).named(Verdict.ERROR) == {"samples"}


@pytest.mark.parametrize("table", ["samples", "cells", "outcomes"])
@pytest.mark.parametrize("foreign", ["fp-upgraded", "", None])
def test_a_row_of_another_environment_fails(
    evidence: Any, plan: Plan, judged: Any, table: str, foreign: str | None
) -> None:
    evidence.samples()
    evidence.cells()
    getattr(evidence, table)(lambda row: row | {"fingerprint_id": foreign})
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"measured_rows"}


@pytest.mark.parametrize(
    "figure",
    [
        {"ratio": -0.9},
        {"ratio": 0.0},
        {"ratio_low": 0.0},
        {"weight": -0.25},
        {"weight": 5.0},
        {"ratio": 3.0},
        {"verdict": None},
        {"verdict": "FASTER"},
    ],
)
def test_a_ratio_of_times_that_no_clock_gives_is_an_error(
    evidence: Any, plan: Plan, judged: Any, figure: dict[str, float]
) -> None:
    evidence.samples()
    evidence.cells(lambda row: row | figure if row["case_id"] == "decode2" else row)
    assert "decode.kernel_s.figures" in judged(judge(evidence, plan)).named(Verdict.ERROR)
