"""`python -m attention.bench_tensor_replay`: two runs, the second without an oracle; what raises is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attention import bench_tensor_replay
from attention.replay import tensor


def test_two_runs_of_the_same_cases(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--device", "cpu", "--seeds", "1", "--max-kv-len", "80", "--out", str(out)]
    assert bench_tensor_replay.main(words) == 0
    found = json.loads(out.read_text())
    first, second = found["first"], found["second"]
    assert first["num_cases"] == second["num_cases"] == first["computed"] == second["read"] > 0
    assert first["oracle_share"] > 0 == second["oracle_share"] == second["computed"]
    assert first["utilisation"] is None


def test_bad_flags_and_cases_that_raise_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["--device", "cpu", "--seeds", "1", "--max-kv-len", "20"]
    assert bench_tensor_replay.main([*words, "--seeds", "0"]) == 2
    assert bench_tensor_replay.main([*words, "--backend", "torch_sdpa:flush"]) == 2

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broke")

    monkeypatch.setattr(tensor, "create", broken)
    assert bench_tensor_replay.main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "torch_sdpa:flash: 4 of 4 cases raised: RuntimeError: broke" in said[2]
