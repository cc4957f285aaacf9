"""Activations of the served model: one layer of each kind, the same for both sides, never a broken file's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.errors import UserError
from attention.job import Prompt
from attention.model import Chunk, Runner, specs_of
from attention.replay import activations
from attention.replay.activations import layers_of

Make = Callable[..., Runner]
PROMPTS = tuple(
    Prompt(prompt_id=f"p{i}", category="c", language="en", messages=({"role": "user", "content": text},))
    for i, text in enumerate(("the first of the prompts", "and another", "a third one that is longer than the others"))
)


def test_the_first_layer_at_or_above_the_fourth_stands_for_its_kind(tiny_model: Path) -> None:
    (spec,) = set(specs_of(tiny_model, "float32"))
    from dataclasses import replace

    sliding = replace(spec, window=(31, 0))
    assert layers_of([sliding, spec] * 6) == {sliding: 4, spec: 5}
    assert layers_of([spec, spec]) == {spec: 1}, "a model of two layers: its last"


def test_what_is_captured_is_what_the_layer_attends_to(make_runner: Make, tmp_path: Path) -> None:
    runner, seen = make_runner(), {}
    (spec,) = set(runner.dispatcher.specs)
    one = activations.capture(runner, [spec] * 2, PROMPTS, 7, 40, tmp_path / "a.safetensors")[spec]
    assert one.q_THD.shape == (40, 4, 16)
    assert one.k_TGD.shape == one.v_TGD.shape == (40, 2, 16)
    assert runner.tap is None
    assert runner.pool.num_free == runner.pool.num_pages

    # The same text through the whole model: layer 1 sees the same numbers.
    def watch(layer: int, *tensors: torch.Tensor) -> None:
        seen[layer] = [t.clone() for t in tensors]

    runner.tap = watch
    text = activations._text(runner, PROMPTS, 7, 40)
    runner.forward([Chunk(text, 0, tuple(runner.pool.alloc(3)))])
    assert sorted(seen) == [0, 1]
    torch.testing.assert_close(list(vars(one).values()), seen[1])


def test_another_seed_is_another_text_and_a_plan_without_prompts_has_none(make_runner: Make) -> None:
    runner = make_runner()
    texts = {activations._text(runner, PROMPTS, seed, 30) for seed in range(6)}
    assert len(texts) > 1
    assert {len(text) for text in texts} == {30}
    with pytest.raises(UserError, match="need prompts"):
        activations._text(runner, (), 0, 30)


def test_who_comes_second_reads_what_the_first_wrote(tiny_model: Path, make_runner: Make, tmp_path: Path) -> None:
    specs = specs_of(tiny_model, "float32")
    path = tmp_path / "shared" / "a.safetensors"
    first = activations.capture(make_runner(), specs, PROMPTS, 7, 40, path)
    other = activations.capture(make_runner("torch_sdpa:math", scale_factor=1.5), specs, PROMPTS, 7, 40, path)
    for spec, one in first.items():
        assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other[spec]).values(), strict=True))
    activations._write_once({"0/q": torch.zeros(1)}, path)  # it began before the file was there
    assert activations.read(path, specs).keys() == first.keys()
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
    assert path.parent.stat().st_mode & 0o077 == 0, "activations are as private as the prompts"


def test_a_broken_file_or_one_of_another_model_is_refused(tiny_model: Path, make_runner: Make, tmp_path: Path) -> None:
    specs = specs_of(tiny_model, "float32")
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"broken")
    with pytest.raises(UserError, match="remove the file"):
        activations.capture(make_runner(), specs, PROMPTS, 7, 40, path)
    path.unlink()
    activations._write_once({"9/q": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="remove the file"):
        activations.capture(make_runner(), specs, PROMPTS, 7, 40, path)
