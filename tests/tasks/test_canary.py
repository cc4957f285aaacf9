from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from tasks import canary
from tasks.canary import shares_of
from tasks.traffic import Played, Reply


@pytest.mark.parametrize(
    ("percent", "champion", "control"),
    [(1, 98, 1), (5, 90, 5), (20, 60, 20), (50, 0, 50), (60, 0, 40), (99, 0, 1), (100, 0, 0)],
)
def test_control_gets_what_the_candidate_gets_as_long_as_there_is_as_much(
    percent: int, champion: int, control: int
) -> None:
    shares = shares_of(percent)
    assert (shares.champion, shares.control, shares.candidate) == (champion, control, percent)


def test_every_share_is_a_valid_one() -> None:
    for percent in range(101):
        shares = shares_of(percent)
        assert shares.champion + shares.control + shares.candidate == 100


def reply(role: str, *, whole: bool = True) -> Reply:
    return Reply("id", 200, whole, role, "r1", 0.1)


def step() -> canary._Step:
    first = Played([reply("candidate"), reply("control"), reply("candidate", whole=False)], sent=4)
    second = Played([reply("candidate"), reply("champion")], sent=2)
    return canary._Step(20, datetime.now(UTC), [first, second])


def test_a_step_counts_over_all_its_plays_and_a_torso_is_lost() -> None:
    client = step().client()
    assert (client.sent, client.ok, client.lost) == (6, 4, 2)
    assert step().served("candidate") == 2


def test_a_later_step_does_not_wait_for_the_seconds_of_the_earlier_ones() -> None:
    arrivals = ((float(second), "request") for second in itertools.count(30, 2))
    shifted = canary._from_now(arrivals)  # type: ignore[arg-type]
    assert [moment for moment, _ in itertools.islice(shifted, 3)] == [0.0, 2.0, 4.0]
