"""Drift: rules against observations in both directions, and two observations against each other."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from attention.cases import AttentionCase
from attention.drift import RowsLog, against_rules, between, finish_log, only_in, read_rows, unfinished_rows, write_rows
from attention.errors import UserError
from attention.probe import Probe, ProbeResult, run_probe
from attention.reasons import Code, Reason

MATH = "torch_sdpa:math"
CASE = AttentionCase(
    phase="decode", batch="q1s64", heads_q=4, heads_kv=2, head_dim_qk=16, head_dim_vo=16, dtype="float32"
)


def row(level: str, status: str, *, probe: str = "single_decode", code: Code | None = None) -> ProbeResult:
    reasons = ()
    if code is not None:
        reasons = (Reason(code=code, dimension="d", observed="o", allowed="a", source="s", message="m"),)
    fields: dict[str, Any] = {"backend": MATH, "feature": "decode", "required": True, "case": CASE}
    return ProbeResult(level=level, status=status, probe=probe, reasons=reasons, **fields)  # type: ignore[arg-type]


def test_what_rules_allow_and_what_failed_is_drift_with_the_reason() -> None:
    for failed in ("construct", "execute"):
        rows = [row("static", "pass"), row(failed, "fail", code=Code.LAUNCH_FAILED)]
        (drift,) = against_rules(rows)
        assert (drift.before, drift.after) == ("declared pass", "observed fail")
        assert drift.reasons[0].code == Code.LAUNCH_FAILED
        assert "LAUNCH_FAILED" in str(drift)


@pytest.mark.parametrize("refused", ["fail", "known_bad"])
def test_what_rules_refuse_and_what_passed_is_drift_with_the_rule(refused: str) -> None:
    rows = [row("static", refused, code=Code.HEAD_DIM_UNSUPPORTED), row("construct", "pass"), row("execute", "pass")]
    (drift,) = against_rules(rows)
    assert (drift.before, drift.after) == (f"declared {refused}", "observed pass")
    assert drift.reasons[0].code == Code.HEAD_DIM_UNSUPPORTED


def test_agreement_and_ignorance_are_no_drift() -> None:
    for rows in (
        [row("static", "pass"), row("construct", "pass"), row("execute", "pass")],
        [row("static", "fail"), row("execute", "fail")],
        [row("static", "fail")],
        [row("static", "pass"), row("execute", "unknown")],
        [row("static", "pass"), row("construct", "pass")],
    ):
        assert against_rules(rows) == []


def test_two_observations_differ_where_a_cell_changed_or_is_absent() -> None:
    first = [row("static", "pass"), row("execute", "pass"), row("execute", "pass", probe="gone")]
    second = [row("static", "pass"), row("execute", "fail", code=Code.NUMERIC_DRIFT)]
    changed = {d.probe: (d.before, d.after) for d in between(first, second)}
    assert changed == {"single_decode": ("pass", "fail"), "gone": ("pass", "absent")}
    assert between(first, first) == []


def test_of_backends_that_one_observation_lacks_there_is_no_drift_but_their_names() -> None:
    first = [row("execute", "pass")]
    second = [*first, row("execute", "fail", code=Code.TIMEOUT).model_copy(update={"backend": "torch_sdpa:flash"})]
    assert between(first, second) == between(second, first) == []
    assert (only_in(first, second), only_in(second, first)) == ([], ["torch_sdpa:flash"])


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet"])
def test_rows_survive_a_file(tmp_path: Path, name: str) -> None:
    rows = list(run_probe(MATH, Probe(name="p", feature="decode", case=CASE), "cpu"))
    rows += [row("execute", "fail", code=Code.TIMEOUT)]
    write_rows(tmp_path / name, rows)
    assert read_rows(tmp_path / name) == rows


def test_what_is_no_observation_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "rows.json"
    bad.write_text("[]")
    with pytest.raises(UserError, match="not written by `probe --out`"):
        read_rows(bad)
    with pytest.raises(UserError, match="no such file; write it with `python -m attention probe"):
        read_rows(tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"write probe rows to a \.json or \.parquet file"):
        write_rows(tmp_path / "rows.csv", [])


CELL = [row("static", "pass"), row("construct", "pass"), row("execute", "pass")]


def test_a_file_stays_until_the_rows_that_replace_it_are_whole_and_so_do_its_neighbours(tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    write_rows(out, CELL)
    neighbours = [tmp_path / name for name in ("rows.json", "rows.jsonl", "rows.new", "rows.parquet.new")]
    for neighbour in neighbours:
        neighbour.write_text("mine")
    log = RowsLog(out)
    assert (read_rows(out), unfinished_rows(out)) == (CELL, [])
    log.close()
    assert read_rows(out) == CELL, "a run without a row replaces nothing"
    log = RowsLog(out, CELL[:1])
    log.add(CELL[1:2])
    assert (read_rows(out), unfinished_rows(out)) == (CELL, CELL[:2])
    log.close()
    assert (read_rows(out), unfinished_rows(out)) == (CELL[:2], [])
    assert {neighbour.read_text() for neighbour in neighbours} == {"mine"}
    assert set(tmp_path.iterdir()) == {out, *neighbours}


def test_of_a_probe_whose_rows_were_cut_none_is_known(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    log = RowsLog(out)
    for cell in (CELL, [one.model_copy(update={"backend": "torch_sdpa:flash"}) for one in CELL]):
        log.add(cell)
    (lines,) = tmp_path.iterdir()
    written = lines.read_bytes()
    for cut in (1, 2, 400, 900):  # behind its last row, within it, within the row before
        lines.write_bytes(written[:-cut])
        assert unfinished_rows(out) == CELL
    finish_log(out)
    assert read_rows(out) == CELL


def test_a_full_disk_is_one_line_and_costs_the_probe_that_was_being_written(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    log = RowsLog(out, CELL)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = sum(len(one.model_dump_json()) for one in CELL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * room, hard))
    try:
        with pytest.raises(UserError, match=r"rows\.json: rows cannot be written \(.*\); make room, then go on with"):
            log.add([*CELL, *CELL])
        with pytest.raises(UserError, match="make room"):
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists()
    finish_log(out)
    assert read_rows(out) == CELL
