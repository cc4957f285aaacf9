"""The table of gates at the end of `release`, `qualify` and `nightly`."""

from __future__ import annotations

import pytest

from flows.qualify import Qualified
from flows.terminal import show_qualified, show_release
from tasks.lifecycle import Gate, ReleaseResult
from tests.tasks.sample_lake import failing, passing

CANDIDATE = "a-candidate-with-quite-a-long-name-for-a-table-of-eighty-columns"
EFFECT = "smallest effect it could have seen, or why it did not pass"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def words(text: str) -> str:
    """Without line breaks: free text wraps."""
    return " ".join(text.split())


def test_a_release_ends_with_a_row_a_gate_and_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    effects = "flip rate 13 % (0 of 21, 95 %); R_rms +361 %; mean KL +1.2e-05 nats"
    gates = [
        Gate(stage="replay", verdict="pass", checks=41, seconds=38.6, detectable=effects, reason=""),
        Gate(stage="baseline", verdict="fail", checks=9, seconds=14, detectable="", reason="baseline: [slow] by 1.5"),
    ]
    result = ReleaseResult(
        release_id=f"{CANDIDATE}-20261129-231502", candidate=CANDIDATE, gpu="cpu", family="smollm2",
        state="rejected", reason="baseline: [slow] by 1.5", gates=gates, report="figures/report.html",
    )  # fmt: skip
    show_release([result])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"{CANDIDATE} on cpu")
    assert effects in words(" ".join(line[34:] for line in text.splitlines()[2:5]))
    assert "baseline  fail          9       14  baseline: [slow] by 1.5\n" in text
    assert text.endswith("\nrejected\n")


def test_a_qualification_says_what_its_passes_could_have_seen(capsys: pytest.CaptureFixture[str]) -> None:
    one = Qualified(
        qualification_id=f"qualify-{CANDIDATE}-20261129-231502", candidate=CANDIDATE, champion="torch-math-cpu",
        gpu="cpu", family="smollm2", verdict="fail", failed_gate="replay", reason=failing().reason,
        gates=[passing("probe"), failing("replay")], seconds={"probe": 9.7, "replay": 39.2}, mlflow_run_id=None,
        report="/a/folder/figures/report.html",
    )  # fmt: skip
    show_qualified([one])
    text = capsys.readouterr().out
    assert f"\nid       qualify-{CANDIDATE}-20261129-231502\n" in text, "whole, to be copied into `why`"
    assert "\nreport   /a/folder/figures/report.html\n" in text
    assert EFFECT in words(text)
    assert "probe   pass          1       10  1 in 40\n" in text
    assert words("replay fail 2 39 replay: r_rms is 31.5 in decode-q1s256 <needle>") in words(text)
    assert text.endswith("\nfail\n")
