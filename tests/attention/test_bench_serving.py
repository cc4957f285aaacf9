"""Serving beside transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attention.bench_serving import main, prompts
from data.paths import models_dir

POLICY = Path(__file__).parents[2] / "data/policies/cpu-flash.yaml"
FLAGS = ["--model", str(models_dir() / "smollm2-135m-instruct"), "--policy", str(POLICY)]


def test_no_two_prompts_are_the_same() -> None:
    assert len(set(prompts(100))) == 100


@pytest.mark.parametrize("flag", ["--requests", "--concurrency", "--max-tokens", "--rounds", "--threads"])
def test_bad_counts_are_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, flag, "0"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} 0")


def test_an_instance_that_cannot_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", FLAGS[1], "--policy", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_eight_clients_get_half_as_much_again_as_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--rounds", "1", "--max-tokens", "48"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["confirmed"]["decode"] == "torch_sdpa:flash"
    assert found["ratio"] >= 1.5
