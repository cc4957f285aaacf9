from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention.errors import UserError
from attention.model_config import model_revision
from data.candidate import load_candidate
from data.paths import repo_dir
from tests.commands import FLASH, QUICK, SAMPLE, candidate_file

CANDIDATES = sorted((repo_dir() / "data" / "candidates").rglob("*.yaml"))


@pytest.mark.parametrize("path", CANDIDATES, ids=lambda path: path.stem)
def test_every_candidate_of_the_repository_loads(path: Path) -> None:
    loaded = load_candidate(path)
    assert loaded.candidate.is_drill == (path.parent.name == "drill")
    assert loaded.candidate.name.replace("-", "_").endswith(path.stem.replace("-", "_"))


def test_references_are_found_and_a_cell_is_one_model_of_one_wave(tmp_path: Path) -> None:
    own = tmp_path / "Own-7B"
    own.mkdir()
    (own / "config.json").write_text("{}")
    waves = [
        {"gpu": "cpu", "models": ["smollm2-135m-instruct", str(own)]},
        {"gpu": "nvidia-h200", "models": [str(own)], "family": "mine", "approval": True},
    ]
    loaded = load_candidate(candidate_file(tmp_path, waves=waves))
    assert [(cell.gpu, cell.family, cell.model, cell.approval) for cell in loaded.cells] == [
        ("cpu", "smollm2", "smollm2-135m-instruct", False),
        ("cpu", "own", "Own-7B", False),
        ("nvidia-h200", "mine", "Own-7B", True),
    ]
    assert (loaded.policy_path, loaded.traffic_path) == (FLASH, SAMPLE)
    assert loaded.file.is_absolute() and loaded.cells[1].model_path == own


def test_paths_are_relative_to_the_repository_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_candidate(candidate_file(tmp_path, policy="data/policies/cpu-flash.yaml"))
    assert loaded.policy_path == FLASH


def copy_of(source: Path, folder: Path, before: str, after: str) -> str:
    path = folder / source.name
    assert before in source.read_text()
    path.write_text(source.read_text().replace(before, after))
    return str(path)


def test_identity_is_what_is_released_not_what_it_is_called(tmp_path: Path) -> None:
    def identity(name: str = "flash", **changes: Any) -> str:
        return load_candidate(candidate_file(tmp_path / "drill", name, **changes)).identity

    sound = identity()
    assert identity("renamed") == sound
    drill = tmp_path / "drill"
    others = [
        identity(fault="wrong_scale"),
        identity(fault="slow_decode"),
        identity(policy=str(FLASH.with_name("cpu-math.yaml"))),
        identity(plan="demo"),
        identity(plan=copy_of(QUICK, drill, "requests: 20", "requests: 21")),
        identity(policy=copy_of(FLASH, drill, "allow_runtime_fallback: true", "allow_runtime_fallback: false")),
        identity(waves=[{"gpu": "cpu", "models": ["smollm2-135m-instruct"], "approval": True}]),
    ]
    assert len({sound, *others}) == len(others) + 1


def test_identity_follows_the_content_of_the_plan_behind_the_same_name(tmp_path: Path) -> None:
    plan = tmp_path / "quick.yaml"
    plan.write_text(QUICK.read_text())
    path = candidate_file(tmp_path, plan=str(plan))
    before = load_candidate(path).identity
    plan.write_text(QUICK.read_text().replace("seeds: 1", "seeds: 2"))
    assert load_candidate(path).identity != before


def test_identity_follows_traffic_golden_set_and_model_behind_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, golden, model = tmp_path / "traffic.jsonl", tmp_path / "golden.jsonl", tmp_path / "own-1b"
    traffic.write_text(SAMPLE.read_text())
    golden.write_text("{}")
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = bytearray(1 << 25)
    (model / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("data.candidate.GOLDEN_FILE", golden)
    path = candidate_file(tmp_path, traffic={"source": str(traffic)}, waves=[{"gpu": "cpu", "models": [str(model)]}])

    def identity() -> str:
        return load_candidate(path).identity

    found = [identity()]
    assert identity() == found[0]
    traffic.write_text(SAMPLE.read_text() + SAMPLE.read_text().splitlines()[0] + "\n")
    found.append(identity())
    golden.write_text("{} ")
    found.append(identity())
    (model / "config.json").write_text('{"rope_theta": 1}')
    found.append(identity())
    weights[0] = 1
    (model / "model.safetensors").write_bytes(weights)
    found.append(identity())
    (model / "tokenizer.json").write_text("{}")
    found.append(identity())
    assert len(set(found)) == len(found)


def test_a_large_model_is_told_apart_at_once(tmp_path: Path) -> None:
    """270 MB of weights, and a tokenizer, as the default model has; the least of five, for machines with others on."""
    (tmp_path / "tokenizer.json").write_bytes(bytes(3_500_000))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(270_000_000)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        model_revision(tmp_path)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05


def test_a_model_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"config.json: Permission denied: fetch the model again"):
        model_revision(tmp_path)


@pytest.mark.parametrize("name", ["", "-flash", "a/b", "../up", "a b", "x" * 64, "naïve"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = candidate_file(tmp_path)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "name": name}))
    with pytest.raises(UserError, match=r"flash.yaml: name: "):
        load_candidate(path)


@pytest.mark.parametrize("content", ["", "- a", "text", "name: [", "\t"])
def test_a_file_that_is_no_candidate_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"mine.yaml: ") as raised:
        load_candidate(path)
    assert "\n" not in str(raised.value)


def test_waves_and_models_cannot_be_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"waves: "):
        load_candidate(candidate_file(tmp_path, waves=[]))
    with pytest.raises(UserError, match=r"waves.0.models: "):
        load_candidate(candidate_file(tmp_path, waves=[{"gpu": "cpu", "models": []}]))


def test_a_fault_is_a_matter_of_the_drill_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"drills only"):
        load_candidate(candidate_file(tmp_path, fault="wrong_scale"))
    loaded = load_candidate(candidate_file(tmp_path / "drill", fault="wrong_scale"))
    assert loaded.candidate.is_drill
