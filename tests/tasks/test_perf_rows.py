"""Rows of the performance tables: figures beside the machine's limit, and what was lost in their place."""

from __future__ import annotations

from typing import Any

import pytest

from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchSample
from attention.schemas import SCHEMAS
from data.requests import Bucket
from gates.paired_ratio import Judged
from gates.statistics import Interval
from tasks.measurement import Run
from tasks.perf_rows import Cell, Who, backend_row, ceiling_rows, pair_row, sample_rows

CASE = AttentionCase(
    phase="decode", batch="8q1s1k", heads_q=32, heads_kv=8, head_dim_qk=128, head_dim_vo=128, dtype="bfloat16"
)
CELL = Cell("kernel_s", Bucket("decode", 1024, "decode/kv<=1024", 0.5), CASE, 12.0)
WHO = Who("candidate", "fp", "flashinfer:fa2", "NVIDIA H200")


def run(seconds: float, rate: float = 4e12) -> Run:
    """Two blocks of equal turns beside a machine that reads at `rate` bytes a second."""
    one = Run(BenchCommand(metric="kernel_s", case=CASE, min_s=0.01), num_blocks=2)
    one.turns["candidate"] = [(seconds, seconds, 3 * seconds)] * 4
    one.turns["champion"] = [(2 * seconds,) * 3] * 4
    for name in ("candidate", "champion"):
        one.first[name] = BenchSample(confirmed="flashinfer:fa2", first_call_s=1.5, cold_ratio=1.0, workspace_bytes=7)
        one.last[name] = BenchSample(peak_bytes=9)
    one.ceilings["matmul"] = [(1e-3, 7e11)] * 2
    one.ceilings["read"] = [(1e-3, rate * 1e-3)] * 2
    return one


def known(table: str, rows: list[dict[str, Any]]) -> None:
    assert all(set(row) <= set(SCHEMAS[table].names) for row in rows)


def test_every_call_is_a_row_and_the_first_is_a_metric_of_its_own() -> None:
    rows = sample_rows(CELL, run(1e-4), "candidate", WHO)
    known("perf_samples", rows)
    steady = [row for row in rows if row["metric"] == "kernel_s"]
    assert [(row["block"], row["call"]) for row in steady[:7]] == [(0, 0), (0, 1), (0, 2)] * 2 + [(1, 0)]
    assert len(steady) == 12
    assert [row["seconds"] for row in rows if row["metric"] == "first_call_s"] == [1.5]


def test_a_figure_stands_beside_the_limit_of_the_machine_and_keeps_its_tail() -> None:
    row = backend_row(CELL, run(2 * CASE.num_bytes() / 4e12), "candidate", WHO, "chat")
    known("perf_backends", [row])
    assert (row["outcome"], row["limited_by"], row["confirmed_backend"]) == ("measured", "bytes", "flashinfer:fa2")
    assert row["limit_ratio"] == pytest.approx(0.5)
    assert row["datasheet_ratio"] == pytest.approx(0.5 * 4.0 / 4.8)
    assert row["p99_s"] == pytest.approx(3 * row["p50_s"]), "outliers are the tail"
    assert row["tokens_per_s"] == pytest.approx(8 / row["p50_s"])
    assert (row["calls"], row["weight"], row["num_samples"], row["peak_bytes"]) == (12.0, 0.5, 12, 9)


def test_a_figure_that_no_machine_reaches_is_no_measurement() -> None:
    above_run = backend_row(CELL, run(0.97 * CASE.num_bytes() / 4e12), "candidate", WHO, "chat")
    assert (above_run["outcome"], "of the ceiling" in above_run["error"]) == ("above_limit", True)
    above_sheet = backend_row(CELL, run(CASE.num_bytes() / 4.9e12, rate=5e12), "candidate", WHO, "chat")
    assert (above_sheet["outcome"], "of the datasheet" in above_sheet["error"]) == ("above_limit", True)


def test_without_ceilings_there_is_no_figure() -> None:
    bare = run(1e-4)
    bare.ceilings.clear()
    assert backend_row(CELL, bare, "candidate", WHO, "chat")["outcome"] == "failed"


def test_who_was_lost_has_its_outcome_and_no_figure() -> None:
    lost = run(1e-4)
    lost.lost["candidate"] = BenchSample(outcome="out_of_memory", error="CUDA out of memory")
    row = backend_row(CELL, lost, "candidate", WHO, "chat")
    assert (row["outcome"], row["error"]) == ("out_of_memory", "CUDA out of memory")
    assert "p50_s" not in row


def test_a_pair_says_its_ratio_with_how_it_was_judged() -> None:
    how = {"margin": 0.01, "aa_floor": 0.004}
    who = Who("champion", "fp0", "triton:paged", "NVIDIA H200")
    row = pair_row(CELL, run(1e-4), Judged(Interval(0.5, 0.49, 0.51), "FAST", 0.96), how, who, WHO)
    known("perf_cells", [row])
    assert (row["verdict"], row["ratio"], row["champion_backend"]) == ("FAST", 0.5, "triton:paged")
    assert row["champion_p50_s"] == pytest.approx(2 * row["candidate_p50_s"])
    assert (row["margin"], row["aa_floor"], row["confidence"], row["num_blocks"]) == (0.01, 0.004, 0.96, 2)


def test_ceilings_are_rows_by_block_and_kind() -> None:
    rows = ceiling_rows(CELL, run(1e-4), WHO)
    known("perf_ceilings", rows)
    assert [(row["kind"], row["block"]) for row in rows] == [("matmul", 0), ("matmul", 1), ("read", 0), ("read", 1)]
