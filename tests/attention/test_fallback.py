"""How much falling back a policy bears, and who should have a pool of their own."""

from __future__ import annotations

import pytest

from attention.fallback import KEEPS_FALLING, FallbackBudget, FallbackRefusedError, FallenClass, FallenClasses
from attention.policy import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, share: float = 0.1, window_s: float = 60, duration_s: float = 1e9) -> FallbackBudget:
    return FallbackBudget(Budget(max_share=share, window_s=window_s, max_duration_s=duration_s), clock)


def fallen(one: FallbackBudget, num: int) -> int:
    """How many of so many falling requests had room."""
    served = 0
    for _ in range(num):
        try:
            one.take(falls=True)
            served += 1
        except FallbackRefusedError:
            pass
    return served


def test_a_share_of_the_windows_requests_may_fall_back(clock: Clock) -> None:
    one = budget(clock)
    for _ in range(99):
        one.take(falls=False)
    assert fallen(one, 30) == 11, "a tenth of 99 others and themselves"
    assert one.share == pytest.approx(11 / 110)
    assert one.is_exceeded and one.num_refused == 19
    for _ in range(100):
        one.take(falls=False)
    assert fallen(one, 30) == 11
    with pytest.raises(FallbackRefusedError, match=r"22 of 221 requests of the last 60 s fell back; .* bears 10.00%"):
        one.take(falls=True)


def test_one_may_always_fall_back_unless_none_may(clock: Clock) -> None:
    assert fallen(budget(clock), 5) == 1
    assert fallen(budget(clock, share=0.0), 5) == 0
    assert fallen(budget(clock, share=1.0), 5) == 5


def test_the_window_moves(clock: Clock) -> None:
    one = budget(clock, window_s=60)
    assert fallen(one, 2) == 1
    clock.now += 59
    assert fallen(one, 1) == 0
    clock.now += 61.1
    assert not one.is_exceeded and one.share == 0.0
    assert fallen(one, 2) == 1


def test_a_spell_of_falling_requests_may_last_only_so_long(clock: Clock) -> None:
    one = budget(clock, share=1.0, window_s=60, duration_s=100)
    for _ in range(10):
        assert fallen(one, 1) == 1
        clock.now += 10
    clock.now += 1
    with pytest.raises(FallbackRefusedError, match="falling back for 101 s; the policy bears 100 s"):
        one.take(falls=True)
    one.take(falls=False)
    clock.now += 59
    assert fallen(one, 1) == 0, "who goes on asking prolongs the spell"
    clock.now += 61
    assert fallen(one, 1) == 1, "a window without one ends it"


def test_a_request_that_comes_to_fall_while_it_runs_counts_once(clock: Clock) -> None:
    one = budget(clock, share=0.5)
    for _ in range(4):
        one.take(falls=False)
    one.fall()
    one.fall()
    assert one.share == 0.5
    with pytest.raises(FallbackRefusedError, match="2 of 4"):
        one.fall()


CLASS = FallenClass("decode", "decode/kv<=8192", "flashinfer:fa2", "torch_sdpa:math", "INDEX_RANGE")


def test_a_class_that_keeps_falling_back_should_have_its_own_pool(clock: Clock) -> None:
    seen = FallenClasses(60, clock)
    for _ in range(3 * KEEPS_FALLING):
        assert seen.request(None) is None
    seen.ran(CLASS, 0.002)
    seen.ran(CLASS, 0.004)
    told = [seen.request(CLASS) for _ in range(KEEPS_FALLING)]
    assert told[:-1] == [None] * (KEEPS_FALLING - 1), "a few special shapes are no class"
    assert str(told[-1]) == (
        "give decode/kv<=8192 its own pool: 10 requests, 25% of all, wanted to fall back from flashinfer:fa2 to "
        "torch_sdpa:math (INDEX_RANGE); each adds 3 ms to a step"
    )
    assert seen.request(CLASS) is None, "once a window"
    clock.now += 61
    assert [seen.request(CLASS) for _ in range(KEEPS_FALLING)][-1] is not None


def test_requests_that_fell_long_ago_say_nothing(clock: Clock) -> None:
    seen = FallenClasses(60, clock)
    for _ in range(3 * KEEPS_FALLING):
        clock.now += 7
        assert seen.request(CLASS) is None
