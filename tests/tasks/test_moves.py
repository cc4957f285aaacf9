"""Between a play and its gate: the rows of every arm are waited for."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attention.schemas import write_rows
from gates.served import CANDIDATE_SHADOW, CHAMPION
from tasks import moves


def rows(side: str, shadow: bool, num: int) -> list[dict[str, Any]]:
    common = {"gpu": "cpu", "model": "m", "role": "champion", "side": side, "shadow": shadow, "status": 200}
    return [common | {"request_id": f"q{i}", "finish_reason": "stop", "time": datetime.now(UTC)} for i in range(num)]


def test_a_champion_that_writes_last_is_waited_for(tmp_path: Path) -> None:
    since = datetime.now(UTC) - timedelta(seconds=1)
    write_rows(tmp_path, "requests", rows("candidate", True, 3), release_id="r1")
    late = threading.Timer(
        0.6, lambda: write_rows(tmp_path, "requests", rows("champion", False, 3), release_id="incumbent")
    )
    late.start()
    context: Any = SimpleNamespace(lake=tmp_path, release_id="r1")
    started = time.monotonic()
    moves.settle(context, since, {CANDIDATE_SHADOW: 3, CHAMPION: 3})
    assert 0.5 < time.monotonic() - started < moves.SETTLE_S - 2
    late.join()


def test_rows_that_never_come_are_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "SETTLE_S", 0.5)
    context: Any = SimpleNamespace(lake=tmp_path, release_id="r1")
    started = time.monotonic()
    moves.settle(context, datetime.now(UTC), {CHAMPION: 3})
    assert time.monotonic() - started < 5
