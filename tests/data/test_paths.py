from __future__ import annotations

from pathlib import Path

import pytest

from attention.errors import UserError
from data import paths


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    return tmp_path


def test_everything_generated_lies_in_the_home(home: Path) -> None:
    assert paths.lake_dir() == home / "lake"
    assert paths.cell_dir("cpu", "smollm2") == home / "state" / "cpu--smollm2"


def test_without_a_home_it_lies_in_data_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTENTION_RELEASE_HOME", "ATTENTION_RELEASE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    assert paths.lake_dir() == paths.repo_dir() / "data" / "lake"
    assert paths.models_dir() == paths.repo_dir() / "data" / "models"
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", "")
    assert paths.home_dir() == paths.repo_dir() / "data"


def test_a_home_leaves_models_where_they_are(home: Path) -> None:
    assert home not in paths.models_dir().parents


def test_cells_are_the_folders_of_the_state_that_name_one(home: Path) -> None:
    assert paths.cells() == []
    for name in ("nvidia-h200--qwen3", "cpu--smollm2", "mlflow", "prefect"):
        (home / "state" / name).mkdir(parents=True)
    (home / "state" / "cpu--file").write_text("")
    assert paths.cells() == [("cpu", "smollm2"), ("nvidia-h200", "qwen3")]


def test_a_model_is_a_folder_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_MODELS", str(tmp_path / "models"))
    (tmp_path / "own").mkdir()
    assert paths.model_path(str(tmp_path / "own")) == tmp_path / "own"
    assert paths.model_path("own") == tmp_path / "models" / "own"


@pytest.mark.parametrize(
    ("model", "family"),
    [("smollm2-135m-instruct", "smollm2"), ("/models/Qwen3-0.6B", "qwen3"), ("Llama", "llama")],
)
def test_a_family_is_the_name_up_to_its_first_dash(model: str, family: str) -> None:
    assert paths.family_of(model) == family


PARTS = ["../../x", "a/b", "a--b", "-a", "a-", "", "A", "a b", "x" * 64, "a\0", "a\n"]


@pytest.mark.parametrize("part", PARTS)
def test_a_cell_is_a_folder_of_the_state_and_no_other(home: Path, part: str) -> None:
    for gpu, family in ((part, "smollm2"), ("cpu", part)):
        with pytest.raises(UserError, match=r"use at most 63"):
            paths.cell_dir(gpu, family)


@pytest.mark.parametrize("part", ["cpu", "nvidia-h200-141gb", "qwen2.5", "9", "a_b", "x" * 63])
def test_a_cell_is_found_again_under_its_names(home: Path, part: str) -> None:
    paths.cell_dir(part, part).mkdir(parents=True)
    assert paths.cells() == [(part, part)]


def test_folders_that_name_no_cell_are_left_alone(home: Path) -> None:
    for name in ("cpu--A", "cpu--a--b", "--a", "cpu--"):
        (home / "state" / name).mkdir(parents=True)
    assert paths.cells() == []


def test_a_home_may_be_written_with_a_tilde(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", "~/mine")
    assert paths.home_dir() == home / "mine"
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", "~nobody-of-this-name/mine")
    with pytest.raises(UserError, match="write the path out"):
        paths.home_dir()
