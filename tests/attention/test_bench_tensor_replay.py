"""`python -m attention.bench_tensor_replay`: both sides at once, a second run without an oracle; an error is a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention import bench_tensor_replay

QUICK = ["--device", "cpu", "--seeds", "1", "--max-kv-len", "20"]


def test_two_runs_of_both_sides_over_the_same_truths(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert (
        bench_tensor_replay.main([*QUICK, "--backends", "torch_sdpa:flash", "torch_sdpa:math", "--out", str(out)]) == 0
    )
    found = json.loads(out.read_text())
    first, second = found["first"], found["second"]
    assert first["num_cases"] == second["num_cases"] == first["computed"] + first["read"] == second["read"] > 0
    assert first["computed"] >= first["num_cases"] / 2 > second["computed"] == 0
    assert first["oracle_share"] > 0 == second["oracle_share"]
    assert first["utilisation"] is None


def test_bad_flags_and_cases_that_raise_are_one_line(capsys: Any) -> None:
    assert bench_tensor_replay.main([*QUICK, "--seeds", "0"]) == 2
    assert bench_tensor_replay.main([*QUICK, "--backends", "torch_sdpa:flash", "torch_sdpa:flush"]) == 2
    assert bench_tensor_replay.main([*QUICK, "--backends", "torch_sdpa:flash", "flash_attn:fa2"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "flash_attn:fa2: 4 of 4 cases raised: " in said[2]
