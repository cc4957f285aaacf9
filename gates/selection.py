"""Weighted selection: which backend is best for each (family, shape bucket) of a mix, and what that is worth.

    selection = select(measured, "chat")
    print(selection.sentence)

Backends compete inside one *service*: one KV layout, dtype and heads, that captures CUDA graphs or does not. A family
without captured cells runs eagerly in both. The score of a backend is attention seconds per 1000 requests in one layer,
summed over every cell that the family has in the service; who lacks a cell has no score. A choice is made for each
bucket, over its decode batches together, since a policy's override names phase and KV length.

What the selection is worth is its *gain* over the best single backend: 1 - seconds / seconds. Whoever chooses the
fastest of several equal backends and judges by the same rounds sees a gain that is noise. So the rounds are cut into
halves: both, selection and best single, are chosen on one and judged on the other, and the other way round. What
processes differ by for their lifetime is in both halves: a gain below `least_gain` is not called one. The interval is
a bootstrap's over the judging rounds, each case by itself, backends of a case together, as they are paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gates.thresholds import Limits, load_limits

if TYPE_CHECKING:
    from attention.cases import AttentionCase

ALL = "all"  # families of a service together

_CONFIDENCE = 0.95  # of each two-sided interval
_MIN_ROUNDS = 6  # of fewer the interval covers too little
_NUM_RESAMPLES = 1000

Reals = NDArray[np.float64]
Rounds = NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """What one backend took for one case. Rounds are paired across the backends of a case."""

    backend: str
    family: str  # prefill | decode | extend
    case_id: str
    shape_bucket: str  # as attention.cases.shape_bucket spells it
    layout: str  # of the service: `layout_of` its case
    weight: float  # share of the family's attention work in this bucket
    calls: float  # of this case that 1000 requests of the mix cost in one layer
    rounds: tuple[float, ...]  # seconds of one call, the median of each interleaved round
    execution: str = "eager"


@dataclass(frozen=True)
class Gain:
    """Share of the seconds saved, with a two-sided interval; NaN with (-inf, inf) where there are too few rounds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f} %)"


@dataclass(frozen=True)
class WorstCell:
    """Where a backend, or a selection, falls furthest behind the fastest of a cell."""

    case_id: str
    shape_bucket: str
    backend: str
    ratio: float  # its seconds over those of the fastest there


@dataclass(frozen=True)
class Choice:
    """The best backend of one bucket."""

    family: str
    shape_bucket: str
    kv_len: int  # upper end of the bucket
    weight: float
    backend: str
    seconds: float  # per 1000 requests, one layer
    gain: Gain | None  # over the service's best single backend; None where that is the choice, or there is none

    @property
    def evidence(self) -> str:
        what = "" if self.gain is None else f", saves {self.gain} of the best single backend's"
        return f"{self.shape_bucket}, {100 * self.weight:.1f} % of {self.family}: {self.seconds:.4g} s{what}"


@dataclass(frozen=True)
class Score:
    """What 1000 requests cost one backend, in one family or in all."""

    backend: str
    family: str  # or ALL
    seconds: float | None  # None: it lacks cells
    lacks: tuple[str, ...]  # case ids
    worst: WorstCell | None  # of the cells that weigh enough; None without a score


@dataclass(frozen=True)
class Regret:
    """The best single backend of a family, or of all, against the selection there."""

    family: str  # or ALL
    single: str | None  # None: no backend has every cell
    gain: Gain
    sentence: str


@dataclass(frozen=True)
class Service:
    """One comparable group of cells."""

    layout: str
    execution: str
    families: tuple[str, ...]
    choices: tuple[Choice, ...]  # of the buckets that some backend has whole
    undecided: tuple[str, ...]  # the other buckets
    scores: tuple[Score, ...]  # a family's best first, those of all families last
    regrets: tuple[Regret, ...]  # families in order, then ALL
    worst: WorstCell | None  # of the selection

    @property
    def preferred(self) -> tuple[str, ...]:
        """Backends that have every cell of every family, best first."""
        return tuple(score.backend for score in self.scores if score.family == ALL and score.seconds is not None)

    @property
    def seconds(self) -> float:
        return sum(choice.seconds for choice in self.choices)

    @property
    def sentence(self) -> str:
        return self.regrets[-1].sentence


