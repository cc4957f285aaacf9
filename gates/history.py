"""Is the candidate slower than it used to be? Its baseline beside the accepted ones of other days.

The champion takes turns with the candidate and so cannot show what became slower for both: a driver, a library that
both environments share, the machine itself. The history can. A *baseline* is what one release measured as candidate:
p50 by (backend, family, metric, case). It is *accepted* when every check of its baseline gate passed, so a night that
failed is nobody's measure. A release is compared with the last ten accepted baselines of its GPU and model that began
before it, whichever fingerprint they have; what changed in the fingerprint since the last one is named. `flows
nightly`, `qualify` and `release` all come here through the baseline gate.

**Seconds or share of the limit.** Clocks and neighbours differ between nights, and the ceilings, measured in the same
rounds as the kernel, feel them too. So the cost that is judged is 1 / limit_ratio; seconds where a metric has no limit
(TTFT, TPOT). 24 measurements of SDPA's flash kernel on a shared CPU core, a second apart: the spread of p50 was 8 to
31 %, over the limit 3 to 20 %, less for each of four cases. But a new library may raise a ceiling and leave the kernel
as it is, so seconds have a veto: they must be over the limit as well. 4000 simulated nights of 40 cells each, on a
machine whose clock varies by 2 % and that has a bad night in twenty: seconds alone give a false alarm in 1.4 % of the
nights, the share alone in under 0.1 %, and on every night after a ceiling rose by 8 %, where the veto leaves 1.8 %. A
true slowdown of 15 % is found at once in 80 %, 100 % and 100 % of the cells.

**A regression** is a cell that costs more than `last_ratio` times the last accepted figure, and more than the median of
the last ten by `ratio` and by `spreads` robust standard deviations (1.4826 MAD; the cell's own, or the typical cell's
where that is larger, since the MAD of ten is sometimes small by luck). The first condition ends an argument: who wants
a slowdown accepts it by one night with a raised limit, and later nights, no slower than that one, pass. Steps below
`last_ratio` a night are not seen. A cell with fewer than `entries` accepted figures is recorded only, as is one that
carries less than `cell_weight` of its family's work. A cell that an accepted baseline measured and that now is
refused, out of memory, crashed or hung is a regression whatever its weight; one that is not asked for now is none.

On the first night there is nothing to compare with, and the checks pass and say so: the first baseline has to be
accepted somehow, and what it is worth beside the champion the gate has judged.

A release whose files cannot be read is left out and named: another release's broken file says nothing of this one.
Releases are read newest first, by the time at the end of their ids, and no further than needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from attention.difference import short
from attention.effects import explain
from attention.errors import EvidenceError
from data.lake import Lake
from gates.evaluate import Note, evaluate, load_suite
from gates.statistics import percent
from gates.thresholds import Limits
from gates.verdict import Check

_NORMAL = 1.4826  # times the MAD is the standard deviation of a normal distribution
_MOST_NAMED, _MOST_FIELDS, _MOST_CHARS = 3, 5, 40  # of a message
#: The gate has an error of its own for each of these that has no figure.
_NOT_LOST = (None, "measured", "above_limit", "warm_cache")
_BEGAN = re.compile(r"\d{8}-\d{6}$")  # at the end of a release's id

# A stage that was resumed wrote more than one report: the latest counts.
_PASSED = """
with latest as (
  select release_id, verdict from gate_results where stage = 'baseline' and gpu = $gpu and model = $model
  qualify time is not distinct from max(time) over (partition by release_id)
)
select release_id from latest group by release_id having bool_and(verdict is not distinct from 'pass')
"""

# Of each release, rows of a worker that died before it had a fingerprint come last.
_FIGURES = """
select release_id, gpu, model, fingerprint_id, family, metric, backend, case_id, outcome, error, weight, p50_s,
  limit_ratio
