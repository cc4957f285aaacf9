"""Draws side by side: results as they come or in order, and a worker that dies ends the run with a line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from attention.drill.workers import mapped
from attention.errors import UserError


def test_results_are_those_of_map() -> None:
    with mapped(2) as spread:
        assert list(spread(abs, [-3, 2, -1])) == [3, 2, 1]
    with mapped(2, ordered=False) as spread:
        assert sorted(spread(abs, [-3, 2, -1])) == [1, 2, 3]


def test_a_worker_that_dies_is_a_line_and_no_wait_for_ever() -> None:
    with pytest.raises(UserError, match="a worker process died"), mapped(2, ordered=False) as spread:
        list(spread(os._exit, [1, 1, 1]))
    deadline = time.monotonic() + 10
    while multiprocessing.active_children():  # the pool's thread waits too, and only one of us learns of an end
        assert time.monotonic() < deadline
        time.sleep(0.02)


def slept_in(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_an_interruption_while_a_worker_dies_raises_nothing_in_the_pools_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []
    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with pytest.raises(KeyboardInterrupt), mapped(2) as spread:
        results = spread(slept_in, [0, *[60] * 8])
        worker = next(iter(results))
        results.close()  # type: ignore[attr-defined]
        os.kill(worker, signal.SIGKILL)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        raise KeyboardInterrupt
    assert raised == []
