"""Ratio of two measurements that took turns, and what may be said of it: SAME, FAST, SLOW or AMBG.

A block is champion, candidate, candidate, champion (A B B A): whatever drifts linearly within it cancels. A block
gives one log ratio, of the medians of its turns. Over blocks the estimate is a trimmed mean, so that a stall in one
block does not decide, and its interval a bootstrap's (Efron 1979): resampled blocks give the standard error, Student's
t for what trimming leaves (Yuen 1974) the width. Plain percentiles of eight blocks cover too little, and know nothing
of the far tails that a correction over many cells asks for.

The confidence is corrected for every cell and every look (Bonferroni), since a cell that is ambiguous is looked at
again with more blocks: see `corrected`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

from gates.statistics import Interval

Verdict = Literal["SAME", "FAST", "SLOW", "AMBG"]

TRIM = 0.2  # share of the blocks left out at either end
#: Share of verdicts that may be wrong, over all cells and looks of a run.
FAMILY_ALPHA = 0.05
_NUM_RESAMPLES = 2000


def block_log_ratio(turns: Sequence[tuple[str, Sequence[float]]], champion: str, candidate: str) -> float:
    """Log ratio candidate over champion of one block: who had each turn, and the seconds of its calls."""
    medians: dict[str, list[float]] = {champion: [], candidate: []}
    for name, seconds in turns:
        medians[name].append(math.log(float(np.median(seconds))))
    return float(np.mean(medians[candidate]) - np.mean(medians[champion]))


def corrected(num_cells: int, num_looks: int, alpha: float = FAMILY_ALPHA) -> float:
    """Two-sided confidence of one interval, so that all intervals of a run hold together with 1 - alpha."""
    return 1 - alpha / (max(1, num_cells) * max(1, num_looks))


def looks(first: int, last: int) -> tuple[int, ...]:
    """Numbers of blocks at which a cell is looked at: doubled from `first` until `last`."""
    found = [first]
    while found[-1] < last:
        found.append(min(last, 2 * found[-1]))
    return tuple(found)


def paired_ratio(log_ratios: Sequence[float], confidence: float) -> Interval:
    """Ratio with a two-sided interval at `confidence`; (0, inf) for fewer than four blocks, NaN for NaN."""
    blocks = np.asarray(log_ratios, float)
    if np.isnan(blocks).any():
        return Interval(math.nan, math.nan, math.nan)
    if len(blocks) < 4:
        return Interval(math.exp(float(blocks.mean())) if len(blocks) else math.nan, 0.0, math.inf)
    num_cut = int(TRIM * len(blocks))
    centre = float(stats.trim_mean(blocks, TRIM))
    draws = np.random.default_rng(0).integers(len(blocks), size=(_NUM_RESAMPLES, len(blocks)))
    resampled = stats.trim_mean(blocks[draws], TRIM, axis=1)
    # A bootstrap's spread is narrow by sqrt((n - 1) / n).
    error = float(resampled.std(ddof=1)) * math.sqrt(len(blocks) / (len(blocks) - 1))
    half = float(stats.t.ppf((1 + confidence) / 2, len(blocks) - 2 * num_cut - 1)) * error
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def verdict(interval: Interval, margin: float) -> Verdict:
    """SLOW or FAST when the whole interval lies beyond the margin, SAME when inside it, else AMBG."""
    if interval.low > 1 + margin:
        return "SLOW"
    if interval.high < 1 / (1 + margin):
        return "FAST"
    inside = interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin
    return "SAME" if inside else "AMBG"
