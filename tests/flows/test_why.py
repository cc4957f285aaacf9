from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from attention.errors import UserError
from data.paths import cell_dir, lake_dir
from flows.why import Why, render, why
from gates.verdict import Check, GateReport, Verdict
from tasks.record import RecordStore
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, fill, passing
from tests.tasks.sample_record import attempt, running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lake with one whole release, and a record in which it was rejected."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTENTION_RELEASE_HOME", str(folder))
        fill(lake_dir(), "wrong-scale-20261129")
        record = running("smollm2", "wrong-scale-20261129", "wrong-scale", "rejected", tags=("drill",))
        record.attempts = [attempt("wrong-scale-20261129", "wrong-scale", "rejected", "replay")]
        store = RecordStore(cell_dir("cpu", "smollm2") / "record.json")
        store.update(lambda new: new.__dict__.update(record.model_copy(update={"generation": 0}).__dict__))
        yield folder


def printed(answer: Why) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(answer))
    return console.export_text()


def failed(release_id: str, stage: str, check: str) -> Why:
    """The answer for a release whose only failing check is this one."""
    fill(lake_dir(), release_id)
    bad = Check(check=check, verdict=Verdict.FAIL, observed=2.0, limit=1.0, message=f"{check} is 2")
    later = GateReport(stage="replay", checks=passing("replay").checks)
    for report in (later, GateReport(stage=stage, checks=(bad,))):
        report.write(lake_dir(), release_id, gpu="cpu", model="m")
    return why(release_id)


def test_a_failed_release_names_gate_check_figure_limit_and_owner(home: Path) -> None:
    answer = why("wrong-scale-20261129")
    assert answer.headline == "FAIL wrong-scale: replay"
    assert answer.first_failing is not None
    assert answer.first_failing.check == "tensor.float32.r_rms"
    text = printed(answer)
    for part in ("tensor.float32.r_rms", "31.5", "<= 2", "numerics", "a sound kernel stays below 1.5"):
        assert part in text


def test_the_evidence_is_the_worst_rows_behind_the_first_failing_check(home: Path) -> None:
    evidence = why("wrong-scale-20261129").evidence
    assert evidence is not None
    assert evidence.table == "tensor_replay"
    ratios = [float(row[evidence.columns.index("r_rms")]) for row in evidence.rows]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize(
    ("stage", "check", "table"),
    [
        ("fingerprint", "one_id", "fingerprints"),
        ("probe", "executed", "probes"),
        ("replay", "model.decode.kl_p999", "model_replay"),
        ("replay", "business.mcnemar_p", "business_replay"),
        ("baseline", "decode.kernel_s.worst_cell", "perf_cells"),
        ("shadow", "divergence_share", "requests"),
        ("shadow", "faults", "requests"),
        ("canary", "tpot_p95_ratio", "canary_windows"),
        ("canary", "confirmed", "requests"),
    ],
)
def test_each_gate_has_evidence_to_show_and_none_of_it_is_text_of_a_user(
    home: Path, stage: str, check: str, table: str
) -> None:
    answer = failed(f"{stage}-{check}", stage, check)
    assert answer.first_failing is not None
    assert answer.first_failing.check == check
    assert answer.evidence is None or answer.evidence.table == table
    assert answer.evidence is not None or check in ("faults", "confirmed")  # the sample has no bad request
    everything = answer.model_dump_json() + printed(answer)
    assert SECRET not in everything
    assert str(SECRET_TOKEN) not in everything


def test_an_unknown_release_is_answered_with_the_nearest_ids(home: Path) -> None:
    with pytest.raises(UserError, match="nearest: wrong-scale-20261129"):
        why("wrong-scale-2026")


def test_nothing_released_yet_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="nothing has been released yet"):
        why("r1")


def test_a_release_that_no_record_knows_is_told_from_the_lake(home: Path) -> None:
    fill(lake_dir(), "orphan")
    answer = why("orphan")
    assert answer.state == "unknown"
    assert [gate.stage for gate in answer.gates] == ["probe", "replay", "baseline"]
