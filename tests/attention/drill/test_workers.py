"""Draws side by side: results as they come or in order, and a worker that dies ends the run with a line."""

from __future__ import annotations

import multiprocessing
import os

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
    for child in multiprocessing.active_children():
        child.join(10)
    assert not multiprocessing.active_children()
