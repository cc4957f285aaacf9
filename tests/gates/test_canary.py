"""The canary gate: the candidate beside its concurrent control, and the fast layer inside a step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from data.plan import Plan
from gates import canary
from gates.canary import ServedRow, breach
from gates.served import ClientOutcome
from gates.verdict import GateReport, Verdict

ALL = ClientOutcome(sent=200, ok=200, lost=0)


def judge(evidence: Any, plan: Plan, share: int = 20, client: ClientOutcome = ALL) -> GateReport:
    return canary.judge(evidence.lake, evidence.release, plan, share=share, span=evidence.span, client=client)


def candidate(change: dict[str, Any], below: int = 10_000) -> Any:
    """Change the candidate's first requests."""

    def mend(row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["request_id"].rpartition("-")[2])
        return row | change if row["side"] == "candidate" and number < below else row

    return mend


def slower(factor: float) -> Any:
    def mend(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"tpot_s": row["tpot_s"] * factor} if row["side"] == "candidate" else row

    return mend


def test_a_sound_step_passes_with_the_slowdown_that_would_have_shown(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step()
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.PASS, found.report.reason
    assert found.checks["tpot_p50_ratio"].detectable.startswith("TPOT P50 +")
    assert found.checks["error_rate"].detectable == "error rate 7.2 % (0 of 40, 95 %)"


def test_three_times_slower_decoding_fails_and_blames_tpot(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(slower(3.0))
    found = judged(judge(evidence, plan))
    assert "tpot_p50_ratio" in found.named(Verdict.FAIL)
    assert not any(name.startswith("ttft") for name in found.named(Verdict.FAIL))


def test_a_slowdown_near_the_limit_is_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(slower(1.7))
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "tpot_p50_ratio" in found.named(Verdict.INCONCLUSIVE)


def test_too_few_requests_on_either_side_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(num=15)
    found = judged(judge(evidence, plan, client=ClientOutcome(75, 75, 0)))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert {"candidate_requests", "control_requests"} <= found.named(Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"num_nonfinite": 2}, "nonfinite"),
        ({"confirmed_prefill": "torch_sdpa:math"}, "confirmed"),
        ({"confirmed_decode": "unconfirmed(x)"}, "confirmed"),
        ({"confirmed_decode": None}, "confirmed"),
        ({"confirmed_prefill": None, "resolved_prefill": None}, "confirmed"),
        ({"fingerprint_id": "fp-other"}, "fingerprint"),
        ({"fingerprint_id": None}, "fingerprint"),
        ({"peak_memory_bytes": 2_000_000_000}, "memory"),
    ],
)
def test_one_event_is_enough_where_no_statistics_are_needed(
    evidence: Any, plan: Plan, judged: Any, change: dict[str, Any], check: str
) -> None:
    evidence.fingerprints()
    evidence.step(candidate(change, below=1))
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {check}


def test_a_request_of_one_token_has_no_decode_backend_to_confirm(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    evidence.step(candidate({"output_tokens": 1, "confirmed_decode": None, "tpot_s": None}, below=3))
    assert judge(evidence, plan).verdict is Verdict.PASS


def test_a_control_of_two_environments_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(
        lambda r: r | {"fingerprint_id": "y"} if r["side"] == "control" and r["request_id"] == "q0-10001" else r
    )
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"control_fingerprint"}


@pytest.mark.parametrize(
    ("client", "verdict", "check"),
    [
        (ClientOutcome(200, 199, 1), Verdict.FAIL, "lost_requests"),
        (ClientOutcome(200, 199, 1, {"champion": 1}), Verdict.INCONCLUSIVE, "lost_elsewhere"),
        (ClientOutcome(200, 199, 0), Verdict.ERROR, "unaccounted_requests"),
        (ClientOutcome(300, 300, 0), Verdict.INCONCLUSIVE, "recorded"),
    ],
)
def test_what_the_client_saw_must_agree_with_the_lake(
    evidence: Any, plan: Plan, judged: Any, client: ClientOutcome, verdict: Verdict, check: str
) -> None:
    evidence.fingerprints()
    evidence.step()
    assert judged(judge(evidence, plan, client=client)).named(verdict) == {check}