@dataclass(frozen=True)
class Selection:
    """The services of one mix: the one with the most families first, of several the fastest."""

    mix: str
    services: tuple[Service, ...]

    @property
    def sentence(self) -> str:
        return self.services[0].sentence if self.services else f"over {self.mix} nothing was measured"


@dataclass(frozen=True)
class _Cell:
    """One case with what the backends took: log seconds [backend, round], NaN for one that lacks it."""

    family: str
    case_id: str
    shape_bucket: str
    weight: float
    calls: float
    logs: Reals

    @property
    def bucket(self) -> tuple[str, int]:
        return self.family, int(self.shape_bucket.rpartition("=")[2])


def layout_of(case: AttentionCase) -> str:
    """What a service has one of: `paged_nhd/16 bfloat16 kv=auto h32/8 d128/128`. Without the execution."""
    pages = "" if case.page_size is None else f"/{case.page_size}"
    heads = f"h{case.heads_q}/{case.heads_kv} d{case.head_dim_qk}/{case.head_dim_vo}"
    return f"{case.layout}{pages} {case.dtype} kv={case.kv_dtype} {heads}"


def select(measured: Sequence[Measured], mix: str, plan: str = "full") -> Selection:
    """The selection for a mix in every service. `plan` picks the limits of gates/thresholds.yaml.

    A backend lacks a case that was not measured, that has a round that is no positive number, or fewer rounds than the
    others there: a cell of which a part is missing is never a fast one.
    """
    limits = load_limits("selection", plan)
    services = []
    for layout, execution in dict.fromkeys((one.layout, one.execution) for one in measured):
        rows = [one for one in measured if one.layout == layout]
        captured = {one.family for one in rows if one.execution == execution}
        mine = [one for one in rows if one.execution == (execution if one.family in captured else "eager")]
        services.append(_service(mine, layout, execution, mix, limits))
    services.sort(key=lambda service: (-len(service.families), service.seconds))
    return Selection(mix, tuple(services))


def _service(rows: Sequence[Measured], layout: str, execution: str, mix: str, limits: Limits) -> Service:
    least_weight = limits.value("cell_weight")
    backends = tuple(dict.fromkeys(row.backend for row in rows))
    cells = _cells(rows, backends)
    families = tuple(dict.fromkeys(cell.family for cell in cells))
    groups = [(family, [cell for cell in cells if cell.family == family]) for family in families] + [(ALL, cells)]
    costs = {cell.case_id: cell.calls * _seconds(cell.logs) for cell in cells}
    scores = [score for family, group in groups for score in _scores(family, group, backends, costs, least_weight)]
    singles = {
        family: next((s.backend for s in scores if s.family == family and not s.lacks), None) for family, _ in groups
    }
    decided = _chosen(cells, [costs[cell.case_id] for cell in cells])
    regrets = [
        _regret(
            family,
            group,
            backends,
            singles[family],
            mix,
            {backends[decided[c.bucket]] for c in group if c.bucket in decided},
            limits.value("least_gain"),
        )
        for family, group in groups
    ]
    return Service(
        layout=layout,
        execution=execution,
        families=families,
        choices=tuple(
            _choice([cell for cell in cells if cell.bucket == bucket], backends, index, singles[ALL], costs)
            for bucket, index in decided.items()
        ),
        undecided=tuple(dict.fromkeys(cell.shape_bucket for cell in cells if cell.bucket not in decided)),
        scores=tuple(scores),
        regrets=tuple(regrets),
        worst=_worst([cell for cell in cells if cell.bucket in decided], backends, decided, costs, least_weight),
    )


