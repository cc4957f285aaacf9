"""Drift as a person reads it: what has one cause stands together, and no line is longer than a terminal."""

from __future__ import annotations

from attention.cases import AttentionCase
from attention.drift import Drift
from attention.reasons import Code, Reason
from attention.text import drift


def one(probe: str, q_len: int, message: str = "the rows are wrong") -> Drift:
    case = AttentionCase(
        phase="prefill", batch=f"q{q_len}", heads_q=8, heads_kv=2, head_dim_qk=64, head_dim_vo=64, dtype="bfloat16"
    )
    reason = Reason(
        code=Code.NUMERIC_DRIFT, dimension="R_rms", observed="9", allowed="<= 3", source="probe", message=message
    )
    change = {"before": "declared pass", "after": "observed fail"}
    return Drift(backend="flashinfer:fa2", probe=probe, case=case, reasons=(reason,), **change)


def test_cases_of_one_probe_and_one_reason_are_one_entry_with_their_number() -> None:
    lines = drift([one("needles", 5), one("cell", 7, "word " * 60), one("needles", 6)])
    assert lines[0] == "flashinfer:fa2  declared pass -> observed fail"
    assert [line.split()[0] for line in lines[1:] if line[2:3].strip()] == ["cell", "needles"]
    needles = next(i for i, line in enumerate(lines) if line.startswith("  needles"))
    assert lines[needles].split()[1:3] == ["2", "cases,"]
    assert lines[-1].strip() == "NUMERIC_DRIFT of R_rms: the rows are wrong"
    assert all(len(line) <= 80 for line in lines)
    assert drift([]) == []
