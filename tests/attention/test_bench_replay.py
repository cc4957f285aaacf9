"""The benchmark of the model layer: all parts run at a small size, and its own decode is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import bench_replay
from attention.bench_replay import Size, StaticDecode, figures, main


def test_every_part_is_timed_in_every_round_and_the_file_has_the_raw_seconds(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "replay.json"
    flags = ["--prompts", "3", "--tokens", "40", "--decode", "5", "--rounds", "2", "--out", str(out)]
    backends = ["--backends", "torch_sdpa:math", "torch_sdpa:flash"]
    assert main(["--model", str(tiny_model), "--device", "cpu", *flags, *backends]) == 0
    found = json.loads(out.read_text())
    names = ["forward", "record_a", "record_b", "compare", "graph_decode", "forced_decode"]
    assert list(found["seconds"]) == names
    assert all(len(values) == 2 and min(values) > 0 for values in found["seconds"].values())
    assert found["confirmed"]["a"]["prefill"] == "torch_sdpa:math"
    assert found["confirmed"]["b"]["prefill"] == "torch_sdpa:flash"
    assert "round 2 of 2: forced_decode" in capsys.readouterr().err


def test_the_shape_of_a_model_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shutil.copytree(tiny_model, shape, ignore=shutil.ignore_patterns("*.safetensors"))
    out = tmp_path / "replay.json"
    flags = [
        "--random-weights",
        "--device",
        "cpu",
        "--prompts",
        "1",
        "--tokens",
        "20",
        "--decode",
        "2",
        "--rounds",
        "1",
    ]
    assert main(["--model", str(shape), *flags, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["weights"], found["model"]) == ("random", "shape")


def test_rates_and_ratios_follow_from_the_medians() -> None:
    seconds = {"forward": [1.0], "record_a": [0.5, 0.75, 9], "record_b": [0.75], "compare": [0.5]}
    found = figures({**seconds, "graph_decode": [0.2], "forced_decode": [0.1]}, Size(10, 100, 10, 3))
    assert found["forward_tokens_per_s"] == 1000
    assert found["replay_tokens_per_s"] == 2 * 1000 / 2.0, "tokens of both sides"
    assert found["replay_over_forward"] == 1
    assert found["forced_over_graph"] == pytest.approx(2)


def test_the_decode_that_is_compared_with_computes_what_the_model_does(tiny_model: Path) -> None:
    """Otherwise its time says nothing: the last logits are those of one plain forward."""
    plain: Any = bench_replay._plain(tiny_model, "float32", "cpu", "sdpa")
    ids = torch.randint(1, 200, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = plain(input_ids=ids, use_cache=False).logits[:, -1:]
        static = StaticDecode(bench_replay._plain(tiny_model, "float32", "cpu", "sdpa"), ids)
        static._model.set_attn_implementation("static_cache")
        [logits] = static.run(0)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decode", "0"], "--decode 0: use a whole number, at least 1"),
        (["--tokens", "8", "--decode", "8"], "--decode 8: use fewer than --tokens 8"),
        (["--tokens", "1000"], "--tokens 1000: tiny-llama has a context of 512"),
        (["--backends", "torch_sdpa:flush", "math"], "torch_sdpa:flush"),
    ],
)
def test_bad_flags_are_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["--model", str(tiny_model), "--device", "cpu", "--tokens", "16", "--decode", "2", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
