"""The fingerprint gate: both environments are known, and neither changed half-way."""

from __future__ import annotations

from typing import Any

import pytest

from data.plan import Plan
from gates import fingerprint
from gates.verdict import Verdict


def test_two_known_environments_pass_and_so_do_rows_that_they_measured(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    assert fingerprint.judge(evidence.lake, evidence.release, plan).verdict is Verdict.PASS
    evidence.probes()
    evidence.step()
    found = judged(fingerprint.judge(evidence.lake, evidence.release, plan))
    assert found.verdict is Verdict.PASS
    assert found.checks["measured_rows"].detectable == "1 foreign row of 86"


def test_a_side_without_a_fingerprint_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints(lambda row: row if row["side"] == "champion" else None)
    found = judged(fingerprint.judge(evidence.lake, evidence.release, plan))
    assert found.named(Verdict.FAIL) == {"recorded"}
    assert "candidate" in found.report.reason


def test_an_empty_id_is_no_fingerprint(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints(lambda row: row | {"fingerprint_id": " "})
    assert fingerprint.judge(evidence.lake, evidence.release, plan).verdict is Verdict.FAIL


def test_an_environment_that_changed_after_a_resume_fails(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.tensor()
    evidence.tensor(lambda row: row | {"fingerprint_id": "fp-upgraded"} if row["seed"] == 2 else None)
    found = judged(fingerprint.judge(evidence.lake, evidence.release, plan))
    assert found.named(Verdict.FAIL) == {"measured_rows"}
    evidence.fingerprints(lambda row: row | {"fingerprint_id": "fp-upgraded"})
    found = judged(fingerprint.judge(evidence.lake, evidence.release, plan))
    assert "one_id" in found.named(Verdict.FAIL)


def test_control_must_run_the_champions_environment(evidence: Any, plan: Plan, judged: Any) -> None:
    evidence.fingerprints()
    evidence.step(lambda row: row | {"fingerprint_id": "fp-candidate"} if row["side"] == "control" else row)
    found = judged(fingerprint.judge(evidence.lake, evidence.release, plan))
    assert found.named(Verdict.FAIL) == {"measured_rows"}


@pytest.mark.parametrize("text", ["", "{}", None])
def test_a_fingerprint_without_fields_fails(evidence: Any, plan: Plan, text: str | None) -> None:
    evidence.fingerprints(lambda row: row | {"identity_json": text})
    assert fingerprint.judge(evidence.lake, evidence.release, plan).verdict is Verdict.FAIL


def test_an_empty_lake_does_not_pass(evidence: Any, plan: Plan) -> None:
    assert fingerprint.judge(evidence.lake, evidence.release, plan).verdict is Verdict.FAIL


def test_a_file_that_is_no_parquet_is_an_error(evidence: Any, plan: Plan) -> None:
    evidence.fingerprints()
    (evidence.lake / "fingerprints" / "release_id=r1" / "broken.parquet").write_bytes(b"not parquet")
    assert fingerprint.judge(evidence.lake, evidence.release, plan).verdict is Verdict.ERROR
