"""A folder is one process's while it writes there, and free again however that process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.errors import UserError
from attention.held import held


def test_a_folder_that_is_held_is_refused_in_one_line_and_free_after_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "A"
    with pytest.raises(KeyboardInterrupt), held(folder):
        with (
            pytest.raises(UserError, match=r"^--states .*/A: another process writes there; wait"),
            held(folder, "--states"),
        ):
            pytest.fail("held twice")
        raise KeyboardInterrupt
    with held(folder):
        pass
