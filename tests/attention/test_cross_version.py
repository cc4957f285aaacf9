"""One plan recorded under two torch versions, in two virtual environments, compared and judged outside.

`make other-torch` makes the second environment; `make test-all` does so first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention.__main__ import main
from attention.cases import replay_shapes
from attention.job import Setup
from tests.attention.test_main import flags

ROOT = Path(__file__).parents[2]
HERE = Path(sys.executable)
CASES = {
    "groups": [
        {
            "base": {"heads_q": 9, "heads_kv": 3, "head_dim_qk": 64, "head_dim_vo": 64},
            "axes": [
                [{"dtype": "float32"}, {"dtype": "bfloat16"}],
                [{"window": [None, None]}, {"window": [31, 0]}],
                [{"phase": phase, "batch": batch} for phase, batch in replay_shapes(1024)],
            ],
        }
    ]
}
INPUTS = "normal,needle,large_logit,window_edge,sink"
WRONG_SCALE = """
import sys
from dataclasses import replace
from attention.__main__ import main
from attention.backends.torch_sdpa import TorchSdpa
plan = TorchSdpa.plan
TorchSdpa.plan = lambda self, batch, spec, **more: plan(self, batch, replace(spec, scale=spec.scale * 1.05), **more)
sys.exit(main(sys.argv[1:]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def other() -> Path:
    """Python of the environment with another torch."""
    found = [stamp.parent / "bin/python" for stamp in ROOT.glob(".venv-torch-*/installed")]
    if not found:
        pytest.skip("no environment with another torch: `make other-torch` makes it, or says why it cannot be fetched")
    return found[0]


@pytest.fixture
def plan(tiny_model: Path, policy_file: Path, tmp_path: Path) -> list[str]:
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(CASES))
    setup = flags(Setup(model=tiny_model, policy=policy_file))
    return ["replay", *setup, "--cases", str(cases), "--inputs", INPUTS, "--seeds", "1", "2"]


def recorded(out: Path, plan: list[str], python: Path, *start: str) -> Path:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(python), *(start or ("-m", "attention")), *plan, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path, truths: Path) -> tuple[int, dict[str, Any]]:
    limits = ROOT / "gates/thresholds.yaml"
    code = main(["compare", str(a), str(b), "--limits", str(limits), "--truths", str(truths), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_plan_passes_under_another_torch_and_a_wrong_scale_there_is_rejected(
    other: Path, plan: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = recorded(tmp_path / "A", plan, HERE)
    b = recorded(tmp_path / "B", plan, other)
    mutant = recorded(tmp_path / "mutant", plan, other, "-c", WRONG_SCALE)
    capsys.readouterr()
    code, document = compared(capsys, a, b, tmp_path / "truths")
    assert (code, document["verdict"]) == (0, "pass")
    assert document["a"]["torch"] != document["b"]["torch"]
    assert document["a"]["fingerprint_id"] != document["b"]["fingerprint_id"]
    assert len(document["rows"]) > 200
    assert {row["inputs"] for row in document["rows"]} == set(INPUTS.split(","))
    code, document = compared(capsys, a, mutant, tmp_path / "truths")
    assert (code, document["verdict"]) == (1, "fail")
    assert all("times_champion" in " ".join(row["reasons"]) for row in document["rows"] if row["verdict"] == "fail")
    for inputs in INPUTS.split(","):
        failed = [row for row in document["rows"] if row["inputs"] == inputs and row["verdict"] == "fail"]
        assert failed, f"a scale 5 % off shows in some case of {inputs}"
