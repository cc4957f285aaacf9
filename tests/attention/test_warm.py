"""Compiling ahead: one case of every kind of code, each in a worker, and what does not compile is a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attention.cases import AttentionCase
from attention.cells import load_cells
from attention.isolate import NOT_RUN
from attention.warm import COMPILING, compile_all, distinct, main

CELLS = """
groups:
  - base: {heads_q: 4, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 16, dtype: float32, layout: paged_nhd, page_size: 16}
    axes: [[{phase: decode, batch: q1s33}, {phase: prefill, batch: q20}, {phase: prefill, batch: q40}]]
"""


def case(**changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 16, "dtype": "float32"}
    return AttentionCase(**{"phase": "decode", "batch": "q1s33", **fields, **changes})


def test_flashinfers_prefill_kernels_have_one_module_for_every_batch_phase_and_page() -> None:
    alike = [case(), case(batch="q1s40"), case(page_size=64), case(phase="prefill", batch="q20")]
    assert distinct("flashinfer:fa2", alike) == alike[:1]
    assert distinct("flashinfer:xqa", alike) == [alike[0], alike[2]], "decode only, and pages count"
    assert distinct("triton:paged", alike) == [alike[0], alike[2], alike[3]]


@pytest.mark.parametrize("changes", [{"softcap": 3.0}, {"window": (7, 0)}, {"sinks": True}, {"head_dim_qk": 32}])
def test_a_feature_is_other_code(changes: dict[str, Any]) -> None:
    for backend in COMPILING:
        assert len(distinct(backend, [case(), case(**changes)])) == 2


def test_the_cells_of_hopper_need_few_modules() -> None:
    cells = list(dict.fromkeys(p.case for p in load_cells(Path("attention/cells/hopper.yaml"))))
    assert len(distinct("flashinfer:fa3", cells)) < 20
    assert len(distinct("triton:paged", cells)) > 40


def test_what_cannot_run_here_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cells.yaml").write_text(CELLS)
    out = tmp_path / "compiled.json"
    flags = ["--cells", str(tmp_path / "cells.yaml"), "--out", str(out), "--device", "cpu", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", ["warm", *flags, "--backends", "torch_sdpa:flash,flash_attn:fa2"])
    assert main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["backend"], row["error"] is None) for row in rows] == [
        ("torch_sdpa:flash", True),
        ("flash_attn:fa2", False),
        ("torch_sdpa:flash", True),
        ("flash_attn:fa2", False),
    ]
    assert "no declared rules for cpu" in rows[1]["error"]


def test_when_the_time_is_spent_the_rest_is_not_compiled() -> None:
    (row,) = compile_all(["torch_sdpa:flash"], [case()], device="cpu", jobs=1, budget_s=0.0)
    assert row.error == NOT_RUN
