"""Ratio of two measurements that took turns, and what may be said of it: SAME, FAST, SLOW or AMBG.

A block is champion, candidate, candidate, champion (A B B A): whatever drifts linearly within it cancels. A build is
one preparation of a cell in one pair of processes; each side rotates its calls over replicas of its buffers. So a ratio
has three errors, all random and all counted:

- of blocks, which more blocks make smaller: a bootstrap's (Efron 1979) over their trimmed mean, with the degrees of
  freedom that trimming leaves (Yuen 1974), so that a stall in one block does not decide;
- of replicas, since where buffers lie moves a short kernel by more than the margin: that of a difference of two means;
- of processes, since two equal ones differ for their lifetime (an H200 showed 6 % in one decode kernel): what builds
  differ by beyond the other two, pooled over the cells of one backend (the moment estimator of DerSimonian and Laird
  1986). It shows only in cells that were built in several processes.

Degrees of freedom of the sum are Satterthwaite's (1946). Over the cells of a run the share of wrong verdicts among
those given is held at FALSE_SHARE: as many cells are decided as stay decided by their intervals at confidence
1 - FALSE_SHARE * decided / cells (Benjamini and Hochberg 1995; the intervals are Benjamini and Yekutieli's of 2005).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from gates.statistics import Interval

Verdict = Literal["SAME", "FAST", "SLOW", "AMBG"]
Turn = Sequence[float]  # seconds of calls; call i was on replica i modulo their number

TRIM = 0.2  # share of the blocks left out at either end
FALSE_SHARE = 0.05
MIN_BLOCKS = 4
UPPER = 0.8
_NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Side:
    """One side of one cell: two turns a block, all blocks with the same replicas."""

    turns: tuple[Turn, ...]
    num_replicas: int

    def replica_levels(self) -> list[float]:
        """Log seconds of each replica: mean over turns of the median of its calls, less the turn's own level."""
        levels: list[list[float]] = [[] for _ in range(self.num_replicas)]
        for turn in self.turns:
            level = _log_median(turn)
            for replica in range(min(self.num_replicas, len(turn))):
                levels[replica].append(_log_median(turn[replica :: self.num_replicas]) - level)
        return [float(np.mean(one)) for one in levels if one]


@dataclass(frozen=True)
class Estimate:
    """Log ratio candidate / champion of a cell, with its standard error; NaN and infinite for too few blocks."""

    log_ratio: float
    error: float
    degrees: float
    num_blocks: int
    block_error: float = math.nan  # the part that more blocks make smaller
    builds: tuple[Estimate, ...] = ()  # each by itself, where there are several

    def interval(self, confidence: float) -> Interval:
        """The ratio with a two-sided interval."""
        if not math.isfinite(self.error):
            low, high = (math.nan, math.nan) if math.isnan(self.error) else (0.0, math.inf)
            return Interval(math.exp(self.log_ratio), low, high)
        half = float(stats.t.ppf((1 + confidence) / 2, self.degrees)) * self.error
        return Interval(*(math.exp(self.log_ratio + x) for x in (0.0, -half, half)))


def block_log_ratios(champion: Side, candidate: Side) -> list[float]:
    """Log ratio of every block, of the medians of its turns; NaN for one that is no positive time.

    Raises ValueError for sides of unequal length, or half a block: they were not measured in turns.
    """
    if len(champion.turns) != len(candidate.turns) or len(champion.turns) % 2:
        raise ValueError(f"{len(champion.turns)} and {len(candidate.turns)} turns are no blocks of two turns a side")
    theirs, ours = ([_log_median(turn) for turn in side.turns] for side in (champion, candidate))
    return [(ours[i] + ours[i + 1] - theirs[i] - theirs[i + 1]) / 2 for i in range(0, len(ours) - 1, 2)]


def _log_median(turn: Turn) -> float:
    median = float(np.median(turn)) if len(turn) else math.nan
    return math.log(median) if median > 0 else math.nan


