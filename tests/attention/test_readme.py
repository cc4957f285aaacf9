"""The code of attention/README.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path("attention/README.md")


def test_its_code_runs_and_says_what_the_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
    assert "watch(" in code
    exec(compile(code, str(README), "exec"), {})
    said = capsys.readouterr().out
    assert "paged KV gathered to dense" in said
    assert "IMPORT_FAILED: flash_attn_2_cuda cannot be imported: pip install flash-attn" in said
