"""Tensor layer of the replay gate: errors against fp64 over the error that the dtype class itself makes.

Judged is the worst case of each class, and each case beside the champion's own error where both are of one class. Over
quantised KV the ratios are the kernel's part; what quantisation costs is recorded beside them and gates nothing.
"""

from __future__ import annotations

import pandas as pd
from pydantic import BaseModel, ConfigDict

from attention.cases import AttentionCase, Inputs, replay_shapes
from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import Limits
from gates.verdict import Check

_CASES = """
with cases as (
  select *, concat_ws('|', case_id, inputs, seed) as measured
  from tensor_replay where release_id = $release
),
mine as (select * from cases where side = 'candidate')
select count(distinct measured) filter (error is null) as num_cases,
  count(*) filter (error is not null) as num_errors,
  count(*) filter (error is null and confirmed_backend is distinct from backend) as num_other,
  (select count(distinct measured) from cases
   where side = 'champion' and measured not in (select measured from mine)) as num_lost,
  string_agg(distinct concat(backend, ' on ', case_id, ': ', error), '; ')
    filter (error is not null) as errors,
  string_agg(distinct confirmed_backend, ', ') as confirmed,
  count(lse_max_abs) as num_lse
from mine
"""

# The plan implies the least number of each kind of inputs, dtype class and side: one spec of the model, all shapes and
# seeds. Inputs at the window's edge are planned where some case has a window; a shape that is shorter has no edge.
# bfloat16 is always replayed, the serving dtype beside it.
_PLANNED = """
with classes as (
  select distinct dtype_class from tensor_replay where release_id = $release union select 'bfloat16'
),
wanted as (
  select side, dtype_class, inputs, planned
  from classes, (select unnest(['champion', 'candidate']) as side),
    (select unnest($inputs) as inputs, unnest($planned) as planned)
),
found as (
  select side, dtype_class, inputs, count(distinct concat_ws('|', case_id, seed)) as num
  from tensor_replay where release_id = $release group by side, dtype_class, inputs
),
short as (
  select side, dtype_class, inputs, planned, coalesce(num, 0) as num
  from wanted left join found using (side, dtype_class, inputs) where coalesce(num, 0) < planned
)
select coalesce(sum(planned - num), 0)::double as num_absent,
  string_agg(concat(side, ' has ', num, ' of ', planned, ' ', inputs, ' in ', dtype_class), ', '
    order by side, dtype_class, inputs) as named
from short
"""

_WINDOWED = "select distinct case_json from tensor_replay where release_id = $release and case_json is not null"

_CLASSES = """
select dtype_class, count(*) as num_rows,
  count(*) filter (finite_mask_equal is not true) as num_masks,
  strict_max(r_rms) as r_rms, strict_max(r_max) as r_max, strict_max(r_row) as r_row,
  coalesce(max(abs(bias_z)) filter (isfinite(bias_z)), 0) as bias_z  -- recorded only
from tensor_replay
where release_id = $release and side = $side and error is null
group by dtype_class order by dtype_class
"""

# A backend that never gives an LSE has none to judge; one that gives it sometimes lost some.
_LSE = """
with mine as (
  select * from tensor_replay where release_id = $release and side = 'candidate' and error is null
),
giving as (select backend from mine group by backend having count(lse_max_abs) > 0)
select strict_max(lse_max_abs) as lse, count(*)::double as num_rows
from mine where backend in (select backend from giving)
"""

_WORST = """
select arg_max(concat(backend, ' on ', case_id, ' (', inputs, ', seed ', seed, ')'), r_rms)
from tensor_replay
where release_id = $release and side = 'candidate' and error is null and dtype_class = $dtype_class
"""

