"""`--help` of the commands that tell: an example each, whole at 80 columns, that the parser takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from data.paths import lake_dir
from flows.__main__ import app, main
from tests.tasks.sample_lake import fill

COMMANDS = ("drill", "why", "status", "qualify")


def words(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of a command's example, `python -m flows` left out."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["flows", name, "--help"])
    assert main() == 0
    [example] = re.findall(r"^  Example: python -m flows (.+)$", capsys.readouterr().out, re.MULTILINE)
    return shlex.split(example)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_one_line_that_its_parser_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(name, monkeypatch, capsys)
    assert given[0] == name
    group: Any = typer.main.get_command(app)
    context = group.commands[name].make_context(name, given[1:])
    for value in context.params.values():
        assert not isinstance(value, Path) or value.is_file(), "a file that is there"


def test_those_that_only_look_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTENTION_RELEASE_HOME", str(tmp_path))
    fill(lake_dir(), "flash-20261129-231502")
    for name in ("status", "why"):
        monkeypatch.setattr("sys.argv", ["flows", *words(name, monkeypatch, capsys)])
        assert main() == 0
    assert "flash-20261129-231502" in capsys.readouterr().out
