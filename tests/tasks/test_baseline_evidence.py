"""Tables of evidence are made from what was measured, and say what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attention.cases import AttentionCase
from attention.schemas import write_rows
from tasks.baseline_evidence import asked_table, backend_table, main

RELEASE = "baseline-hopper-chat-1"


def row(backend: str, phase: str, batch: str, ratio: float | None, **fields: Any) -> dict[str, Any]:
    case = AttentionCase(
        phase=phase, batch=batch, heads_q=32, heads_kv=8, head_dim_qk=128, head_dim_vo=128, dtype="bfloat16"
    )
    limits = {"prefill": (case.flops() / 750e12, "flops"), "decode": (case.num_bytes() / 4.5e12, "bytes")}
    limit_s, limited_by = limits[phase]
    figures = {"limit_s": limit_s, "limited_by": limited_by, "limit_ratio": ratio, "outcome": "measured"}
    figures |= {"p50_s": limit_s / ratio} if ratio else {"outcome": "refused", "limit_ratio": None}
    common = {"backend": backend, "family": phase, "case_id": case.case_id, "case_json": case.model_dump_json()}
    return common | figures | fields


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    rows = [
        row("flash_attn:fa4", "prefill", "q8k", 0.88),
        row("flash_attn:fa4", "decode", "64q1s4k", None),
        row("triton:paged", "prefill", "q8k", 0.6),
        row("triton:paged", "decode", "64q1s4k", 0.96),
        row("triton:paged", "decode", "64q1s4k", 1.5, outcome="above_limit"),
    ]
    write_rows(run / "lake", "perf_backends", rows, release_id=RELEASE)
    ceilings = [{"kind": "matmul", "seconds": 1e-3, "work": 0.75e12}, {"kind": "read", "seconds": 1e-3, "work": 4.5e9}]
    write_rows(run / "lake", "perf_ceilings", ceilings, release_id=RELEASE)
    startup = [
        {"backend": "flash_attn:fa4", "cache": "cold", "outcome": "measured", "first_call_s": 3.25},
        {"backend": "flash_attn:fa4", "cache": "warm", "outcome": "timed_out"},
    ]
    write_rows(run / "lake", "perf_startup", startup, release_id=RELEASE)
    write_rows(run / "lake", "perf_samples", [{"seconds": 1.0}], release_id=RELEASE)
    document = {"sentence": "over chat it beats", "device": "NVIDIA H200", "cells": [1], "release_id": RELEASE}
    (run / "baseline.json").write_text(json.dumps(document))
    summary = {"equal": {"cells": 50, "SAME": 47, "AMBG": 3, "seconds": 120.4, "margin": 0.01, "wrong": 0}}
    (run / "verdicts.json").write_text(json.dumps({"summary": summary, "verdicts": []}))
    assert main([str(tmp_path / "evidence"), "--collect", str(run)]) == 0
    return tmp_path / "evidence"


def test_the_evidence_has_no_raw_samples_and_no_rows_twice(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "baseline.json",
        "perf_backends.parquet",
        "perf_ceilings.parquet",
        "perf_startup.parquet",
        "verdicts.json",
    ]
    assert "cells" not in json.loads((folder / "baseline.json").read_text())


def test_what_is_asked_stands_beside_what_was_seen(folder: Path) -> None:
    said = asked_table(folder)
    assert "| best prefill of q8k | flash_attn:fa4 660 TFLOP/s, 88.0% of the matrix product | 85% |" in said
    assert "| best decode of 64q1s4k | triton:paged 4.32 TB/s, 96.0% of the read of the same bytes | 95% |" in said
    assert (
        "| two equal processes: 50 cells in 120 s | 47 SAME, 3 AMBG (margin 1.0%) | no FAST or SLOW, 90 % SAME |"
        in said
    )
    assert "over chat it beats" in said


def test_a_backend_is_a_row_with_its_best_figures_and_what_it_lost(folder: Path) -> None:
    said = backend_table(folder)
    assert (
        "| flash_attn:fa4 | 660 TFLOP/s, 88% (paged_nhd/16, eager) | - | 3.2 s / timed_out | 1 of 2 | 1 refused |"
        in said
    )
    assert (
        "| triton:paged | 450 TFLOP/s, 60% (paged_nhd/16, eager) | 4.32 TB/s, 96% (paged_nhd/16, eager) | - / - |"
        in said
    )
    assert "1 above_limit" in said
    assert "matmul 750 TFLOP/s" in said


def test_a_load_is_a_row_a_level(folder: Path) -> None:
    tails = {f"{one}_p{q}_s": q / 1000 for one in ("ttft", "tpot") for q in (50, 99)}
    level = {"level": 1.2, "num_good": 5, "num_offered": 9, "num_refused": 1, "kv_peak_share": 0.25, **tails}
    (folder / "load.json").write_text(json.dumps({"saturation_per_s": 2.0, "levels": [level]}))
    said = backend_table(folder)
    assert "| load of 2 requests/s |" in said
    assert said.endswith("| 120% | 5 of 9 | 1 | 50 / 99 ms | 50 / 99 ms | 25% |")


def test_another_run_in_the_same_lake_is_left_out_and_what_a_run_lacks_goes(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rows(run / "lake", "perf_backends", [row("torch_sdpa:math", "prefill", "q8k", 0.9)], release_id="other")
    shutil.rmtree(run / "lake" / "perf_startup")
    assert main([str(folder), "--collect", str(run)]) == 0
    assert "math" not in backend_table(folder)
    assert not (folder / "perf_startup.parquet").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("perf_backends.parquet", "no parquet"), ("verdicts.json", "{}"), ("baseline.json", "[]")],
)
def test_a_broken_file_is_one_line(folder: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_text(content)
    assert main([str(folder), "--asked"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_folder_without_evidence_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing"), "--asked"]) == 2
    assert main([str(tmp_path), "--collect", str(tmp_path / "nothing")]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
