"""What a person sees of a mistake, and of a reader that has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attention.errors import nearest, piped


@pytest.mark.parametrize(
    ("name", "said"), [("flahs", "did you mean flash?"), ("xyz", "known: flash, math")], ids=["near", "far"]
)
def test_a_mistyped_name_gets_its_neighbours_or_all(name: str, said: str) -> None:
    assert nearest(name, ["math", "flash"]) == said


@pytest.mark.parametrize("module", ["attention", "flows"])
def test_a_reader_that_stops_early_is_no_error(module: str) -> None:
    command = f"{sys.executable} -m {module} {'matrix' if module == 'attention' else '--help'} | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_code_passes_through() -> None:
    assert piped(lambda: 3) == 3
