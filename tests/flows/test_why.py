from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from attention.errors import UserError
from attention.schemas import write_rows
from data.paths import cell_dir, lake_dir
from flows.why import Evidence, Why, newest, render, why
from gates.verdict import Check, GateReport, Verdict
from tasks.record import RecordStore
from tests.tasks.sample_lake import SECRET, SECRET_TOKEN, START, fill, passing
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


def printed(answer: Why, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(answer))
    return console.export_text()


def failed(release_id: str, stage: str, check: str, message: str = "too far off") -> Why:
    """The answer for a release whose only failing check is this one."""
    fill(lake_dir(), release_id)
    bad = Check(check=check, verdict=Verdict.FAIL, observed=2.0, limit=1.0, message=f"{check}: {message}")
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
    assert "id: wrong-scale-20261129\n" in text
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
        ("replay", "business.json.mcnemar_p", "business_replay"),
        ("baseline", "decode.kernel_s.worst_cell", "perf_cells"),
        ("shadow", "divergence_share", "requests"),
        ("shadow", "faults", "requests"),
        ("canary", "tpot_p95_ratio", "canary_windows"),
        ("canary", "50%.tpot_p95_ratio", "canary_windows"),
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


def column(evidence: Evidence | None, name: str) -> list[str]:
    assert evidence is not None
    return [row[evidence.columns.index(name)] for row in evidence.rows]


def add(release_id: str, table: str, *rows: dict[str, object]) -> None:
    common = {"side": "candidate", "time": START + timedelta(seconds=90)}
    write_rows(lake_dir(), table, [{**common, **row} for row in rows], release_id=release_id)


def test_a_failing_class_of_dtypes_shows_its_own_rows(home: Path) -> None:
    row = {"backend": "b", "inputs": "normal", "seed": 0, "r_max": 1.0, "r_row": 1.0}
    add("half", "tensor_replay", {**row, "case_id": "half-case", "dtype_class": "bfloat16", "r_rms": 1.2345e-5})
    found = failed("half", "replay", "tensor.bfloat16.r_rms").evidence
    assert column(found, "case_id") == ["half-case"]
    assert column(found, "r_rms") == ["1.234e-05"]
    assert "half-case" not in column(failed("half", "replay", "tensor.float32.r_rms").evidence, "case_id")


def test_a_step_of_the_canary_shows_its_own_windows(home: Path) -> None:
    assert set(column(failed("step", "canary", "50%.ttft_p50_ratio").evidence, "share")) == {"50"}


def test_a_slow_candidate_shows_its_slowest_requests_of_the_step_beside_controls_median(home: Path) -> None:
    step = {"kind": "share_changed", "severity": "info", "subject": "60/20/20", "time": START + timedelta(seconds=80)}
    add("slow", "events", step)
    before = {"time": START + timedelta(seconds=79), "request_id": "before", "tpot_s": 9.0}
    mine = [{"request_id": f"mine-{i}", "tpot_s": 1.0 + i} for i in range(12)]
    control = [{"request_id": f"control-{i}", "tpot_s": 0.25, "side": "control"} for i in range(900)]
    add("slow", "requests", before, *mine, *control)
    found = failed("slow", "canary", "20%.breach", "median TPOT is 8 times control's").evidence
    assert column(found, "request_id") == [f"mine-{i}" for i in reversed(range(4, 12))]
    assert column(found, "tpot_s")[0] == "12"
    assert set(column(found, "control_p50_tpot_s")) == {"0.25"}


def test_lost_requests_are_shown_whoever_served_them(home: Path) -> None:
    bad = {"request_id": "cut", "role": "candidate", "status": 200, "finish_reason": "error", "error": "it broke"}
    add("losing", "requests", bad)
    lost = {"role": "champion", "side": "champion", "request_id": "theirs", "status": 503}
    add("r-elsewhere", "requests", lost, {**lost, "request_id": "later", "time": START + timedelta(days=1)})
    add("losing", "events", {"kind": "x", "time": START - timedelta(days=1)}, {"kind": "y"})
    for check, message in (("100%.lost_requests", "2"), ("100%.breach", "users lost 2 of the last 20 requests")):
        answer = failed("losing", "canary", check, message)
        ids = set(column(answer.evidence, "request_id"))
        assert {"cut", "theirs"} <= ids
        assert "later" not in ids


def test_a_check_without_rows_says_so(home: Path) -> None:
    answer = failed("dead", "expand", "breach", "the process of candidate-1 died")
    assert answer.evidence is None
    assert "no row of the lake is behind breach" in printed(answer)


def test_nothing_that_a_person_copies_is_cut_at_eighty_columns(home: Path) -> None:
    release_id = "a-candidate-with-quite-a-long-name-20261129-231502"
    row = {
        "case_id": "prefill-q512s512-h9/3-d64-float32-0123abcd",
        "backend": "flex_attention:triton",
        "confirmed_backend": "flex_attention:triton",
        "dtype_class": "float32",
        "inputs": "large_logit",
        "seed": 0,
        "r_rms": 91234.5,
        "r_max": 1.2345e-5,
        "r_row": 6.789e-12,
        "lse_max_abs": 3.4567e-9,
    }
    add(release_id, "tensor_replay", row)
    check = Check(check="tensor.float32.r_rms", verdict=Verdict.FAIL, observed=9.871e-7, limit=1.23e-8, owner="num")
    long = check.model_copy(update={"check": "a_check.with_a_name_that_is.quite_long_indeed"})
    fill(lake_dir(), release_id)
    GateReport(stage="replay", checks=(check, long)).write(lake_dir(), release_id, gpu="cpu", model="m")
    text = printed(why(release_id), width=80)
    assert max(map(len, text.splitlines())) <= 80
    ids = (row["case_id"], row["backend"], long.check)
    for part in (*ids, "1.234e-05", "6.789e-12", "3.457e-09", "9.871e-07", "<= 1.23e-08"):
        assert str(part) in text
    assert "…" not in text


def test_an_unknown_release_is_answered_with_the_nearest_ids(home: Path) -> None:
    with pytest.raises(UserError, match="nearest: wrong-scale-20261129"):
        why("wrong-scale-2026")


def test_nothing_released_yet_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="nothing has been released yet"):
        why("r1")


def test_without_an_id_it_is_the_newest_that_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="nothing has been released yet: `make release` does it"):
        newest()
    for release_id in ("zeta-20261129-231502", "alpha-20261130-000000", "of-another-form"):
        fill(lake_dir(), release_id)
    assert newest() == "alpha-20261130-000000"


def test_a_release_that_no_record_knows_is_told_from_the_lake(home: Path) -> None:
    fill(lake_dir(), "orphan")
    answer = why("orphan")
    assert answer.state == "unknown"
    assert [gate.stage for gate in answer.gates] == ["probe", "replay", "baseline"]
    unjudged = answer.model_copy(update={"gates": ()})
    assert "the lake has no verdict of a gate on it" in printed(unjudged)
    assert "no gate has judged it yet" in printed(unjudged.model_copy(update={"state": "registered"}))