from perf_backends where side = 'candidate'
qualify row_number() over (partition by release_id, family, metric, backend, case_id order by time desc) = 1
order by release_id, coalesce(fingerprint_id, '') = '', family, metric, backend, case_id
"""

_IDENTITIES = """
select release_id, identity_json from fingerprints where side = 'candidate'
qualify row_number() over (partition by release_id order by time desc) = 1
"""


class Key(NamedTuple):
    """What must be equal for two figures to be compared."""

    family: str  # prefill | decode | extend
    metric: str  # kernel_s | ttft_s | tpot_s
    backend: str
    case_id: str

    def __str__(self) -> str:
        return f"{self.family} {self.metric} of {self.backend} on {self.case_id}"


@dataclass(frozen=True)
class Figure:
    """One cell of a baseline; a figure that is missing or no positive number is None."""

    outcome: str | None  # as in perf_backends
    error: str | None
    weight: float | None
    seconds: float | None  # p50; None for a cell that was not measured
    limit_ratio: float | None


@dataclass(frozen=True)
class Baseline:
    """What one release measured as candidate."""

    release_id: str
    gpu: str
    model: str
    fingerprint_id: str
    figures: dict[Key, Figure]


@dataclass(frozen=True)
class Costs:
    """One cell's costs, less is better: seconds, or 1 / limit_ratio. `past` is newest first and not empty."""

    now: float
    past: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.past)

    @property
    def slowdown(self) -> float:
        """Ratio over the median of the past."""
        return self.now / self.median

    @property
    def spread(self) -> float:
        """Robust standard deviation of the past's logs."""
        return _NORMAL * median(abs(math.log(cost / self.median)) for cost in self.past)


@dataclass(frozen=True)
class Cell:
    """A cell of now that an accepted baseline measured."""

    key: Key
    now: Figure
    last: str  # the release of the last accepted figure
    seconds: Costs | None  # None: no time now
    over_limit: Costs | None  # None: no limit now, the last time, or often enough

    @property
    def kind(self) -> tuple[str, bool]:
        """Cells of one kind have comparable noise."""
        return self.key.metric, self.over_limit is not None


@dataclass(frozen=True)
class Judged:
    """A cell with a time now and enough of a past."""

    cell: Cell
    seconds: Costs
    costs: Costs  # that it was judged by: over its limit, or seconds
    allowed: float  # ratio over the median up to which it is no slower
    heavy: bool
    slower: bool


def checks(lake: Path, release_id: str, limits: Limits) -> list[Check]:
    """Four checks, `history.*`, of this release's perf_backends against the accepted ones before it.

    limits: `load_limits("history", plan.name)`. Raises EvidenceError where this release's own files cannot be read.
    """
    import pandas as pd

    suite = load_suite("history")
    now = _own(lake, release_id)
    if now is None:
        return evaluate(suite, pd.DataFrame(), limits, {}, prefix="history.")
    before, unreadable = accepted_before(lake, now, int(limits.value("window")))
    cells = _known(now, before, int(limits.value("entries")))
    judged = _judge(cells, limits)
    broken = [key for key, one in now.figures.items() if one.outcome == "measured" and one.seconds is None]
    lost = [cell for cell in cells if cell.now.outcome not in _NOT_LOST]
    slower = sorted((one for one in judged if one.heavy and one.slower), key=lambda one: -one.costs.slowdown)
    slowest = slower[0].costs.slowdown if slower else 0.0
    counts = {"num_baselines": len(before), "num_broken": len(broken), "num_lost": len(lost)}
    frame = pd.DataFrame([counts | {"slower": slowest}])
    num = len(now.figures)
    none_known = f"history: nothing yet, none of {num} cells was measured before"
    lost_lines = _listed([f"{cell.key} was measured in {cell.last}, now {_outcome(cell.now)}" for cell in lost])
    slower_lines = _listed([_line(one) for one in slower])
    notes = {
        "baselines": Note(_told(now, before, unreadable), num),
        "figures": Note(f"1 of {num} cells", num, _listed([f"{key} has no time" for key in broken])),
        "lost": Note(f"1 of {len(cells)} cells" if cells else none_known, num, lost_lines + _since(lake, now, lost)),
        "slower": Note(
            _detectable(judged) or f"history: nothing yet, none of {num} cells has accepted figures enough",
            len(judged) or num,
            slower_lines + _since(lake, now, [one.cell for one in slower]),
        ),
    }
    return evaluate(suite, frame, limits, notes, prefix="history.")


