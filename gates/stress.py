"""Checks of the stress run: up to which load does the candidate keep its users within the objectives?

At each level a share of the offered requests was good: completed with TTFT and TPOT within the objectives. The *knee*
of a side is the highest offered rate at which that share is still at least `good_share`, at this and at every lower
rate; between the last level that holds and the first that does not, where a straight line between the two crosses
`good_share`. Goodput at 90 % attainment is how DistServe (Zhong et al., OSDI 2024) compares systems. A side that holds
at every level has its knee at the highest rate that was offered, or above; one that holds at none has no knee.

The interval of a knee takes the one-sided Clopper-Pearson bounds of every share instead of the shares; of the ratio,
candidate over champion, the lower end is the candidate's lower over the champion's upper. Both sides met the same
requests, so this is wider than it must be; requests behind one queue are not independent, so it is not as wide as it
looks. Few requests give a wide interval, which is inconclusive. So is a champion without a knee: either its requests
were too few to show it, or the objectives are too tight for this machine, and nothing can be compared.

A request that fails under load (an error of the model, no memory) fails the candidate; one that is refused because
the queue is full is load that was not carried, and lowers the knee. A level of the plan that is missing, has no
figures (the process was lost), or was offered to the two sides at different rates is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from data.lake import Lake
from data.plan import StressPlan
from gates.evaluate import Note, evaluate, load_suite
from gates.statistics import Interval, detectable_ratio, percent, rate
from gates.thresholds import Limits
from gates.verdict import Check, Verdict

# A level that was measured again replaces its earlier row.
_LEVELS = """
select side, max_running, level, rate_per_s, num_offered, num_good, num_failed, num_fallbacks, num_out_of_memory
from perf_stress where release_id = $release
qualify row_number() over (partition by side, max_running, level order by time desc) = 1
order by side, max_running, level
"""


class _Row(NamedTuple):
    """One level of one side as the lake has it; a process that was lost leaves None."""

    side: str
    max_running: int
    level: float
    rate_per_s: float | None
    num_offered: int | None
    num_good: int | None
    num_failed: int | None
    num_fallbacks: int | None
    num_out_of_memory: int | None


@dataclass(frozen=True)
class Level:
    """Requests offered at one rate, and how many of them were good."""

    rate_per_s: float
    num_offered: int
    num_good: int


def checks(tables: Lake, release_id: str, plan: StressPlan, limits: Limits) -> list[Check]:
    """Six checks a concurrency, `stress.<max_running>_running.*`, of this release's perf_stress; a knee that cannot be
    read is left out beside the error that says why.

    limits: `load_limits("stress", plan's name)`. That a row is of the fingerprinted environment is asked elsewhere
    (`gates.fingerprint.measured_rows`).
    """
    rows = [_Row(*row) for row in tables.rows(_LEVELS, release=release_id)]
    found: list[Check] = []
    for running in plan.max_running:
        champion, candidate = (
            [row for row in rows if (row.side, row.max_running) == (side, running) and row.level in plan.levels]
            for side in ("champion", "candidate")
        )
        found += _at(f"stress.{running}_running.", champion, candidate, plan, limits)
    return found


def knee(levels: Sequence[Level], good_share: float) -> Interval:
    """Requests a second, with one-sided bounds. NaN where the lowest level already falls short, its lower bound 0.

    Raises ValueError for no levels.
    """
    if not levels:
        raise ValueError("a knee needs a level")
    ordered = sorted(levels, key=lambda one: one.rate_per_s)
    rates = [one.rate_per_s for one in ordered]
    shares = [rate(one.num_good, one.num_offered) for one in ordered]
    value = _crossing(rates, [share.value for share in shares], good_share)
    low = _crossing(rates, [share.low for share in shares], good_share)
    high = _crossing(rates, [share.high for share in shares], good_share)
    return Interval(
        value=math.nan if value is None else value,
        low=0.0 if low is None else low,
        high=rates[0] if high is None else high,
    )


def _crossing(rates: Sequence[float], shares: Sequence[float], good_share: float) -> float | None:
    """Where the shares first fall below `good_share`; the last rate if they never do, None if they begin below."""
    if shares[0] < good_share:
        return None
    for i in range(1, len(rates)):
        held, fell = shares[i - 1], shares[i]
        if fell < good_share:
            return rates[i - 1] + (rates[i] - rates[i - 1]) * (held - good_share) / (held - fell)
    return rates[-1]


def _at(
    prefix: str, champion: Sequence[_Row], candidate: Sequence[_Row], plan: StressPlan, limits: Limits
) -> list[Check]:
    """Checks of one concurrency."""
    suite = load_suite("stress")
    if not champion and not candidate:
        nothing = pd.DataFrame()
        return [
            *evaluate(suite, nothing, limits, {}, prefix=prefix),
            *evaluate(load_suite("stress_knee"), nothing, limits, {}, prefix=prefix),
        ]
    broken = [*_unusable("champion", champion, plan), *_unusable("candidate", candidate, plan)]
    broken += [] if broken else _unequal(champion, candidate)
    counts = {
        "num_broken": len(broken),
        "num_failed": _total(row.num_failed for row in candidate),
        "num_champion_failed": _total(row.num_failed for row in champion),
        "num_fallbacks": _total(row.num_fallbacks for row in candidate),
        "num_out_of_memory": _total(row.num_out_of_memory for row in candidate),
    }
    num = sum(row.num_offered or 0 for row in candidate)
    request = f"1 request of {num}"
    notes = {
        "levels": Note(f"1 level of {len(plan.levels)}", len(plan.levels), "; ".join(broken)),
        "failed": Note(request, num, _failures(candidate)),
        "comparable": Note(request, num, f"of the champion {_failures(champion)}"),
        "fallbacks": Note(request, num),
        "out_of_memory": Note("1 step", num),
    }
    judged = evaluate(suite, pd.DataFrame([counts]), limits, notes, prefix=prefix)
    if broken:  # an error already, and no knee can be read from it
        return judged
    return [*judged, *_knee_checks(prefix, _levels(champion), _levels(candidate), plan, limits)]


def _unusable(side: str, rows: Sequence[_Row], plan: StressPlan) -> list[str]:
    """Levels of the plan without a share that can be judged, each with the reason."""
    known = {row.level: row for row in rows}
    said = []
    for level in plan.levels:
        row = known.get(level)
        if row is None:
            said.append(f"{side} at {level:.0%} is missing")
        elif any(value is None or not math.isfinite(value) for value in row[3:]):
            said.append(f"{side} at {level:.0%} has no figures: its process was lost")
        elif not _is_possible(row):
            said.append(f"{side} at {level:.0%}: {row.num_good} of {row.num_offered} good at {row.rate_per_s}/s")
    return said


def _is_possible(row: _Row) -> bool:
    rate_per_s, offered, good = row.rate_per_s or 0.0, row.num_offered or 0, row.num_good or 0
    return rate_per_s > 0 and offered > 0 and 0 <= good <= offered


def _unequal(champion: Sequence[_Row], candidate: Sequence[_Row]) -> list[str]:
    """Levels whose requests came at another rate on the other side: a measurement of another day."""
    return [
        f"at {ours.level:.0%} the candidate was offered {ours.rate_per_s}/s, the champion {theirs.rate_per_s}/s"
        for theirs, ours in zip(champion, candidate, strict=True)
        if theirs.rate_per_s != ours.rate_per_s
    ]


def _total(counts: Iterable[int | None]) -> float:
    """A sum; NaN as soon as one is missing."""
    return float(sum(math.nan if count is None else count for count in counts))


def _failures(rows: Sequence[_Row]) -> str:
    return ", ".join(f"{row.num_failed} at {row.level:.0%}" for row in rows if row.num_failed)


def _levels(rows: Sequence[_Row]) -> list[Level]:
    return [Level(row.rate_per_s or 0.0, row.num_offered or 0, row.num_good or 0) for row in rows]


def _knee_checks(
    prefix: str, champion: Sequence[Level], candidate: Sequence[Level], plan: StressPlan, limits: Limits
) -> list[Check]:
    theirs, ours = (knee(levels, limits.value("good_share")) for levels in (champion, candidate))
    if theirs.low <= 0:
        return [_without_champion(f"{prefix}knee", champion, plan, limits)]
    ratio = Interval(ours.value / theirs.value, ours.low / theirs.high, ours.high / theirs.low)
    lower = 1 - 1 / (1 + detectable_ratio(ratio))
    top = max(one.rate_per_s for one in champion)
    effect = f"knee -{percent(lower)}" if lower > 0 else f"a knee below {top:.3g}/s, the highest rate offered"
    note = Note(
        effect,
        sum(one.num_offered for one in candidate),
        f"the candidate carries {_told(ours)}, the champion {_told(theirs)}",
    )
    frame = pd.DataFrame([{"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}])
    return evaluate(load_suite("stress_knee"), frame, limits, {"knee": note}, prefix=prefix)


def _without_champion(name: str, champion: Sequence[Level], plan: StressPlan, limits: Limits) -> Check:
    least, limit = min(champion, key=lambda one: one.rate_per_s), limits["knee_ratio"]
    return Check(
        check=name,
        verdict=Verdict.INCONCLUSIVE,
        limit=limit.value,
        direction="min",
        owner=limit.owner,
        reason=limit.reason,
        message=f"{name}: no level shows {percent(limits.value('good_share'))} of the champion's requests within TTFT "
        f"{plan.slo_ttft_s:g} s and TPOT {plan.slo_tpot_s:g} s, at the lowest {least.num_good} of {least.num_offered} "
        "were; offer more requests, or loosen the plan's objectives",
    )


def _told(one: Interval) -> str:
    """`1.9/s (1.7 to 2)`, or that no level was carried."""
    if math.isnan(one.value):
        return f"no level ({one.high:.3g}/s at most)"
    return f"{one.value:.3g}/s ({one.low:.3g} to {one.high:.3g})"
