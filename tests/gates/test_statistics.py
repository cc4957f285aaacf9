"""The statistics agree with scipy where it has them, and with simulation where it has not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gates import statistics
from gates.thresholds import load_limits


def test_no_failure_in_n_trials_bounds_the_rate_as_the_exact_interval_does() -> None:
    for num in (1, 40, 299, 2995):
        exact = stats.binomtest(0, num, alternative="less").proportion_ci(0.95, method="exact").high
        assert statistics.zero_failure_bound(num) == pytest.approx(exact)
        assert statistics.rate(0, num).high == pytest.approx(exact)
    assert statistics.zero_failure_bound(299) == pytest.approx(0.01, rel=0.01)


def test_the_bounds_of_a_rate_are_one_sided_clopper_pearson() -> None:
    found = statistics.rate(3, 40)
    assert found.low == pytest.approx(stats.beta.ppf(0.05, 3, 38))
    assert found.high == pytest.approx(stats.beta.ppf(0.95, 4, 37))
    with pytest.raises(ValueError, match="5 events in 4"):
        statistics.rate(5, 4)


def test_mcnemar_is_the_exact_binomial_of_the_discordant_pairs() -> None:
    assert statistics.mcnemar_p(0, 0) == 1.0
    assert statistics.mcnemar_p(5, 0) == pytest.approx(0.5**5)
    assert statistics.mcnemar_p(9, 1) == pytest.approx(11 / 1024)
    assert statistics.mcnemar_detectable(0) == 5
    assert statistics.mcnemar_detectable(1) == 7


def ratio(rng: np.random.Generator, num: int, slower: float, quantile: float) -> statistics.QuantileRatio:
    """Two arms of `num` log-normal rows with sigma 0.5 at random times."""
    times = np.sort(rng.uniform(size=num)), np.sort(rng.uniform(size=num))
    first, second, windows = statistics.windows(*times)
    return statistics.quantile_ratio(
        slower * rng.lognormal(0, 0.5, num),
        rng.lognormal(0, 0.5, num),
        quantile,
        candidate_windows=first,
        control_windows=second,
        num_windows=windows,
        num_resamples=300,
    )


def simulate(num: int, slower: float, quantile: float, runs: int = 300) -> list[statistics.QuantileRatio]:
    rng = np.random.default_rng(7)
    return [ratio(rng, num, slower, quantile) for _ in range(runs)]


@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_a_bound_of_a_quantile_ratio_holds_in_95_of_100_equal_pairs(quantile: float) -> None:
    found = simulate(40, 1.0, quantile)
    assert np.mean([r.high >= 1 for r in found]) >= 0.93
    assert np.mean([r.low <= 1 for r in found]) >= 0.93


def test_in_the_demo_equal_arms_never_fail_and_three_times_slower_seldom_escapes_one_look() -> None:
    limits = load_limits("canary", "demo")
    for name, quantile in (("p50", 0.5), ("p95", 0.95)):
        limit = limits.value(f"tpot_{name}_ratio")
        equal = simulate(40, 1.0, quantile)
        assert np.mean([r.low > limit for r in equal]) == 0.0
        assert np.mean([r.high <= limit for r in equal]) >= 0.93
        # The first extension decides what the first look left open.
        assert np.mean([r.high <= limit for r in simulate(80, 1.0, quantile, runs=100)]) >= 0.98
    slow = simulate(40, 3.0, 0.5)
    limit = limits.value("tpot_p50_ratio")
    assert np.mean([r.low > limit for r in slow]) >= 0.92
    assert np.mean([r.high <= limit for r in slow]) == 0.0
    assert np.mean([r.low > limit for r in simulate(80, 3.0, 0.5, runs=100)]) >= 0.99


def test_an_effect_of_the_detectable_size_is_shown_about_as_often_as_claimed() -> None:
    claimed = float(np.median([r.detectable for r in simulate(120, 1.0, 0.5)]))
    shown = np.mean([r.low > 1 for r in simulate(120, 1 + claimed, 0.5)])
    assert 0.7 <= shown <= 0.97


def test_a_stall_that_both_arms_share_is_no_difference() -> None:
    rng = np.random.default_rng(3)
    times = np.arange(80.0)
    stall = np.where((times >= 30) & (times < 50), 5.0, 1.0)
    first, second, windows = statistics.windows(times, times)
    found = statistics.quantile_ratio(
        stall * rng.lognormal(0, 0.1, 80),
        stall * rng.lognormal(0, 0.1, 80),
        0.95,
        candidate_windows=first,
        control_windows=second,
        num_windows=windows,
    )
    assert found.low <= 1 <= found.high
    assert found.high < 1.5


def test_nan_gives_nan_and_too_few_rows_give_an_interval_without_end() -> None:
    one, other, windows = statistics.windows(range(10), range(10))
    arguments = {"candidate_windows": one, "control_windows": other, "num_windows": windows}
    few = statistics.quantile_ratio(np.ones(10), np.ones(10), 0.5, **arguments)
    assert (few.low, few.high, few.detectable) == (0.0, math.inf, math.inf)
    broken = statistics.quantile_ratio([math.nan] * 10, np.ones(10), 0.5, **arguments)
    assert math.isnan(broken.low)
    assert math.isnan(broken.high)
    zero = statistics.quantile_ratio(np.zeros(10), np.ones(10), 0.5, **arguments)
    assert math.isnan(zero.value)


def test_the_mean_interval_is_students() -> None:
    values = [0.1, 0.2, 0.4, 0.3]
    found = statistics.mean_interval(values)
    expected = stats.t.interval(0.90, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert statistics.mean_interval([1.0]).high == math.inf


def test_phrases_carry_a_figure() -> None:
    assert statistics.rate_phrase("flip rate", 0, 480) == "flip rate 0.62 % (0 of 480, 95 %)"
    assert statistics.headroom_phrase("R_rms", 1.6, 2.0) == "R_rms +25 %"
    assert statistics.headroom_phrase("mean KL", 1e-9, 2e-3) == "mean KL above 0.002"
    assert statistics.effect_phrase("TPOT P50", 0.18) == "TPOT P50 +18 %"
