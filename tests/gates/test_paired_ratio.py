"""SAME, FAST, SLOW or AMBG: said of a paired ratio, and wrong no more often than promised."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gates.paired_ratio import block_log_ratio, corrected, looks, paired_ratio, verdict
from gates.statistics import Interval


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, "SAME"),
        (1 / 1.05, 1.05, "SAME"),
        (1.06, 1.30, "SLOW"),
        (0.70, 0.90, "FAST"),
        (1.00, 1.20, "AMBG"),
        (0.80, 1.00, "AMBG"),
        (0.50, 2.00, "AMBG"),
        (1.05, 1.20, "AMBG"),
        (math.nan, math.nan, "AMBG"),
    ],
)
def test_a_verdict_is_told_by_the_whole_interval(low: float, high: float, said: str) -> None:
    assert verdict(Interval(1.0, low, high), 0.05) == said


def test_a_drift_within_a_block_cancels() -> None:
    turns = [("a", [1.0]), ("b", [1.1 * 1.5]), ("b", [1.21 * 1.5]), ("a", [1.331])]
    assert math.exp(block_log_ratio(turns, "a", "b")) == pytest.approx(1.5)


def test_a_turn_counts_with_its_median() -> None:
    turns = [("a", [1.0, 1.0, 50.0]), ("b", [2.0, 2.0, 0.1])]
    assert math.exp(block_log_ratio(turns, "a", "b")) == pytest.approx(2.0)


def test_looks_double_up_to_the_last() -> None:
    assert looks(8, 32) == (8, 16, 32)
    assert looks(8, 20) == (8, 16, 20)
    assert looks(4, 4) == (4,)


def test_few_blocks_bound_nothing_and_nan_stays() -> None:
    assert paired_ratio([0.0, 0.1, 0.0], 0.95) == Interval(pytest.approx(math.exp(0.1 / 3)), 0.0, math.inf)
    assert paired_ratio([], 0.95).high == math.inf
    assert math.isnan(paired_ratio([0.0, math.nan, 0.0, 0.0], 0.95).low)


def blocks(seed: int, true: float, num: int, sigma: float, stalls: float) -> list[float]:
    """Log ratios of blocks; a share `stalls` of them is off by a further 5 %."""
    generator = np.random.default_rng([seed, round(1000 * true)])
    log_ratios = generator.normal(math.log(true), sigma, num)
    log_ratios += (generator.random(num) < stalls) * generator.normal(0, 0.05, num)
    return [float(one) for one in log_ratios]


def sequential(seed: int, true: float, sigma: float, stalls: float) -> tuple[str, bool]:
    """The verdict of one cell of forty, and whether any interval on the way missed the truth."""
    at = looks(8, 32)
    found, missed = blocks(seed, true, at[-1], sigma, stalls), False
    for num in at:
        interval = paired_ratio(found[:num], corrected(40, len(at)))
        missed |= not interval.low <= true <= interval.high
        said = verdict(interval, 0.01)
        if said != "AMBG":
            break
    return said, missed


@pytest.mark.parametrize(("sigma", "stalls"), [(0.004, 0.0), (0.002, 0.1)])
def test_over_many_cells_no_verdict_is_wrong_and_few_are_ambiguous(sigma: float, stalls: float) -> None:
    said = {true: [sequential(seed, true, sigma, stalls) for seed in range(60)] for true in (1.0, 1.02, 1.05)}
    equal, small, large = ([verdict for verdict, _ in said[true]] for true in said)
    assert set(equal) <= {"SAME", "AMBG"}
    assert equal.count("SAME") >= 54
    assert "SAME" not in small
    assert large.count("SLOW") >= 57
    assert sum(missed for cells in said.values() for _, missed in cells) <= 1
