"""Raw samples of single calls."""

from __future__ import annotations

import time
from statistics import median

import pytest

from attention.timing import LEAST_CALLS, MOST_CALLS, Rotation, clock_of, num_copies


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_block_lasts_as_long_as_asked_within_its_bounds() -> None:
    clock = clock_of("cpu")
    taken = clock.times(Rotation([lambda: spin(0.001)]), min_s=0.01)
    assert LEAST_CALLS <= len(taken) <= 10
    assert min(taken) >= 0.001
    assert len(clock.times(Rotation([lambda: None]), min_s=1.0)) == MOST_CALLS
    assert len(clock.times(Rotation([lambda: spin(0.02)]), min_s=0.01)) == 1, "a long call is a block of its own"


def test_calls_take_turns_and_go_on_where_the_block_before_ended() -> None:
    rotation = Rotation(list("abcdef"), replicas=2)  # type: ignore[arg-type]
    assert rotation.take(3) == list("abcd")
    assert rotation.take(4) == list("efab")
    assert rotation.take(1) == list("cd"), "every replica as often"


def test_every_replica_is_timed_as_often() -> None:
    seen: list[str] = []
    rotation = Rotation([lambda: seen.append("a"), lambda: seen.append("b")], replicas=2)
    taken = clock_of("cpu").times(rotation, min_s=1e-4)
    assert len(taken) == len(seen)
    assert seen == list("ab") * (len(seen) // 2)


def test_a_slowed_call_takes_its_share_longer() -> None:
    clock = clock_of("cpu")

    def call() -> None:
        spin(0.002)

    slower = clock.slowed(call, 4.0)
    ratio = median(clock.times(Rotation([slower]), min_s=0.02)) / median(clock.times(Rotation([call]), min_s=0.02))
    assert ratio == pytest.approx(5.0, rel=0.3)


def test_copies_of_small_inputs_fill_more_than_a_cache_and_large_ones_are_two() -> None:
    l2 = 60 << 20
    for num_bytes in (1 << 20, 4 << 20, 90 << 20):
        assert (num_copies(num_bytes, l2) - 1) * num_bytes >= 3 * l2
    assert num_copies(1 << 30, l2) == 2
    assert num_copies(1 << 30, 0) == 2
