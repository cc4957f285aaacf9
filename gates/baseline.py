"""Gate of the baseline stage: is the candidate fast enough, prefill, decode and extend apart?

A cell's ratio is candidate over champion, paired by interleaved block. Cells are weighted by the share
of the traffic's work that they carry within their family; the weighted mean of the cells' bounds is a
conservative interval of the weighted ratio. `kernel_s` must be there for prefill and decode and cover the
plan's share of the work; extend is there where the traffic has prefixes in the cache; TTFT and TPOT are judged where
they were measured; `first_call_s` is no steady state and is left to the report. A cell that the candidate lost (out of
memory, a crash, another kernel) fails, one that only the champion lost has nothing to be compared with, and a figure
above what the machine can do is an error. The knee of the stress run and the history of accepted baselines are judged
in modules of their own.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data.lake import Lake
from data.plan import Plan
from gates import history, statistics, stress
from gates.evaluate import Note, evaluate, load_suite
from gates.fingerprint import measured_rows
from gates.thresholds import Limits, load_limits
from gates.verdict import Check, fail_closed

TABLES = ("perf_samples", "perf_backends", "perf_cells", "perf_stress")
REQUIRED = (("prefill", "kernel_s"), ("decode", "kernel_s"))

# A cell that was measured again replaces its earlier row. A null weight or bound makes the sums null.
_FAMILY = """
with cells as (
  select * from perf_cells
  where release_id = $release and family = $family and metric = $metric
  qualify row_number() over (partition by case_id order by time desc) = 1
)
select count(*) as num_cells,
  case when count(weight) = count(*) then sum(weight) end as weight,
  strict_min(num_blocks) as num_blocks,
  count(*) filter (
    least(ratio, ratio_low, ratio_high) <= 0 or weight < 0 or ratio < ratio_low or ratio > ratio_high
    or verdict is null or verdict not in ('SAME', 'FAST', 'SLOW', 'AMBG')
  ) + case when sum(weight) > 1 + 1e-6 then 1 else 0 end as num_impossible,
  case when count(ratio) = count(*) then sum(weight * ratio) / sum(weight) end as ratio,
  case when count(ratio_low) = count(*) then sum(weight * ratio_low) / sum(weight) end as ratio_low,
  case when count(ratio_high) = count(*) then sum(weight * ratio_high) / sum(weight) end as ratio_high,
  coalesce(sum(weight) filter (verdict = 'AMBG'), 0) as ambiguous,
  coalesce(max(ratio_low) filter (weight > $cell_weight), 0) as slow_cell,
  arg_max(case_id, ratio_low) filter (weight > $cell_weight) as slow_case
from cells
"""

_GROUPS = """
select distinct family, metric from perf_cells
where release_id = $release and metric in ('kernel_s', 'ttft_s', 'tpot_s') order by family, metric
"""

# What was lost, of the last row of each cell and side. A measurement that no machine reaches was none.
_OUTCOMES = """
with rows as (
  select * from perf_backends where release_id = $release
  qualify row_number() over (partition by side, family, metric, case_id order by time desc) = 1
)
select count(*) as num_rows,
  count(*) filter (outcome is null or outcome in ('above_limit', 'warm_cache')) as num_invalid,
  count(*) filter (side = 'candidate' and outcome not in ('measured', 'above_limit', 'warm_cache')) as num_lost,
  count(*) filter (side = 'champion' and outcome not in ('measured', 'above_limit', 'warm_cache')) as num_incomparable,
  count(*) filter (outcome = 'out_of_memory') as num_out_of_memory,
  count(*) filter (outcome = 'illegal_access') as num_illegal_access,
  count(*) filter (outcome = 'compile_failed') as num_compile_failed,
  count(*) filter (outcome = 'capture_failed') as num_capture_failed,
  string_agg(distinct concat(side, ' ', backend, ' on ', case_id, ': ', outcome, ': ', error), '; ')
    filter (outcome is distinct from 'measured') as losses
from rows
"""

# Cells that both sides measured and nobody compared, and the other way round.
_UNPAIRED = """
with measured as (
  select family, metric, case_id from perf_backends
  where release_id = $release and (outcome is null or outcome in ('measured', 'above_limit'))
  group by all having count(distinct side) = 2
), compared as (
  select distinct family, metric, case_id from perf_cells where release_id = $release
)
select count(*) as num_cells, count(*) filter (measured.case_id is null or compared.case_id is null) as num_unpaired,
  string_agg(coalesce(measured.case_id, compared.case_id), ', ')
    filter (measured.case_id is null or compared.case_id is null) as unpaired
