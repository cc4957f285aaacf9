from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attention.errors import UserError
from data import environment
from data.environment import Environment, load_environment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    return tmp_path


def test_the_current_environment_is_this_interpreter() -> None:
    current = load_environment("current")
    assert current.python == sys.executable


def test_another_interpreter_with_the_same_packages_has_the_same_digest() -> None:
    other = Environment(name="twin", interpreter=sys.executable)
    assert other.digest() == load_environment("current").digest()


@pytest.mark.parametrize("name", ["curent", "../environments/current", "/etc/passwd", ""])
def test_only_an_entry_of_the_folder_can_be_picked(name: str) -> None:
    with pytest.raises(UserError, match=r"not in data/environments"):
        load_environment(name)


@pytest.mark.parametrize(
    "content",
    ["", "interpreter: [x]", "interpreter: current\ncolour: red", "interpreter: [", "text", "- a\n- b"],
)
def test_a_broken_entry_is_one_line(folder: Path, content: str) -> None:
    (folder / "mine.yaml").write_text(content)
    with pytest.raises(UserError, match=r"mine.yaml: ") as raised:
        load_environment("mine")
    assert "\n" not in str(raised.value)


def test_an_interpreter_without_attention_says_so(tmp_path: Path) -> None:
    for python in (str(tmp_path / "no-python"), "/bin/false"):
        with pytest.raises(UserError, match=r"environment bare: .* cannot import attention"):
            Environment(name="bare", interpreter=python).digest()