# A case of both sides in one row. Its id holds the dtype, so both are of one class; a candidate that is served in
# another dtype than the champion has no champion beside it and is judged by its own ratios alone.
_BESIDE = """
with mine as (select * from tensor_replay where release_id = $release and side = 'candidate' and error is null),
theirs as (select * from tensor_replay where release_id = $release and side = 'champion' and error is null),
pairs as (
  select mine.*, theirs.case_id is not null as has_champion, theirs.backend as champion_backend,
    theirs.r_rms as champion_r_rms, theirs.r_max as champion_r_max, theirs.r_row as champion_r_row,
    -- Below 1 the champion's error is its rounding. A side without a figure has no quotient: greatest() skips nulls.
    case when theirs.r_rms is not null then mine.r_rms / greatest(theirs.r_rms, 1) end as times_champion
  from mine left join theirs using (case_id, inputs, seed, dtype_class)
)
"""

# A worst case scatters, so its limit is wide; the root mean square over all cases hardly does, so that it sees rounding
# that is a little worse everywhere, as of a bf16 accumulator over few keys.
_TIMES = (
    _BESIDE
    + """
select strict_max(times_champion) as times_champion, count(*) as num_pairs,
  sqrt(strict_avg(r_rms * r_rms)) / sqrt(strict_avg(champion_r_rms * champion_r_rms)) as pooled_times_champion,
  arg_max(concat(case_id, ' (', inputs, ', seed ', seed, '): ', round(r_rms, 3), ' on ', backend, ', champion ',
    round(champion_r_rms, 3), ' on ', champion_backend), times_champion) as named
from pairs where has_champion and dtype_class = $dtype_class
"""
)

_WORST_BESIDE = (
    _BESIDE
    + """
select case_id, inputs, any_value(backend), any_value(champion_backend), max(r_rms), max(champion_r_rms), max(r_max),
  max(champion_r_max), max(r_row), max(champion_r_row), max(quantisation_r_rms), arg_max(worst_row_at, r_row)
from pairs group by case_id, inputs, dtype_class
order by max(times_champion) desc nulls last, max(r_rms) desc nulls first, case_id, inputs limit $num
"""
)


def tensor_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits) -> list[Check]:
    """Evidence first, then the worst case of each dtype class, then the LSE."""
    replay = plan.replay
    cases = tables.frame(_CASES, release=release_id)
    planned = _planned(tables, release_id, plan)
    cases[["num_absent", "named"]] = tables.frame(
        _PLANNED, release=release_id, inputs=list(planned), planned=list(planned.values())
    )
    row = cases.iloc[0]
    num_cases = int(row["num_cases"])
    one = f"1 case of {num_cases}"
    notes = {
        "cases": Note(one, num_cases, f"{num_cases} distinct cases"),
        "planned_cases": Note(one, num_cases, str(row["named"])),
        "errors": Note(one, num_cases + int(row["num_errors"]), str(row["errors"])[:300]),
        "lost_cases": Note(one, num_cases, "cases that the champion has and the candidate lacks"),
        "confirmed": Note(one, num_cases, f"ran {row['confirmed']}"),
    }
    limits = limits.least(min_cases=replay.min_cases)
    checks = evaluate(load_suite("replay_cases"), cases, limits, notes, prefix="tensor.")
    classes = tables.frame(_CLASSES, release=release_id, side="candidate")
    champion = tables.frame(_CLASSES, release=release_id, side="champion")
    if classes.empty:
        checks += evaluate(load_suite("replay_tensor"), classes, limits, {}, prefix="tensor.")
    for dtype_class in classes["dtype_class"]:
        mine = classes[classes["dtype_class"] == dtype_class]
        [(where,)] = tables.rows(_WORST, release=release_id, dtype_class=dtype_class)
        checks += _class_checks(dtype_class, mine, limits, f"worst: {where}")
        theirs = champion[champion["dtype_class"] == dtype_class]
        if not theirs.empty:
            checks += _champion_checks(dtype_class, theirs, limits)
            checks += _beside_checks(tables, release_id, dtype_class, limits)
    if int(row["num_lse"]):
        checks += _lse_checks(tables.frame(_LSE, release=release_id), limits)
    return checks