from measured full join compared using (family, metric, case_id)
"""

_FLOOR = """
select count(*) as num_cells, strict_max(aa_floor) as aa_floor
from perf_cells where release_id = $release and metric = 'kernel_s'
"""

_SAMPLES = """
select count(*) as num_samples,
  count(*) filter (seconds is null or not isfinite(seconds) or seconds <= 0) as num_impossible,
  count(*) filter (confirmed_backend is distinct from backend) as num_other,
  string_agg(distinct concat(confirmed_backend, ' ran for ', backend), ', ')
    filter (confirmed_backend is distinct from backend) as others
from perf_samples where release_id = $release
"""


@fail_closed("baseline")
def judge(lake: Path, release_id: str, plan: Plan) -> list[Check]:
    """Judge perf_cells of this release, and that every sample behind them ran the backend it names."""
    limits = load_limits("baseline", plan.name)
    limits = limits.least(min_weight=plan.baseline.min_weight, min_blocks=plan.baseline.blocks)
    with Lake(lake, release_id=release_id) as tables:
        samples = tables.frame(_SAMPLES, release=release_id)
        num = int(samples.iloc[0]["num_samples"])
        notes = {
            "confirmed": Note(f"1 sample of {num}", num, str(samples.iloc[0]["others"])),
            "samples": Note(f"1 sample of {num}", num, "a time that no clock gives"),
        }
        checks = measured_rows(tables, release_id, limits, TABLES)
        checks += evaluate(load_suite("baseline_samples"), samples, limits, notes)
        checks += _machine_checks(tables, release_id, limits)
        groups = tables.rows(_GROUPS, release=release_id)
        for family, metric in dict.fromkeys((*REQUIRED, *groups)):
            frame = tables.frame(
                _FAMILY,
                release=release_id,
                family=family,
                metric=metric,
                cell_weight=limits.value("cell_weight"),
            )
            checks += _family_checks(family, metric, frame, limits)
        if plan.baseline.stress is not None:
            checks += stress.checks(tables, release_id, plan.baseline.stress, load_limits("stress", plan.name))
    return checks + history.checks(lake, release_id, load_limits("history", plan.name))


def _machine_checks(tables: Lake, release_id: str, limits: Limits) -> list[Check]:
    """What was lost on the way, and how still the machine was: the champion against itself."""
    outcomes = tables.frame(_OUTCOMES, release=release_id)
    num, losses = int(outcomes.iloc[0]["num_rows"]), str(outcomes.iloc[0]["losses"])
    suite = load_suite("baseline_outcomes")
    checks = evaluate(suite, outcomes, limits, {name: Note(f"1 of {num} rows", num, losses) for name in suite.checks})
    unpaired = tables.frame(_UNPAIRED, release=release_id)
    num_cells = int(unpaired.iloc[0]["num_cells"])
    note = Note(f"1 of {num_cells} cells", num_cells, str(unpaired.iloc[0]["unpaired"]))
    checks += evaluate(load_suite("baseline_paired"), unpaired, limits, {"paired": note})
    floor = tables.frame(_FLOOR, release=release_id)
    value = float(floor.iloc[0]["aa_floor"])
    note = Note(f"a difference of {statistics.percent(value)}", int(floor.iloc[0]["num_cells"]))
    return checks + evaluate(load_suite("baseline_floor"), floor, limits, {"aa_floor": note})


def _family_checks(family: str, metric: str, frame: pd.DataFrame, limits: Limits) -> list[Check]:
    row = frame.iloc[0]
    num = int(row["num_cells"])
    interval = statistics.Interval(*(float(row[name]) for name in ("ratio", "ratio_low", "ratio_high")))
    effect = statistics.detectable_ratio(interval)
    covered = f"{num} cells cover {statistics.percent(float(row['weight']))} of the work"
    slower = f"1 cell of {num}, +{statistics.percent(limits.value('cell_ratio') - 1)}"
    notes = {
        "blocks": Note(f"1 of {num} cells", num),
        "figures": Note(f"1 of {num} cells", num, "a ratio of two times, or a weight, that is not above zero"),
        "ratio": Note(statistics.effect_phrase(f"{family} {metric}", effect), num, covered),
        "worst_cell": Note(slower, num, str(row["slow_case"])),
        "ambiguous": Note("a cell whose interval crosses the margin", num),
    }
    prefix = f"{family}.{metric}."
    checks = evaluate(load_suite("baseline"), frame, limits, notes, prefix=prefix)
    if (family, metric) in REQUIRED:
        weight = {"weight": Note(f"1 of {num} cells", num, covered)}
        checks += evaluate(load_suite("baseline_weight"), frame, limits, weight, prefix=prefix)
    return checks
