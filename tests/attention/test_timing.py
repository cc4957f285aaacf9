"""Raw samples of single calls."""

from __future__ import annotations

import time
from statistics import median

import pytest

from attention.timing import LEAST_CALLS, MOST_CALLS, clock_of, num_copies


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_block_lasts_as_long_as_asked_within_its_bounds() -> None:
    clock = clock_of("cpu")
    taken = clock.times([lambda: spin(0.001)], min_s=0.01)
    assert LEAST_CALLS <= len(taken) <= 10
    assert min(taken) >= 0.001
    assert len(clock.times([lambda: None], min_s=1.0)) == MOST_CALLS
    assert len(clock.times([lambda: spin(0.02)], min_s=0.01)) == 1, "a long call is a block of its own"


def test_calls_take_turns() -> None:
    seen: list[str] = []
    clock_of("cpu").times([lambda: seen.append("a"), lambda: seen.append("b")], min_s=1e-4)
    assert seen[:4] == ["a", "b", "a", "b"]


def test_a_slowed_call_takes_its_share_longer() -> None:
    clock = clock_of("cpu")

    def call() -> None:
        spin(0.002)

    slower = clock.slowed(call, 0.5)
    ratio = median(clock.times([slower], min_s=0.02)) / median(clock.times([call], min_s=0.02))
    assert ratio == pytest.approx(1.5, rel=0.1)


def test_copies_of_small_inputs_fill_more_than_a_cache_and_large_ones_are_two() -> None:
    l2 = 60 << 20
    for num_bytes in (1 << 20, 4 << 20, 90 << 20):
        assert (num_copies(num_bytes, l2) - 1) * num_bytes >= 3 * l2
    assert num_copies(1 << 30, l2) == 2
    assert num_copies(1 << 30, 0) == 2
