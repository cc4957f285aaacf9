"""`replay --prompts` and `compare A B` by hand: what each prints, its exit code, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.__main__ import main
from attention.errors import UserError
from attention.replay import summary
from attention.replay.prompts import read_prompts
from tests.attention.conftest import rewrite

REPO = Path(__file__).parents[2]
GOLDEN = {"prompt_id": "g1", "category": "copy", "language": "pl", "messages": [{"role": "user", "content": "Cześć!"}]}
REQUEST = {"custom_id": "r1", "body": {"model": "m", "messages": [{"role": "user", "content": "Say hello. " * 3}]}}
PLAIN = {"custom_id": "r2", "body": {"model": "m", "prompt": "once upon a time"}}

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (GOLDEN, REQUEST, PLAIN)))
    return path


@pytest.fixture(scope="module")
def record(tiny_model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def of(policy: str, *flags: str) -> Path:
        out = tmp_path_factory.mktemp("recording")
        common = ["--model", str(tiny_model), "--policy", str(REPO / f"data/policies/{policy}.yaml")]
        decode = ["--decode-tokens", "4", *flags]
        assert main(["replay", "--prompts", str(prompts), "--out", str(out), *common, *decode]) == 0
        return out

    return of


@pytest.fixture(scope="module")
def champion(record: Callable[..., Path]) -> Path:
    return record("cpu-math")


def test_a_sound_candidate_passes_beside_the_champion_and_its_floor(
    champion: Path, record: Callable[..., Path], capsys: Capture
) -> None:
    candidate, second = record("cpu-flash"), record("cpu-flash")
    assert "3 prompts, " in capsys.readouterr().out
    for own in (champion, candidate):
        assert main(["compare", str(champion), str(candidate), "--floor", str(own)]) == 2
        assert "it is A or B itself" in capsys.readouterr().err
    assert main(["compare", str(champion), str(candidate), "--floor", str(second)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"A {champion}: torch ")
    assert "decode: 12 positions, KL mean " in out
    assert "  floor: 12 positions, KL mean " in out
    assert out.splitlines()[-1].startswith("pass: ")


def test_a_faulty_candidate_fails_with_the_figure_and_its_limit(
    champion: Path, record: Callable[..., Path], capsys: Capture
) -> None:
    broken = record("cpu-math")
    rows = np.load(broken / "decode.npy")
    rewrite(broken, "decode", rows[::-1].copy())
    capsys.readouterr()
    assert main(["compare", str(champion), str(broken), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fail"
    named = dict.fromkeys(tuple(reason.split()[:2]) for reason in found["reasons"])
    assert list(named) == [("decode", name) for name in summary.FIGURES]
    assert found["figures"]["prefill"]["kl_mean"] == 0
    assert (found["floor"], found["b"]["confirmed"]["decode"]) == (None, "torch_sdpa:math")
    assert "content" not in json.dumps(found), "figures leave the folder, texts do not"
    assert main(["compare", str(champion), str(broken)]) == 1
    *_, reason, last = capsys.readouterr().out.splitlines()
    assert reason.startswith("decode ")
    assert last.startswith("fail: ")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("torch", "9", "another torch than A's"), ("confirmed", {"prefill": "x", "decode": "x"}, "x ran in place of")],
)
def test_a_floor_of_another_environment_or_backend_is_refused(
    champion: Path, record: Callable[..., Path], tmp_path: Path, capsys: Capture, key: str, value: Any, said: str
) -> None:
    """A floor where B was recorded would have B's faults, and allow them."""
    other, second = (shutil.copytree(champion, tmp_path / name) for name in ("other", "second"))
    manifest = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    assert main(["compare", str(champion), str(other), "--floor", str(second)]) == 2
    assert said in capsys.readouterr().err


