"""The statistics that the gates use, each with the effect that it could have shown.

Everything is one-sided: a gate asks whether the candidate is worse. An interval leaves three answers:
its lower end above the limit is a fail, its upper end within the limit a pass, and a limit inside it
is inconclusive. NaN goes in, NaN comes out: a figure that was never measured cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95  # of each one-sided bound
POWER = 0.8  # with which a detectable effect would have been shown
# Windows a comparison is cut into. Fewer than four give no standard error worth the name; more than
# twenty make them so short that a stall shared by neighbouring requests looks like several.
MIN_WINDOWS, MAX_WINDOWS, MIN_WINDOW_ROWS = 4, 20, 5

# Half widths of a one-sided interval that a true effect must measure to be shown with POWER.
_DETECTABLE_HALVES = float(1 + stats.norm.ppf(POWER) / stats.norm.ppf(CONFIDENCE))

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with one-sided bounds at CONFIDENCE on either side."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class QuantileRatio(Interval):
    """A ratio of quantiles with the smallest slowdown that would have been shown (a share: 0.18)."""

    detectable: float


# Rates


def zero_failure_bound(num_trials: int, confidence: float = CONFIDENCE) -> float:
    """Largest rate that leaves n trials without a failure with probability alpha = 1 - confidence:
    1 - alpha^(1/n); 1 for no trials."""
    return 1.0 if num_trials == 0 else 1.0 - (1.0 - confidence) ** (1.0 / num_trials)


def rate(num_events: int, num_trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Exact one-sided bounds of a rate (Clopper and Pearson 1934); 0 to 1 for no trials."""
    if not 0 <= num_events <= num_trials:
        raise ValueError(f"{num_events} events in {num_trials} trials")
    if num_trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    test = stats.binomtest(num_events, num_trials, alternative="less")
    high = float(test.proportion_ci(confidence, method="exact").high)
    test = stats.binomtest(num_events, num_trials, alternative="greater")
    low = float(test.proportion_ci(confidence, method="exact").low)
    return Interval(num_events / num_trials, low, high)


def rate_phrase(name: str, num_events: int, num_trials: int, confidence: float = CONFIDENCE) -> str:
    """`flip rate 0.6 % (0 of 480, 95 %)`: the rate that could still hide behind the observation."""
    high = rate(num_events, num_trials, confidence).high
    return f"{name} {percent(high)} ({num_events} of {num_trials}, {100 * confidence:.3g} %)"


def share_p_value(num_events: int, num_trials: int, share: float) -> float:
    """Two-sided exact binomial p of a share against the share that was set; NaN for no trials."""
    if num_trials == 0:
        return math.nan
    return float(stats.binomtest(num_events, num_trials, share).pvalue)


# Paired outcomes


def mcnemar_p(num_lost: int, num_won: int) -> float:
    """One-sided exact McNemar test: probability of so many losses among the discordant pairs if losing
    and winning were as likely; 1 without discordant pairs."""
    discordant = num_lost + num_won
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(num_lost, discordant, alternative="greater").pvalue)


def mcnemar_detectable(num_won: int, alpha: float = 1 - CONFIDENCE) -> int:
    """Fewest losses that the test would have called worse beside `num_won` wins (5 beside none at 5 %)."""
    lost = num_won + 1
    while mcnemar_p(lost, num_won) > alpha:
        lost += 1
    return lost


# Quantile ratios