# ---------------------------------------------------------------------------- baselines


def accepted_before(lake: Path, now: Baseline, window: int) -> tuple[list[Baseline], list[str]]:
    """The last `window` accepted baselines of the same GPU and model that began before `now`, newest first; and the
    releases, of whatever GPU and model, that could not be read on the way."""
    known = {folder.name.partition("=")[2] for folder in lake.glob("perf_backends/release_id=*")}
    earlier = sorted((one for one in known if _began(one) < _began(now.release_id)), key=_began, reverse=True)
    found: list[Baseline] = []
    unreadable: list[str] = []
    for start in range(0, len(earlier), window):
        passed, broken = _read(lake, earlier[start : start + window], _PASSED, gpu=now.gpu, model=now.model)
        figures, torn = _read(lake, [release_id for (release_id,) in passed], _FIGURES)
        found += sorted(_baselines(figures), key=lambda one: _began(one.release_id), reverse=True)
        unreadable += [*broken, *torn]
        if len(found) >= window:
            break
    return found[:window], unreadable


def _began(release_id: str) -> tuple[str, str]:
    """Sorts ids by the time in them; those without one come first."""
    began = _BEGAN.search(release_id)
    return (began.group() if began else "", release_id)


def _read(lake: Path, releases: Sequence[str], sql: str, **parameters: str) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows of these releases alone, and which of them cannot be read: the halves of what fails are read apart."""
    if not releases:
        return [], []
    folders = {f"release_id={one}" for one in releases}
    try:
        with Lake(lake, lambda table, file: file.parent.name in folders) as tables:
            return tables.rows(sql, **parameters), []
    except EvidenceError:
        if len(releases) == 1:
            return [], list(releases)
    middle = len(releases) // 2
    (rows, broken), (others, torn) = (
        _read(lake, half, sql, **parameters) for half in (releases[:middle], releases[middle:])
    )
    return rows + others, broken + torn


def _own(lake: Path, release_id: str) -> Baseline | None:
    """What a release measured; None for nothing. Raises EvidenceError for files that cannot be read."""
    with Lake(lake, release_id=release_id) as tables:
        found = _baselines(tables.rows(_FIGURES))
    return found[0] if found else None


def _baselines(rows: Sequence[tuple[Any, ...]]) -> list[Baseline]:
    """One for each release that rows of _FIGURES are of."""
    found: dict[str, Baseline] = {}
    for release_id, gpu, model, fingerprint, *key, outcome, error, weight, p50_s, limit_ratio in rows:
        baseline = found.setdefault(release_id, Baseline(release_id, gpu, model, fingerprint, {}))
        seconds = _positive(p50_s) if outcome == "measured" else None
        baseline.figures[Key(*key)] = Figure(outcome, error, weight, seconds, _positive(limit_ratio))
    return list(found.values())


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


# ---------------------------------------------------------------------------- cells


def _known(now: Baseline, before: Sequence[Baseline], entries: int) -> list[Cell]:
    """The cells of now that an accepted baseline measured."""
    found = []
    for key, figure in now.figures.items():
        past = [(one.release_id, then) for one in before if (then := one.figures.get(key)) and then.seconds]
        if past:
            seconds = _costs(figure.seconds, [then.seconds for _, then in past], 1)
            shares = [_inverse(then.limit_ratio) for _, then in past]
            over_limit = _costs(_inverse(figure.limit_ratio), shares, entries)
            found.append(Cell(key, figure, past[0][0], seconds, over_limit))
    return found


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def _costs(now: float | None, past: Sequence[float | None], least: int) -> Costs | None:
    """None without a cost of now, of the last time or of `least` times."""
    there = tuple(cost for cost in past if cost is not None)
    if now is None or past[0] is None or len(there) < least:
        return None
    return Costs(now, there)


def _judge(cells: Sequence[Cell], limits: Limits) -> list[Judged]:
    """Those with enough of a past, by the rule that the module's docstring states."""
    timed = [(cell, cell.seconds, cell.over_limit or cell.seconds) for cell in cells if cell.seconds]
    enough = [row for row in timed if len(row[2].past) >= limits.value("entries")]
    spreads: dict[tuple[str, bool], list[float]] = {}
    for cell, _, costs in enough:
        spreads.setdefault(cell.kind, []).append(costs.spread)
    judged = []
    for cell, seconds, costs in enough:
        noise = limits.value("spreads") * max(costs.spread, median(spreads[cell.kind]))
        allowed = max(limits.value("ratio"), math.exp(noise))
        slower = (
            costs.slowdown > allowed
            and seconds.slowdown > limits.value("ratio")
            and costs.now > limits.value("last_ratio") * costs.past[0]
        )
        heavy = cell.now.weight is None or not cell.now.weight < limits.value("cell_weight")
        judged.append(Judged(cell, seconds, costs, allowed, heavy, slower))
    return judged