def test_without_a_sound_champion_or_positions_of_both_modes_nothing_is_judged(
    champion: Path, record: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    other, stood_in = (shutil.copytree(champion, tmp_path / name) for name in ("other", "stood_in"))
    manifest = json.loads((stood_in / "manifest.json").read_text())
    (stood_in / "manifest.json").write_text(json.dumps({**manifest, "confirmed": {"prefill": "x", "decode": "x"}}))
    assert main(["compare", str(stood_in), str(other)]) == 3
    assert "A, decode: x ran in place of torch_sdpa:math" in capsys.readouterr().out
    short, same = record("cpu-math", "--max-tokens", "1"), record("cpu-math", "--max-tokens", "1")
    assert main(["compare", str(short), str(same)]) == 3
    assert "decode: no position" in capsys.readouterr().out


def test_recordings_of_cases_and_of_prompts_do_not_mix(champion: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["compare", str(champion), str(tmp_path)]) == 2
    assert f"recording {tmp_path}: No such file" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text('{"entries": []}')
    for pair in ((champion, tmp_path), (tmp_path, champion)):
        assert main(["compare", *map(str, pair)]) == 2
        said = capsys.readouterr().err
        assert f"{champion} is of prompts" in said
        assert f"{tmp_path} is of cases" in said


def test_a_model_that_stayed_where_the_recording_was_made_is_named_with_a_flag(
    champion: Path, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    moved = Path(shutil.copytree(champion, tmp_path / "moved"))
    manifest = moved / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(tiny_model), "/elsewhere/tiny-llama"))
    assert main(["compare", str(moved), str(champion)]) == 2
    assert "/elsewhere/tiny-llama: recording" in (said := capsys.readouterr().err)
    assert "name it with --model" in said
    assert main(["compare", str(moved), str(champion), "--model", str(tiny_model)]) == 0


def test_a_floor_tightens_and_a_small_one_is_raised_to_the_least() -> None:
    limits = summary.load_limits(REPO / "gates/thresholds.yaml", "float32")
    one = {"positions": 500.0, "kl_mean": 1e-6, "kl_p999": 1e-9, "flips": 0.0, "flip_margin": 0.0}
    nothing = {**one, "kl_mean": 0.0}
    for floors in (None, {"prefill": nothing}):  # without a floor the least one holds: float32 is not judged as bf16
        assert summary.reasons({"prefill": one}, floors, limits) == [
            "prefill kl_mean 1e-06 > 2 times the floor of 1e-09"
        ]
    assert summary.reasons({"prefill": one}, {"prefill": {**one, "kl_mean": 6e-7}}, limits) == []
    assert summary.reasons({"prefill": {**one, "kl_mean": float("nan")}}, None, limits) == [
        "prefill kl_mean nan > 0.002",
        "prefill kl_mean nan > 2 times the floor of 1e-09",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", r"line 1: holds \[1\], where an object belongs"),
        ('{"messages": []}', "line 1: no prompt_id or custom_id"),
        ('{"prompt_id": "a"}', "line 1: neither messages nor a prompt"),
        ("\n", "no prompt in it"),
    ],
)
def test_a_bad_file_of_prompts_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_what_the_flags_must_not_say_is_one_line(
    prompts: Path, champion: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = shutil.copytree(champion, tmp_path / "other")

    def error(*argv: Any) -> str:
        assert main([str(one) for one in argv]) == 2
        return capsys.readouterr().err

    assert "replay --prompts needs --out DIR" in error("replay", "--prompts", prompts)
    assert "--max-tokens 0: use a whole number" in error(
        "replay", "--prompts", prompts, "--out", tmp_path / "x", "--max-tokens", 0
    )
    assert "cannot be read" in error("replay", "--prompts", tmp_path / "none", "--out", tmp_path / "x")
    assert "none.yaml: cannot be read" in error("compare", champion, other, "--limits", tmp_path / "none.yaml")
    assert "no config.json there" in error("compare", champion, other, "--model", tmp_path)
    assert "A and B are one folder" in error("compare", champion, champion)
