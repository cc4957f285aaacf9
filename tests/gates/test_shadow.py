"""The shadow gate: copies of real requests, paired with the champion's own by request id."""

from __future__ import annotations

from typing import Any

import pytest

from data.plan import Plan
from gates import shadow
from gates.verdict import GateReport, Verdict


def judge(evidence: Any, plan: Plan, overflow: int = 0) -> GateReport:
    return shadow.judge(evidence.lake, evidence.release, plan, span=evidence.span, overflow=overflow)


def copies(change: dict[str, Any], below: int = 1000) -> Any:
    """Change the candidate's shadows of the first requests."""

    def mend(row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["request_id"].rpartition("-")[2])
        return row | change if row["shadow"] and number < below else row

    return mend


def test_shadows_that_answer_like_their_primaries_pass(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows()
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["divergence_rate"].detectable == "tokens that part 0.47 % (0 of 640, 95 %)"


def test_a_champion_that_was_promoted_from_a_candidate_still_counts_as_primary(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    evidence.shadows(lambda row: row | {"side": "candidate"})
    assert judge(evidence, plan).verdict is Verdict.PASS


def test_too_few_pairs_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows(num=20)
    assert "pairs" in judged(judge(evidence, plan)).named(Verdict.INCONCLUSIVE)


def test_a_mirror_that_did_not_copy_is_inconclusive_unless_the_router_dropped_on_purpose(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.fingerprints()
    evidence.shadows()
    evidence.shadows(lambda r: None if r["shadow"] else r | {"request_id": f"x{r['request_id']}"}, num=20)
    assert judged(judge(evidence, plan)).named(Verdict.INCONCLUSIVE) == {"mirrored"}
    assert judge(evidence, plan, overflow=15).verdict is Verdict.PASS


def test_a_few_outputs_that_part_late_pass(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows(copies({"token_ids": [*range(14), 99, 98]}, below=2))
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["first_divergence"].observed == 15


def test_outputs_that_part_at_once_fail(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows(copies({"token_ids": [7, 7]}))
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"divergence_share", "divergence_rate"}


def test_an_output_that_ends_early_parts_where_it_ends() -> None:
    assert shadow._until_parting([1, 2, 3], [1, 2, 3]) == (3, False)
    assert shadow._until_parting([1, 2, 3], [1, 2]) == (3, True)
    assert shadow._until_parting([], [5]) == (1, True)
    assert shadow._until_parting([], []) == (0, False)


def test_answers_without_tokens_are_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows(copies({"token_ids": None}, below=3))
    assert judged(judge(evidence, plan)).named(Verdict.ERROR) == {"divergence_share", "divergence_rate"}


def test_a_shadow_that_failed_where_the_primary_answered_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.shadows(copies({"status": 500, "finish_reason": "error", "error": "launch failed"}, below=1))
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"faults"}
    assert "launch failed" in found.report.reason


def test_nan_a_wrong_backend_and_a_foreign_environment_fail_on_the_first_event(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.fingerprints()
    evidence.shadows(copies({"num_nonfinite": 1, "confirmed_decode": evidence.math, "fingerprint_id": "x"}, below=1))
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"nonfinite", "confirmed", "fingerprint"}


@pytest.mark.parametrize(("fallen", "verdict"), [(0, Verdict.PASS), (3, Verdict.INCONCLUSIVE), (40, Verdict.FAIL)])
def test_fallbacks_beyond_their_share_fail_and_some_are_inconclusive(
    evidence: Any, plan: Plan, judged: Any, fallen: int, verdict: Verdict
) -> None:
    evidence.fingerprints()
    backend = {"confirmed_prefill": evidence.math, "confirmed_decode": evidence.math}
    evidence.shadows(copies({"fallback": True, **backend}, below=fallen))
    found = judged(judge(evidence, plan))
    assert found.verdict is verdict
    assert found.checks["fallback_rate"].verdict is verdict


def test_rows_outside_the_span_do_not_count(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    evidence.shadows(lambda row: row | {"time": evidence.span.end})
    assert judge(evidence, plan).verdict is Verdict.INCONCLUSIVE