# ---------------------------------------------------------------------------- words


def _told(now: Baseline, before: Sequence[Baseline], unreadable: Sequence[str]) -> str:
    same = sum(one.fingerprint_id == now.fingerprint_id for one in before)
    what = f"{len(before)} accepted baselines before, {same} of this fingerprint"
    text = what if before else f"no accepted baseline of {now.gpu} {now.model} before: nothing to compare with"
    return f"{text}; left out, files cannot be read: {', '.join(unreadable)}" if unreadable else text


def _detectable(judged: Sequence[Judged]) -> str:
    """The slowdown that half of the judged cells, and that all of them, would have shown; empty for none."""
    allowed = [one.allowed - 1 for one in judged if one.heavy]
    if not allowed:
        return ""
    return f"history +{percent(median(allowed))} in half of {len(allowed)} cells, +{percent(max(allowed))} in each"


def _listed(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_NAMED
    return "; ".join(lines[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _outcome(figure: Figure) -> str:
    return f"{figure.outcome} ({figure.error})" if figure.error else str(figure.outcome)


def _line(one: Judged) -> str:
    """`decode kernel_s of B on C: 1.2 ms now, 1 ms last (R), 1.01 ms median of 10; 0.41 of its limit, was 0.5, 0.5`."""
    seconds, shares = one.seconds, one.cell.over_limit
    text = (
        f"{one.cell.key}: {_time(seconds.now)} now, {_time(seconds.past[0])} last ({one.cell.last}), "
        f"{_time(seconds.median)} median of {len(seconds.past)}"
    )
    if shares is None:
        return text
    now, last, middle = (f"{1 / cost:.3g}" for cost in (shares.now, shares.past[0], shares.median))
    return f"{text}; {now} of its limit now, {last} last, {middle} median"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.4g} us"


def _since(lake: Path, now: Baseline, cells: Sequence[Cell]) -> str:
    """What changed in the fingerprint since the last accepted figures of the cells that a message names."""
    return "".join(
        f"; {_changed(lake, now, last)}" for last in dict.fromkeys(cell.last for cell in cells[:_MOST_NAMED])
    )


def _changed(lake: Path, now: Baseline, last: str) -> str:
    """`changed since R: torch: 2.12 -> 2.13, driver: 580 -> 590 (and 3 more)`; what has known effects comes first."""
    rows, _ = _read(lake, [last, now.release_id], _IDENTITIES)
    try:
        identities = {release_id: json.loads(text) for release_id, text in rows}
        old, new = identities[last], identities[now.release_id]
    except (KeyError, TypeError, ValueError):
        return f"what changed in the fingerprint since {last} cannot be told: one of the two cannot be read"
    found = explain(old, new)
    if not found:
        return f"nothing in the fingerprint changed since {last}: look at the machine"
    found.sort(key=lambda one: (not one.effects, one.path.startswith("distributions."), one.path))
    fields = ", ".join(f"{one.path}: {_cut(one.old)} -> {_cut(one.new)}" for one in found[:_MOST_FIELDS])
    more = len(found) - _MOST_FIELDS
    return f"changed since {last}: {fields}" + (f" (and {more} more)" if more > 0 else "")


def _cut(value: Any) -> str:
    text = short(value)
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."