def _planned(tables: Lake, release_id: str, plan: Plan) -> dict[Inputs, int]:
    """How many cases the plan implies of each kind of inputs, a side and dtype class."""
    shapes = replay_shapes(plan.replay.max_kv_len)
    windowed = {
        (case.phase, case.batch)
        for (text,) in tables.rows(_WINDOWED, release=release_id)
        if (case := AttentionCase.model_validate_json(text)).windowed
    }
    num = {inputs: len(shapes) for inputs in plan.replay.inputs}
    if "window_edge" in num:
        num["window_edge"] = sum(shape in windowed for shape in shapes)
    each = plan.replay.seeds * len(plan.replay.kv_dtypes)
    return {inputs: count * each for inputs, count in num.items()}


def _class_checks(dtype_class: str, frame: pd.DataFrame, limits: Limits, where: str) -> list[Check]:
    row, limits = frame.iloc[0], limits.of_class(dtype_class)
    num = int(row["num_rows"])
    notes = {"finite": Note(f"1 misplaced NaN or Inf in {num} cases", num)}
    for name, label in (("r_rms", "R_rms"), ("r_max", "R_max"), ("r_row", "R_row"), ("bias_z", "|bias z|")):
        phrase = statistics.headroom_phrase(label, float(row[name]), limits.value(name))
        notes[name] = Note(phrase, num, where)
    return evaluate(load_suite("replay_tensor"), frame, limits, notes, prefix=f"tensor.{dtype_class}.")


def _champion_checks(dtype_class: str, frame: pd.DataFrame, limits: Limits) -> list[Check]:
    """The champion's own worst ratios, for the reader to compare with; they never block."""
    num, limits = int(frame.iloc[0]["num_rows"]), limits.of_class(dtype_class)
    notes = {f"champion_{name}": Note("1 row", num) for name in ("r_rms", "r_max", "r_row")}
    return evaluate(load_suite("replay_champion"), frame, limits, notes, prefix=f"tensor.{dtype_class}.")


def _beside_checks(tables: Lake, release_id: str, dtype_class: str, limits: Limits) -> list[Check]:
    """The candidate's error over the champion's, case by case; only where both are of one dtype class."""
    frame = tables.frame(_TIMES, release=release_id, dtype_class=dtype_class)
    row, limits = frame.iloc[0], limits.of_class(dtype_class)
    num, notes = int(row["num_pairs"]), {}
    for name, label in (
        ("times_champion", "R_rms over the champion's"),
        ("pooled_times_champion", "R_rms over the champion's, all cases"),
    ):
        phrase = statistics.headroom_phrase(label, float(row[name]), limits.value(name))
        notes[name] = Note(phrase, num, f"worst: {row['named']}")
    return evaluate(load_suite("replay_beside"), frame, limits, notes, prefix=f"tensor.{dtype_class}.")


class Beside(BaseModel):
    """Both sides of a case and kind of inputs, the worst seed of either; None where no champion's row is beside it."""

    model_config = ConfigDict(frozen=True)

    case_id: str
    inputs: str
    backend: str
    champion_backend: str | None
    r_rms: float | None
    champion_r_rms: float | None
    r_max: float | None
    champion_r_max: float | None
    r_row: float | None
    champion_r_row: float | None
    quantisation_r_rms: float | None
    worst_row_at: str | None


def beside(tables: Lake, release_id: str, num: int) -> tuple[Beside, ...]:
    """The `num` cases whose error is largest over the champion's, worst first."""
    rows = tables.rows(_WORST_BESIDE, release=release_id, num=num)
    return tuple(Beside.model_validate(dict(zip(Beside.model_fields, row, strict=True))) for row in rows)


def _lse_checks(frame: pd.DataFrame, limits: Limits) -> list[Check]:
    row = frame.iloc[0]
    phrase = statistics.headroom_phrase("LSE error", float(row["lse"]), limits.value("lse"))
    notes = {"lse": Note(phrase, int(row["num_rows"]))}
    return evaluate(load_suite("replay_lse"), frame, limits, notes, prefix="tensor.")