def _cells(rows: Sequence[Measured], backends: Sequence[str]) -> list[_Cell]:
    """Cells in order of family as measured, then of KV length."""
    by_case: dict[str, list[Measured]] = {}
    for row in rows:
        by_case.setdefault(row.case_id, []).append(row)
    cells = []
    for case_id, mine in by_case.items():
        num_rounds = max(len(row.rounds) for row in mine)
        logs = np.full((len(backends), num_rounds), np.nan)
        for row in mine:
            seconds = np.asarray(row.rounds, float)
            if len(seconds) == num_rounds and bool(np.all(np.isfinite(seconds) & (seconds > 0))):
                logs[backends.index(row.backend)] = np.log(seconds)
        first = mine[0]
        cells.append(_Cell(first.family, case_id, first.shape_bucket, first.weight, first.calls, logs))
    order = list(dict.fromkeys(row.family for row in rows))
    return sorted(cells, key=lambda cell: (order.index(cell.family), cell.bucket[1], cell.case_id))


def _seconds(logs: Reals, rounds: Rounds | None = None) -> Reals:
    """Seconds of one call by backend, [B] or [B, N], from log seconds [B, R] of some rounds, [n] or [N, n]; NaN stays.

    What a round did to all backends, their median, is taken apart from what is a backend's own, so that drift of the
    machine cancels between them.
    """
    if rounds is None:
        rounds = np.arange(logs.shape[1])
    present = ~np.isnan(logs).any(axis=1)
    if not present.any() or not rounds.shape[-1]:
        return np.full((len(logs), *rounds.shape[:-1]), np.nan)
    drift = np.median(logs[present], axis=0)
    return np.asarray(np.exp(_middle(drift[rounds]) + _middle((logs - drift)[:, rounds])))


