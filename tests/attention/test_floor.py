"""The floor of the model layer: which second way it takes, that it is sound, and when it is measured again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention.dispatch import Dispatcher
from attention.job import ModelPlan, Setup
from attention.model import Runner, specs_of
from attention.policy import Policy
from attention.replay import compare, floor, model
from attention.replay.states import States
from tests.attention.test_model_replay import PROMPTS, environment

Make = Callable[..., Runner]


def runner_of(tiny_model: Path, *backends: str) -> Runner:
    policy = Policy(preferred=(backends[0],), fallback=backends[1:])
    return Runner(tiny_model, Dispatcher(policy, specs_of(tiny_model, "float32")), num_pages=256)


def plan_of(tmp_path: Path, **changes: Any) -> ModelPlan:
    return ModelPlan(**{"prompts": PROMPTS, "max_tokens": 64, "decode_tokens": 6, "floors": tmp_path / "f", **changes})


def recorded(runner: Runner, setup: Setup, plan: ModelPlan, out: Path, **told: Any) -> tuple[Path | None, Path]:
    texts = [model.tokens_of(runner, one, plan.max_tokens) for one in plan.prompts]
    environment_ = environment(setup.model).model_copy(update=told)
    return floor.record(runner, setup, plan, texts, environment_, out)


def test_the_second_way_is_the_policys_next_backend(tiny_model: Path, setup: Setup, tmp_path: Path) -> None:
    runner = runner_of(tiny_model, "torch_sdpa:flash", "math")
    first = runner.dispatcher
    second, known = recorded(runner, setup, plan_of(tmp_path), tmp_path / "second")
    assert runner.dispatcher is first, "what comes next runs on the champion's own backend"
    assert second is not None
    assert States(second).manifest.confirmed == {"prefill": "torch_sdpa:math", "decode": "torch_sdpa:math"}
    assert not known.exists(), "the figures are the comparison's"


def test_with_one_approved_backend_it_is_other_batches_on_the_same(
    make_runner: Make, setup: Setup, tmp_path: Path
) -> None:
    runner = make_runner("torch_sdpa:math")
    way = floor.second(runner)
    assert way.dispatcher is runner.dispatcher
    assert (way.how.piece, way.how.members) == (floor.PIECE, floor.MEMBERS)
    second, _ = recorded(runner, setup, plan_of(tmp_path), tmp_path / "second")
    champion = States(model.record(runner, plan_of(tmp_path), environment(setup.model), tmp_path / "champion"))
    assert second is not None
    kl = compare.columns(champion, States(second), compare.Head.read(setup.model))["kl"]
    assert 0 <= max(kl) < 1e-9


def test_a_faulty_champion_keeps_its_fault_in_the_second_way(tiny_model: Path) -> None:
    """Otherwise the floor would be the size of the fault, and every candidate of that size would pass."""
    policy = Policy(preferred=("torch_sdpa:flash",), fallback=("math",))
    dispatcher = Dispatcher(policy, specs_of(tiny_model, "float32"), scale_factor=1.05)
    way = floor.second(Runner(tiny_model, dispatcher, num_pages=16))
    assert way.dispatcher.specs == dispatcher.specs
    assert way.dispatcher.resolved["decode"] == "torch_sdpa:math"


def test_a_floor_is_measured_once_for_what_was_run_and_again_when_that_changes(
    tiny_model: Path, setup: Setup, tmp_path: Path
) -> None:
    runner, plan = runner_of(tiny_model, "torch_sdpa:flash", "math"), plan_of(tmp_path)
    _, known = recorded(runner, setup, plan, tmp_path / "a")
    floor.keep(known, {"kl": [0.5, 0.25], "mode": ["prefill", "decode"], "dtype_class": "float32"})
    assert recorded(runner, setup, plan, tmp_path / "b") == (None, known)
    assert floor.read(known) == {"kl": [0.5, 0.25], "mode": ["prefill", "decode"], "dtype_class": ["float32"] * 2}
    others = {
        "another environment": recorded(runner, setup, plan, tmp_path / "c", fingerprint_id="other"),
        "other tokens": recorded(runner, setup, plan_of(tmp_path, max_tokens=32), tmp_path / "d"),
        "other decodes": recorded(runner, setup, plan_of(tmp_path, decode_tokens=5), tmp_path / "e"),
        "another backend": recorded(runner_of(tiny_model, "torch_sdpa:math"), setup, plan, tmp_path / "g"),
    }
    assert all(second is not None for second, _ in others.values())
    assert len({path for _, path in [*others.values(), (None, known)]}) == 5


def test_a_file_that_is_no_floor_is_none_and_old_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    assert floor.read(tmp_path / "x.parquet") is None
    assert floor.read(tmp_path / "none.parquet") is None
    monkeypatch.setattr(floor, "KEPT", 2)
    os.utime(tmp_path / "x.parquet", (1, 1))
    for name in ("a", "b"):
        floor.keep(tmp_path / f"{name}.parquet", {"kl": [0.0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]
