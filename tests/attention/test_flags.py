"""A number out of range is one line that names its flag."""

from __future__ import annotations

import math

import pytest

from attention.errors import UserError
from attention.flags import check_count, check_seconds


def test_numbers_in_range_and_flags_that_were_not_given_pass() -> None:
    for num in (None, 1, 64):
        check_count("--jobs", num)
    for seconds in (None, 0.5, 1e9):
        check_seconds("--timeout-s", seconds)
    check_seconds("--budget-s", 0.0, or_none=True)


@pytest.mark.parametrize("num", [0, -1])
def test_less_than_one_is_refused(num: int) -> None:
    with pytest.raises(UserError, match=r"--jobs .*: use a whole number, at least 1"):
        check_count("--jobs", num)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e12])
def test_what_is_no_time_to_wait_is_refused(seconds: float) -> None:
    for or_none, text in ((False, "above 0"), (True, "0 or more")):
        with pytest.raises(UserError, match=f"--budget-s .*: use seconds, {text}, at most 1e"):
            check_seconds("--budget-s", seconds, or_none=or_none)
    with pytest.raises(UserError, match="--timeout-s 0: use seconds, above 0"):
        check_seconds("--timeout-s", 0.0)
