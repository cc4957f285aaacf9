"""What is written takes the place of a file at its end; before that, and after an error, the file is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.replaced import replaced


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "answers.json"
    for text in ("old", "new"):
        with replaced(path) as fresh:
            fresh.write_text(text)
            assert path.exists() == (text == "new")
        assert path.read_text() == text
    with pytest.raises(KeyboardInterrupt), replaced(path) as fresh:
        fresh.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
