"""The expand gate: the candidate alone, before it becomes the champion."""

from __future__ import annotations

from typing import Any

from data.plan import Plan
from gates import expand
from gates.served import ClientOutcome
from gates.verdict import GateReport, Verdict

CLIENT = ClientOutcome(sent=40, ok=40, lost=0)


def judge(evidence: Any, plan: Plan, client: ClientOutcome = CLIENT) -> GateReport:
    return expand.judge(evidence.lake, evidence.release, plan, span=evidence.span, client=client)


def test_a_candidate_that_served_everything_alone_passes(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    evidence.mirrored_step()
    assert judge(evidence, plan).verdict is Verdict.PASS


def test_another_backend_that_served_meanwhile_is_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.mirrored_step()
    evidence.step(lambda row: row if row["side"] == "champion" else None, num=1)
    assert judged(judge(evidence, plan)).named(Verdict.ERROR) == {"only_backend"}


def test_a_lost_request_nan_or_another_backend_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.mirrored_step(lambda row: row | {"num_nonfinite": 1, "confirmed_decode": "torch_sdpa:cudnn"})
    found = judged(judge(evidence, plan, ClientOutcome(40, 39, 1)))
    assert found.named(Verdict.FAIL) == {"nonfinite", "confirmed", "lost_requests"}


def test_too_few_requests_are_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.mirrored_step(num=10)
    found = judged(judge(evidence, plan, ClientOutcome(10, 10, 0)))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "requests" in found.named(Verdict.INCONCLUSIVE)


def test_rows_without_a_count_of_nan_are_an_error(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.mirrored_step(lambda row: row | {"num_nonfinite": None, "fallback": None})
    assert judged(judge(evidence, plan)).named(Verdict.ERROR) == {"nonfinite", "fallback_rate"}


def test_an_empty_lake_is_inconclusive(evidence: Any, plan: Plan) -> None:
    assert judge(evidence, plan, ClientOutcome(0, 0, 0)).verdict is Verdict.INCONCLUSIVE