def estimate(builds: Sequence[tuple[Side, Side]]) -> Estimate:
    """Of a cell that was built once or several times, each time with replicas of its own: (champion, candidate). The
    error of processes is not in it: see `judge`."""
    blocks = np.array([ratio for build in builds for ratio in block_log_ratios(*build)])
    if np.isnan(blocks).any():
        return Estimate(math.nan, math.nan, 1.0, len(blocks))
    if len(blocks) < MIN_BLOCKS:
        return Estimate(float(blocks.mean()) if len(blocks) else math.nan, math.inf, 1.0, len(blocks))
    draws = np.random.default_rng(0).integers(len(blocks), size=(_NUM_RESAMPLES, len(blocks)))
    # A bootstrap's spread is narrow by sqrt((n - 1) / n).
    of_blocks = float(np.var(stats.trim_mean(blocks[draws], TRIM, axis=1), ddof=1)) * len(blocks) / (len(blocks) - 1)
    parts = [(of_blocks, len(blocks) - 2 * int(TRIM * len(blocks)) - 1)]
    for nth in (0, 1):
        levels = [build[nth].replica_levels() for build in builds]
        num, free = sum(map(len, levels)), sum(len(one) - 1 for one in levels)
        if free > 0:
            pooled = sum(float(np.var(one, ddof=1)) * (len(one) - 1) for one in levels if len(one) > 1) / free
            parts.append((pooled / num, free))
    error, degrees = _sum(parts)
    return Estimate(
        log_ratio=float(stats.trim_mean(blocks, TRIM)),
        error=error,
        degrees=degrees,
        num_blocks=len(blocks),
        block_error=math.sqrt(of_blocks),
        builds=tuple(estimate([build]) for build in builds) if len(builds) > 1 else (),
    )


def _sum(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Standard error of independent parts, (variance, degrees of freedom) each, and its degrees of freedom."""
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 0.0, 1.0
    return math.sqrt(total), max(1.0, total**2 / sum(variance**2 / free for variance, free in parts))


def process_variance(estimates: Sequence[Estimate]) -> tuple[float, float]:
    """By how much processes differ beyond the errors of blocks and replicas: variance of a log ratio, and its degrees
    of freedom; (0, 0) where no cell was built twice.

    The upper bound at UPPER: two builds that agree by luck say little, and would be believed too much.
    """
    spread, free, within = 0.0, 0, 0.0
    for one in estimates:
        builds = [build for build in one.builds if math.isfinite(build.error)]
        if len(builds) > 1:
            spread += float(np.var([build.log_ratio for build in builds], ddof=1)) * (len(builds) - 1)
            within += float(np.mean([build.error**2 for build in builds])) * (len(builds) - 1)
            free += len(builds) - 1
    if not free:
        return 0.0, 0.0
    return max(0.0, spread / float(stats.chi2.ppf(1 - UPPER, free)) - within / free), float(free)


def widened(one: Estimate, variance: float, degrees: float) -> Estimate:
    """With the error of processes in it."""
    if not variance or not math.isfinite(one.error):
        return one
    error, free = _sum([(one.error**2, one.degrees), (variance / max(1, len(one.builds)), degrees)])
    return replace(one, error=error, degrees=free)


def verdict(interval: Interval, margin: float) -> Verdict:
    """SLOW or FAST when the whole interval lies beyond the margin, SAME when inside it, else AMBG."""
    if interval.low > 1 + margin:
        return "SLOW"
    if interval.high < 1 / (1 + margin):
        return "FAST"
    inside = interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin
    return "SAME" if inside else "AMBG"


@dataclass(frozen=True)
class Judged:
    """The verdict of a cell, and the interval that it is told by."""

    interval: Interval
    verdict: Verdict
    confidence: float


def judge(estimates: Sequence[Estimate], margin: float, groups: Sequence[Hashable] | None = None) -> list[Judged]:
    """Verdicts of all cells of a run together: as many as can be given at once with FALSE_SHARE of them wrong. Cells of
    one group (default: all) have processes that differ alike."""
    pools: dict[Hashable, list[Estimate]] = defaultdict(list)
    named = list(groups or [None] * len(estimates))
    for group, one in zip(named, estimates, strict=True):
        pools[group].append(one)
    differ = {group: process_variance(pool) for group, pool in pools.items()}
    whole = [widened(one, *differ[group]) for group, one in zip(named, estimates, strict=True)]
    found: list[Judged] = []
    for decided in range(len(whole), 0, -1):
        confidence = 1 - FALSE_SHARE * decided / len(whole)
        intervals = [one.interval(confidence) for one in whole]
        found = [Judged(interval, verdict(interval, margin), confidence) for interval in intervals]
        if sum(one.verdict != "AMBG" for one in found) >= decided:
            break
    return found
