"""A person hears of long work now and then, and of short work nothing."""

from __future__ import annotations

import pytest

from attention import progress


def test_a_line_comes_only_after_some_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 1.0, 5.0, 6.0, 10.5))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    tell = progress.now_and_then("cases")
    for done in range(1, 5):
        tell(done, 4)
    assert capsys.readouterr() == ("", "cases: 2 of 4\ncases: 4 of 4\n")