@pytest.mark.parametrize(
    ("change", "num", "verdict"),
    [
        ({"status": 503, "finish_reason": "error"}, 3, Verdict.INCONCLUSIVE),
        ({"status": 200, "finish_reason": "error"}, 12, Verdict.FAIL),
        ({"status": 200, "finish_reason": "cancelled", "error": "shutting down"}, 12, Verdict.FAIL),
        ({"status": 200, "finish_reason": None}, 12, Verdict.FAIL),
        ({"status": None}, 12, Verdict.FAIL),
        ({"status": 400, "finish_reason": "error"}, 5, Verdict.PASS),
        ({"status": 200, "finish_reason": "cancelled"}, 5, Verdict.PASS),
    ],
)
def test_server_faults_count_and_the_clients_own_do_not(
    evidence: Any, plan: Plan, judged: Any, change: dict[str, Any], num: int, verdict: Verdict
) -> None:
    evidence.fingerprints()
    evidence.step(candidate(change, below=num), num=60)
    found = judged(judge(evidence, plan, client=ClientOutcome(300, 300, 0)))
    assert found.checks["error_rate"].verdict is verdict


@pytest.mark.parametrize(
    ("column", "value", "check"),
    [
        ("ttft_s", None, "ttft_p50_ratio"),
        ("ttft_s", math.nan, "ttft_p95_ratio"),
        ("tpot_s", None, "tpot_p95_ratio"),
        ("tpot_s", math.nan, "tpot_p50_ratio"),
        ("peak_memory_bytes", None, "memory"),
    ],
)
def test_a_figure_that_an_instance_did_not_record_is_an_error(
    evidence: Any, plan: Plan, judged: Any, column: str, value: float | None, check: str
) -> None:
    evidence.fingerprints()
    evidence.step(candidate({column: value}, below=1))
    assert check in judged(judge(evidence, plan)).named(Verdict.ERROR)


def test_a_duration_of_zero_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(candidate({"tpot_s": 0.0}))
    assert "tpot_p50_ratio" in judged(judge(evidence, plan)).named(Verdict.ERROR)


def test_a_split_that_is_not_the_one_that_was_set_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step()
    found = judged(judge(evidence, plan, share=50))
    assert found.named(Verdict.FAIL) == {"sample_ratio"}
    assert "40 of 200 sessions" in found.report.reason


def test_a_lost_arm_is_never_a_pass(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    evidence.step(lambda row: None if row["side"] == "control" else row)
    assert judge(evidence, plan).verdict is not Verdict.PASS


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (3.0, Verdict.FAIL)])
def test_at_full_share_the_copies_that_control_got_are_the_comparison(
    evidence: Any, plan: Plan, judged: Any, factor: float, verdict: Verdict
) -> None:
    evidence.fingerprints()
    evidence.mirrored_step(slower(factor))
    found = judged(judge(evidence, plan, share=100, client=ClientOutcome(40, 40, 0)))
    assert found.verdict is verdict
    assert found.checks["tpot_p50_ratio"].verdict is verdict


