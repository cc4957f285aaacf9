"""The probe gate: every backend that may serve ran every probe, and ran itself."""

from __future__ import annotations

from typing import Any

from data.plan import Plan
from gates import probe
from gates.verdict import GateReport, Verdict

PROBES = ("short_prefill", "single_decode")


def judge(evidence: Any, plan: Plan) -> GateReport:
    evidence.fingerprints()
    required = [(backend, name) for backend in (evidence.flash, evidence.math) for name in PROBES]
    return probe.judge(evidence.lake, evidence.release, plan, required=required, fallbacks=[evidence.math])


def test_a_chain_of_which_every_cell_was_executed_passes(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.probes()
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.PASS
    assert found.checks["executed"].detectable == "1 cell of 4"
    assert found.checks["fallback_validated"].observed == 1.0


def test_a_cell_that_failed_fails_the_gate_by_name_though_it_passed_later(
    evidence: Any, plan: Plan, judged: Any
) -> None:
    evidence.probes(
        lambda row: row | {"status": "fail"} if (row["backend"], row["probe"]) == (evidence.flash, PROBES[0]) else row
    )
    evidence.probes()
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"executed"}
    assert "torch_sdpa:flash on short_prefill" in found.report.reason


def test_a_cell_that_failed_before_it_could_run_is_a_failure(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.probes(lambda row: row | {"status": "fail", "level": "construct"})
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"executed"}


def test_a_cell_that_was_never_executed_is_inconclusive(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.probes(lambda row: None if row["probe"] == PROBES[1] else row)
    found = judged(judge(evidence, plan))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "single_decode" in found.report.reason
    evidence.probes(lambda row: row | {"level": "static"})
    assert judge(evidence, plan).verdict is Verdict.INCONCLUSIVE


def test_a_backend_that_ran_as_another_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.probes(lambda row: row | {"confirmed_backend": evidence.math})
    found = judged(judge(evidence, plan))
    assert found.named(Verdict.FAIL) == {"confirmed"}
    assert "torch_sdpa:flash on short_prefill ran torch_sdpa:math" in found.report.reason


def test_a_backend_that_nothing_confirmed_fails(evidence: Any, plan: Plan) -> None:
    evidence.probes(lambda row: row | {"confirmed_backend": None})
    assert judge(evidence, plan).verdict is Verdict.FAIL


def test_nothing_required_or_nothing_probed_does_not_pass(evidence: Any, plan: Plan) -> None:
    assert judge(evidence, plan).verdict is Verdict.INCONCLUSIVE
    evidence.probes()
    nothing = probe.judge(evidence.lake, evidence.release, plan, required=[])
    assert nothing.verdict is Verdict.INCONCLUSIVE


def test_rows_of_another_release_or_of_the_champion_prove_nothing(evidence: Any, plan: Plan) -> None:
    evidence.probes(lambda row: row | {"side": "champion", "fingerprint_id": "fp-champion"})
    assert judge(evidence, plan).verdict is Verdict.INCONCLUSIVE


def test_a_probe_of_another_environment_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.probes()
    evidence.probes(lambda row: row | {"fingerprint_id": "fp-upgraded"})
    assert judged(judge(evidence, plan)).named(Verdict.FAIL) == {"measured_rows"}
