"""One plan recorded under two torch versions, in two virtual environments, compared and judged outside.

Tensors: cases on flash. The small model: prompts of the traffic on math here and on flash there, as a release of both
would record them, judged by `compare A B` and by the release's own gate.

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
from attention.job import CompareJob, Evidence, Setup
from data.lake import Lake
from data.paths import models_dir
from data.plan import load_plan
from gates.replay_model import model_checks
from gates.thresholds import load_limits
from gates.verdict import Check, Verdict, worst
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
LIMITS = ROOT / "gates/thresholds.yaml"
DEMO = load_plan("demo")
FLASH, MATH = (ROOT / f"data/policies/cpu-{name}.yaml" for name in ("flash", "math"))
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
    found = [stamp.parent / "bin/python" for stamp in sorted(ROOT.glob(".venv-torch-*/installed"))]
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


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path, *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["compare", str(a), str(b), "--limits", str(LIMITS), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_plan_passes_under_another_torch_and_a_wrong_scale_there_is_rejected(
    other: Path, plan: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = recorded(tmp_path / "A", plan, HERE)
    b = recorded(tmp_path / "B", plan, other)
    mutant = recorded(tmp_path / "mutant", plan, other, "-c", WRONG_SCALE)
    truths = ("--truths", str(tmp_path / "truths"))
    code, document = compared(capsys, a, b, *truths)
    assert (code, document["verdict"]) == (0, "pass")
    assert document["a"]["torch"] != document["b"]["torch"]
    assert document["a"]["fingerprint_id"] != document["b"]["fingerprint_id"]
    assert len(document["rows"]) > 200
    assert {row["inputs"] for row in document["rows"]} == set(INPUTS.split(","))
    code, document = compared(capsys, a, mutant, *truths)
    assert (code, document["verdict"]) == (1, "fail")
    assert all("times_champion" in " ".join(row["reasons"]) for row in document["rows"] if row["verdict"] == "fail")
    for inputs in INPUTS.split(","):
        failed = [row for row in document["rows"] if row["inputs"] == inputs and row["verdict"] == "fail"]
        assert failed, f"a scale 5 % off shows in some case of {inputs}"


@pytest.fixture(scope="module")
def sides(other: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo plan's model layer of the small model: champion and floor here, candidate and mutant there."""
    folder, lines = tmp_path_factory.mktemp("prompts"), (ROOT / "data/traffic/sample.jsonl").read_text().splitlines()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines[: DEMO.replay.model_prompts]))

    def plan(policy: Path) -> list[str]:
        tokens = {"--max-tokens": DEMO.replay.model_tokens, "--decode-tokens": DEMO.replay.decode_tokens}
        setup = flags(Setup(model=models_dir().resolve() / "smollm2-135m-instruct", policy=policy))
        return ["replay", *setup, "--prompts", str(prompts), *(str(one) for pair in tokens.items() for one in pair)]

    return {
        "champion": recorded(folder / "champion", plan(MATH), HERE),
        "floor": recorded(folder / "floor", plan(FLASH), HERE),
        "candidate": recorded(folder / "candidate", plan(FLASH), other),
        "mutant": recorded(folder / "mutant", plan(FLASH), other, "-c", WRONG_SCALE),
    }


def test_the_small_model_passes_under_another_torch_in_prefill_and_in_forced_decode(
    sides: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = compared(capsys, sides["champion"], sides["candidate"], "--floor", str(sides["floor"]))
    assert (code, document["verdict"], document["reasons"]) == (0, "pass", [])
    assert document["a"]["torch"] != document["b"]["torch"]
    assert document["a"]["fingerprint_id"] != document["b"]["fingerprint_id"]
    assert set(document["a"]["confirmed"].values()) == {"torch_sdpa:math"}
    assert set(document["b"]["confirmed"].values()) == {"torch_sdpa:flash"}
    prompts, num_forced = DEMO.replay.model_prompts, DEMO.replay.decode_tokens
    positions = {"prefill": prompts * DEMO.replay.model_tokens, "decode": prompts * num_forced}
    for mode, num in positions.items():
        figures = document["figures"][mode]
        assert figures["positions"] == num
        assert 0 < figures["kl_mean"] < 1e-9, "other kernels ran, and their distance is that of rounding"


def test_a_wrong_scale_under_the_other_torch_fails_in_both_modes(
    sides: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = compared(capsys, sides["champion"], sides["mutant"], "--floor", str(sides["floor"]))
    assert (code, document["verdict"]) == (1, "fail")
    assert document["a"]["torch"] != document["b"]["torch"]
    for mode in ("prefill", "decode"):
        assert any(reason.startswith(f"{mode} kl_mean ") for reason in document["reasons"])
        assert document["figures"][mode]["kl_mean"] > 1e-4


def gated(python: Path, sides: dict[str, Path], candidate: str, folder: Path) -> list[Check]:
    """What the release's gate says of the model layer, compared by that interpreter as a release would."""
    job = CompareJob(
        setup=Setup(model=models_dir().resolve() / "smollm2-135m-instruct", policy=FLASH),
        evidence=Evidence(lake=folder / "lake", release_id="r1", side="candidate"),
        champion=sides["champion"],
        candidate=sides[candidate],
        floor=sides["floor"],
        known_floor=folder / "floors/floor.parquet",
    )
    (folder / "job.json").write_text(job.model_dump_json())
    recorded(folder / "compared", ["compare", "--job", str(folder / "job.json")], python)
    with Lake(folder / "lake") as tables:
        return model_checks(tables, "r1", DEMO, load_limits("replay", DEMO.name))


def test_the_gate_of_a_release_says_the_same_of_both(other: Path, sides: dict[str, Path], tmp_path: Path) -> None:
    for name, verdict in (("candidate", Verdict.PASS), ("mutant", Verdict.FAIL)):
        folder = tmp_path / name
        folder.mkdir()
        checks = gated(other, sides, name, folder)
        assert worst(check.verdict for check in checks) is verdict, [c for c in checks if c.verdict is not Verdict.PASS]
        failed = {check.check for check in checks if check.verdict is Verdict.FAIL}
        assert {f"model.{mode}.kl_mean_times" for mode in ("prefill", "decode")} <= failed or name == "candidate"