def test_at_full_share_one_straggler_of_the_step_before_is_no_wrong_split(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.fingerprints()
    evidence.mirrored_step()
    evidence.step(lambda row: row if row["request_id"] == "q0-10003" else None)
    found = judged(judge(evidence, plan, share=100, client=ClientOutcome(40, 40, 0)))
    assert found.checks["sample_ratio"].verdict is Verdict.PASS


def test_an_empty_lake_is_inconclusive(evidence: Any, plan: Plan) -> None:
    assert judge(evidence, plan, client=ClientOutcome(0, 0, 0)).verdict is Verdict.INCONCLUSIVE


def rows(num: int, tpot_s: float = 0.02, load: float = 1.0, from_s: int = 0, **change: bool) -> list[ServedRow]:
    """One a second."""
    flags = {"fault": False, "nonfinite": False, "wrong_backend": False} | change
    return [ServedRow(tpot_s=tpot_s, load=load, at_s=from_s + second, **flags) for second in range(num)]


def test_a_sound_step_has_no_breach(plan: Plan) -> None:
    assert breach(rows(40), rows(40), plan) is None
    assert breach([], [], plan) is None


@pytest.mark.parametrize(
    ("candidate_rows", "why", "observed", "limit"),
    [
        ([*rows(3), *rows(1, nonfinite=True)], "NaN", 1, 0),
        ([*rows(3), *rows(1, wrong_backend=True)], "another backend", 1, 0),
        ([*rows(3), *rows(5, fault=True)], "5 of the candidate's last 8", 5, 4),
        ([*rows(30), *rows(12, 0.07)], "3.5 times control's", 3.5, 3),
    ],
)
def test_a_breach_ends_the_step_at_once(
    plan: Plan, candidate_rows: list[ServedRow], why: str, observed: float, limit: float
) -> None:
    found = breach(candidate_rows, rows(8), plan)
    assert found is not None and why in found.why
    check = found.check(num_evidence=len(candidate_rows))
    assert (check.verdict, check.observed, check.limit) == (Verdict.FAIL, pytest.approx(observed), limit)


def test_old_faults_few_rows_and_a_control_that_is_slow_too_are_no_breach(plan: Plan) -> None:
    assert breach([*rows(4, fault=True), *rows(50)], rows(8), plan) is None
    assert breach([*rows(5, fault=True), *rows(46), *rows(4, fault=True)], rows(8), plan) is None
    assert breach(rows(11, 0.9), rows(8), plan) is None
    assert breach(rows(12, 0.9), rows(7), plan) is None
    assert breach(rows(12, 0.9), rows(8, 0.4), plan) is None


@pytest.mark.parametrize(
    ("candidate_rows", "control_rows", "breaks"),
    [
        # As seen of a sound candidate with ten requests at once beside a control with one or two.
        (rows(12, 0.60, load=9), [*rows(20, 0.09, load=1.5), *rows(8, 0.17, load=3.6)], False),
        (rows(12, 2.40, load=9), [*rows(20, 0.09, load=1.5), *rows(8, 0.17, load=3.6)], True),
        # At a like load no allowance is left.
        (rows(12, 0.60, load=9), rows(20, 0.15, load=8.8), True),
        # A control that is loaded more proves nothing against its TPOT at a lower load, however slow that is ...
        (rows(12, 0.10, load=1), rows(20, 0.05, load=8), False),
        # ... but a candidate that takes three times as long at a fraction of the load is slow.
        (rows(12, 0.20, load=1), rows(20, 0.05, load=8), True),
    ],
)
def test_arms_are_compared_at_the_same_load(
    plan: Plan, candidate_rows: list[ServedRow], control_rows: list[ServedRow], breaks: bool
) -> None:
    found = breach(candidate_rows, control_rows, plan)
    assert (found is not None and "at the same load" in found.why) is breaks


@pytest.mark.parametrize(
    ("slows_too", "breaks"), [(True, False), (False, True)], ids=["the whole machine slows", "the candidate slows"]
)
def test_arms_are_compared_at_the_same_time(plan: Plan, slows_too: bool, breaks: bool) -> None:
    slow = rows(12, 0.08, from_s=30)
    control = [*rows(30), *(slow if slows_too else rows(12, from_s=30))]
    assert (breach([*rows(30), *slow], control, plan) is not None) is breaks


def test_a_control_that_began_cold_hides_no_slow_candidate(plan: Plan) -> None:
    cold = [*rows(8, 0.08), *rows(40, 0.02, from_s=8)]
    assert breach(rows(48, 0.08), cold, plan) is not None


def test_what_was_not_measured_is_neither_fast_nor_slow(plan: Plan) -> None:
    unmeasured = [ServedRow(False, False, False, None, at_s=second) for second in range(40)]
    assert breach(unmeasured, rows(40), plan) is None
    assert breach(rows(40), unmeasured, plan) is None


def test_the_load_of_a_row_is_the_batch_that_it_ran_in(evidence: Any) -> None:
    evidence.fingerprints()
    evidence.step(candidate({"batch_size_mean": 6.5}), num=3)
    mine, _ = canary.recent(evidence.lake, evidence.release, share=20, span=evidence.span)
    assert [row.load for row in mine] == [6.5] * 3


def test_the_fast_layer_sees_new_rows_and_reads_no_file_twice(
    evidence: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence.fingerprints()
    evidence.step()
    ask = {"share": 20, "span": evidence.span}
    mine, beside = canary.recent(evidence.lake, evidence.release, **ask)
    assert (len(mine), len(beside)) == (40, 40)
    assert breach(mine, beside, plan) is None
    evidence.step(candidate({"num_nonfinite": 1}), num=1)
    mine, beside = canary.recent(evidence.lake, evidence.release, **ask)
    assert (len(mine), len(beside)) == (41, 41)
    assert "NaN" in breach(mine, beside, plan).why
    monkeypatch.setattr(canary, "served_rows", None)  # nothing new: nothing is opened
    assert len(canary.recent(evidence.lake, evidence.release, **ask)[0]) == 41