def _middle(values: Reals) -> Reals:
    """Mean over the last axis without its lowest and its highest quarter: a stalled round does not decide."""
    num = values.shape[-1]
    return np.asarray(np.sort(values, axis=-1)[..., num // 4 : num - num // 4].mean(axis=-1))


def _chosen(cells: Sequence[_Cell], costs: Sequence[Reals]) -> dict[tuple[str, int], int]:
    """Index of the cheapest backend of each bucket of which some backend has all cells; `costs` by cell, [B]."""
    totals: dict[tuple[str, int], Reals] = {}
    for cell, cost in zip(cells, costs, strict=True):
        totals[cell.bucket] = totals.get(cell.bucket, 0.0) + cost
    return {bucket: int(np.nanargmin(total)) for bucket, total in totals.items() if not np.isnan(total).all()}


def _scores(
    family: str, cells: Sequence[_Cell], backends: Sequence[str], costs: dict[str, Reals], least_weight: float
) -> list[Score]:
    """A score for each backend, best first, those without one last."""
    found = []
    for index, backend in enumerate(backends):
        mine = {cell.case_id: float(costs[cell.case_id][index]) for cell in cells}
        lacks = tuple(case_id for case_id, seconds in mine.items() if math.isnan(seconds))
        if lacks:
            found.append(Score(backend, family, None, lacks, None))
            continue
        worst = _worst(cells, backends, {cell.bucket: index for cell in cells}, costs, least_weight)
        found.append(Score(backend, family, sum(mine.values()), (), worst))
    return sorted(found, key=lambda score: math.inf if score.seconds is None else score.seconds)


def _worst(
    cells: Sequence[_Cell],
    backends: Sequence[str],
    taken: dict[tuple[str, int], int],
    costs: dict[str, Reals],
    least_weight: float,
) -> WorstCell | None:
    """The cell of more than `least_weight` where what is taken for its bucket is furthest behind the fastest."""
    found = [
        WorstCell(cell.case_id, cell.shape_bucket, backends[taken[cell.bucket]], float(cost[taken[cell.bucket]] / best))
        for cell in cells
        if cell.weight > least_weight
        for cost in [costs[cell.case_id]]
        for best in [np.nanmin(cost)]
    ]
    return max(found, key=lambda worst: worst.ratio, default=None)


def _choice(
    cells: Sequence[_Cell], backends: Sequence[str], index: int, single: str | None, costs: dict[str, Reals]
) -> Choice:
    first, backend = cells[0], backends[index]
    gain = None if single in (None, backend) else _gain(cells, [backends.index(single or "")])
    seconds = float(sum(costs[cell.case_id][index] for cell in cells))
    return Choice(first.family, first.shape_bucket, first.bucket[1], first.weight, backend, seconds, gain)


def _regret(
    family: str,
    cells: Sequence[_Cell],
    backends: Sequence[str],
    single: str | None,
    mix: str,
    chosen: set[str],
    least_gain: float,
) -> Regret:
    where = f"over {mix}" if family == ALL else f"over {mix}, {family} alone,"
    if single is None:
        nothing = Gain(math.nan, -math.inf, math.inf)
        return Regret(family, None, nothing, f"{where} no single backend has every cell, so none can be compared with")
    whole = [index for index in range(len(backends)) if not any(np.isnan(cell.logs[index]).any() for cell in cells)]
    gain = _gain(cells, whole)
    if math.isnan(gain.value):
        told = f"cannot be compared with the best single backend {single}: fewer than {_MIN_ROUNDS} rounds"
    elif chosen == {single}:
        told = f"is the best single backend {single} itself, in every bucket"
    elif gain.low > least_gain:
        told = f"beats the best single backend {single} by {gain}"
    elif gain.low > 0:
        told = (
            f"is not shown to beat the best single backend {single}: it saves {gain}, and equal processes may differ "
            f"by {100 * least_gain:g} %"
        )
    else:
        told = f"does not beat the best single backend {single}: it saves {gain}"
    return Regret(family, single, gain, f"{where} the selection {told}")


def _gain(cells: Sequence[_Cell], singles: Sequence[int]) -> Gain:
    """Gain of the best backend of each bucket over the best of `singles`, cross-fitted.

    Choices stay as the other half made them while the judging half is resampled. The spread gives a standard error,
    widened for the few rounds (sqrt(n / (n - 1)), and Student's t), since plain percentiles of four cover too little.
    """
    num_rounds = min(cell.logs.shape[1] for cell in cells)
    if num_rounds < _MIN_ROUNDS:
        return Gain(math.nan, -math.inf, math.inf)
    generator = np.random.default_rng(0)
    centre, spread = 0.0, np.zeros(_NUM_RESAMPLES)
    for half in (0, 1):
        choosing = [cell.calls * _seconds(cell.logs, _half(cell.logs.shape[1], half)) for cell in cells]
        selected = _chosen(cells, choosing)
        single = singles[int(np.argmin(np.sum(choosing, axis=0)[list(singles)]))]
        pairs = [(selected[cell.bucket], single) for cell in cells]
        judging = [_half(cell.logs.shape[1], 1 - half) for cell in cells]
        centre += 0.5 * float(_log_ratio(cells, judging, pairs))
        resampled = [rounds[generator.integers(len(rounds), size=(_NUM_RESAMPLES, len(rounds)))] for rounds in judging]
        spread += 0.5 * _log_ratio(cells, resampled, pairs)
    num_judging = min(len(_half(num_rounds, half)) for half in (0, 1))
    error = float(spread.std(ddof=1)) * math.sqrt(num_judging / (num_judging - 1))
    width = float(stats.t.ppf((1 + _CONFIDENCE) / 2, num_rounds - 2)) * error
    return Gain(*(-math.expm1(x) for x in (centre, centre + width, centre - width)))


def _half(num_rounds: int, which: int) -> Rounds:
    """Rounds of a half: pairs of neighbours by turns, so that each has both orders of an A B, B A interleaving."""
    rounds = np.arange(num_rounds)
    return np.flatnonzero(rounds // 2 % 2 == which)


def _log_ratio(cells: Sequence[_Cell], rounds: Sequence[Rounds], pairs: Sequence[tuple[int, int]]) -> Reals:
    """Log of the selection's seconds over the single backend's, from the given rounds of each cell: [] or [N]."""
    costs = [cell.calls * _seconds(cell.logs, mine) for cell, mine in zip(cells, rounds, strict=True)]
    selection, single = (sum(cost[pair[k]] for cost, pair in zip(costs, pairs, strict=True)) for k in (0, 1))
    return np.asarray(np.log(selection / single))
