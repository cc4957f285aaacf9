"""The code of attention/README.md runs as it stands, and README.md shows the evidence that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attention.evidence import backend_table
from attention.replay_evidence import table

README = Path("attention/README.md")
ROOT = Path("README.md").read_text()


def test_its_code_runs_and_says_what_the_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
    assert "watch(" in code
    exec(compile(code, str(README), "exec"), {})
    said = capsys.readouterr().out
    assert "paged KV gathered to dense" in said
    assert "IMPORT_FAILED: flash_attn_2_cuda cannot be imported: pip install flash-attn" in said
    assert "decode torch_sdpa:flash torch_sdpa:flash torch_sdpa:flash" in said
    assert "'decode': 'torch_sdpa:flash'" in said


def test_the_table_of_backends_is_what_the_evidence_says() -> None:
    folder, shown = _generated("attention.evidence --table")
    assert shown == backend_table(folder)


def test_the_table_of_the_replay_is_what_the_evidence_says() -> None:
    folder, shown = _generated("attention.replay_evidence")
    assert shown == table(folder)


def _generated(command: str) -> tuple[Path, str]:
    """The folder that a table of README.md is made of by `command`, and the table."""
    found = re.search(rf"<!-- python -m {re.escape(command)} (\S+) -->\n(.*?)\n<!-- end -->", ROOT, re.DOTALL)
    assert found
    return Path(found[1]), found[2]


def test_the_environment_that_it_replays_in_is_the_one_that_make_makes() -> None:
    found = re.search(r"^OTHER_TORCH \?= (\S+)$", Path("Makefile").read_text(), re.MULTILINE)
    assert found
    assert set(re.findall(r"\.venv-torch-([\d.]+\d)", ROOT)) == {found[1]}