def windows(times: ArrayLike, other_times: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Cut time into windows that hold equally many rows of the first arm; the window of every row.

    The unit of the bootstrap is the window, not the row: requests that share a stall are not
    independent, and a stall that both arms share must not count as a difference.
    """
    first, second = np.asarray(times, float), np.asarray(other_times, float)
    num = int(np.clip(len(first) // MIN_WINDOW_ROWS, 1, MAX_WINDOWS))
    order = np.argsort(first, kind="stable")
    label = np.empty(len(first), np.int64)
    label[order] = np.arange(len(first)) * num // max(1, len(first))
    starts = [float(first[order][label[order] == index].min()) for index in range(1, num)] if len(first) else []
    return label, np.searchsorted(np.asarray(starts), second, side="right").astype(np.int64), num


def quantile_ratio(
    candidate: ArrayLike,
    control: ArrayLike,
    quantile: float,
    *,
    candidate_windows: ArrayLike,
    control_windows: ArrayLike,
    num_windows: int,
    confidence: float = CONFIDENCE,
    num_resamples: int = 1000,
) -> QuantileRatio:
    """Ratio of a quantile, candidate over control, with a bootstrap interval over shared windows.

    Both arms are resampled by the same windows, so what a window did to both cancels. The interval is
    log ratio +- t * standard error, with Student's t for the number of windows and the factor
    sqrt(K / (K - 1)) for the bootstrap's narrow spread: with eight windows, plain percentiles cover
    too little. Fewer than MIN_WINDOWS windows, or an empty arm, give (0, inf); NaN rows give NaN.
    The seed is fixed: the same evidence gives the same verdict.

    The detectable effect takes the larger of this standard error and that of the order statistics: with
    few windows the former is sometimes small by luck, and must not be boasted of.
    """
    first, second = np.asarray(candidate, float), np.asarray(control, float)
    if np.isnan(first).any() or np.isnan(second).any():
        return QuantileRatio(math.nan, math.nan, math.nan, math.inf)
    if not len(first) or not len(second):
        return QuantileRatio(math.nan, 0.0, math.inf, math.inf)
    ones = np.ones((1, num_windows))
    first_windows, second_windows = np.asarray(candidate_windows), np.asarray(control_windows)
    top = float(_quantiles(first, first_windows, ones, quantile)[0])
    bottom = float(_quantiles(second, second_windows, ones, quantile)[0])
    if top <= 0 or bottom <= 0:
        return QuantileRatio(math.nan, math.nan, math.nan, math.inf)  # a duration of zero was not measured
    if num_windows < MIN_WINDOWS:
        return QuantileRatio(top / bottom, 0.0, math.inf, math.inf)
    generator = np.random.default_rng(0)
    draws = generator.multinomial(num_windows, np.full(num_windows, 1 / num_windows), size=num_resamples)
    resampled = np.log(_quantiles(first, first_windows, draws, quantile)) - np.log(
        _quantiles(second, second_windows, draws, quantile)
    )
    error = float(np.nanstd(resampled, ddof=1)) * math.sqrt(num_windows / (num_windows - 1))
    student = float(stats.t.ppf(confidence, num_windows - 1))
    centre, half = math.log(top / bottom), student * error
    claimed = student * max(error, math.hypot(_order_error(first, quantile), _order_error(second, quantile)))
    return QuantileRatio(
        value=top / bottom,
        low=math.exp(centre - half),
        high=math.exp(centre + half),
        detectable=math.expm1(_DETECTABLE_HALVES * claimed),
    )


def _order_error(values: Reals, quantile: float) -> float:
    """Standard error of a log quantile of independent rows: half the distance between the order
    statistics one standard error of the rank below and above it (Woodruff 1952)."""
    ordered, num = np.sort(values), len(values)
    spread = math.sqrt(quantile * (1 - quantile) * num)
    ranks = np.clip([math.floor(num * quantile - spread), math.ceil(num * quantile + spread)], 0, num - 1)
    low, high = ordered[ranks]
    return 0.5 * math.log(high / low) if low > 0 else math.inf


def _quantiles(values: Reals, window: NDArray[np.int64], draws: ArrayLike, quantile: float) -> Reals:
    """The quantile of each resample, in which window w counts draws[., w] times; NaN for an empty one."""
    order = np.argsort(values, kind="stable")
    weights = np.asarray(draws, float)[:, window[order]]
    running = np.cumsum(weights, axis=1)
    total = running[:, -1]
    reached = running >= (quantile * total - 1e-9)[:, None]
    picked = values[order][np.argmax(reached & (weights > 0), axis=1)]
    return np.where(total > 0, picked, np.nan)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean with Student's one-sided bounds; one value (or none) bounds nothing."""
    array = np.asarray(values, float)
    if not len(array):
        return Interval(math.nan, -math.inf, math.inf)
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf(confidence, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array)))
    return Interval(mean, mean - half, mean + half)


# Detectable effects


def detectable_ratio(interval: Interval) -> float:
    """Smallest true slowdown that would have been shown with POWER: exp((z_confidence + z_power) * SE) - 1,
    with SE read back from the interval's half width in logs; inf for no interval.
    """
    if not (interval.low > 0 and math.isfinite(interval.high)):
        return math.inf
    return math.expm1(_DETECTABLE_HALVES * 0.5 * math.log(interval.high / interval.low))


def detectable_shift(interval: Interval) -> float:
    """Smallest true difference that would have been shown with POWER, from a symmetric interval."""
    return _DETECTABLE_HALVES * 0.5 * (interval.high - interval.low)


def effect_phrase(name: str, effect: float) -> str:
    """`TPOT P50 +18 %`."""
    return f"{name} +{percent(effect)}" if math.isfinite(effect) else f"{name}: no effect, too few rows"


def headroom_phrase(name: str, observed: float, limit: float) -> str:
    """`R_rms +12 %`: a figure that much worse than the observed one would have crossed the limit."""
    if limit >= observed > limit / 10:
        return f"{name} +{percent(limit / observed - 1)}"
    return f"{name} above {limit:.3g}"


def percent(value: float) -> str:
    """A share as a percentage of two or three digits: `0.62 %`, `18 %`, `240 %`."""
    scaled = 100 * value
    return f"{scaled:.0f} %" if abs(scaled) >= 9.95 else f"{scaled:.2g} %"
