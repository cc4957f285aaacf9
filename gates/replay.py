"""Gate of the replay stage: tensor, model and business layer in one report.

Tensor: errors against fp64 over the error that the dtype class itself makes, worst case of each class.
Model: teacher-forced, both sides on the same tokens, prefill scoring and forced decode apart. Business:
the golden set, paired by prompt (gates/business.py). Fewer cases or prompts than the plan implies, on either
side, or a case that the champion has and the candidate lacks, is a lost shard; a case with an `error` has no
figures: all are errors, never a smaller table that passes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from attention.cases import REPLAY_INPUTS, replay_shapes
from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.business import business_checks
from gates.evaluate import Note, evaluate, load_suite
from gates.fingerprint import measured_rows
from gates.thresholds import Limits, load_limits
from gates.verdict import Check, fail_closed

MODES = ("prefill", "decode")
TABLES = ("tensor_replay", "model_replay", "business_replay")

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

# The plan implies the least number of cases of each dtype class and side: one spec of the model, all shapes,
# inputs and seeds. bfloat16 is always replayed, the serving dtype beside it.
_PLANNED = """
with classes as (
  select distinct dtype_class from tensor_replay where release_id = $release union select 'bfloat16'
),
wanted as (select side, dtype_class from classes, (select unnest(['champion', 'candidate']) as side)),
found as (
  select side, dtype_class, count(distinct concat_ws('|', case_id, inputs, seed)) as num
  from tensor_replay where release_id = $release group by side, dtype_class
),
short as (
  select side, dtype_class, coalesce(num, 0) as num
  from wanted left join found using (side, dtype_class) where coalesce(num, 0) < $planned
)
select coalesce(sum($planned - num), 0)::double as num_absent,
  string_agg(concat(side, ' has ', num, ' of ', $planned, ' in ', dtype_class), ', '
    order by side, dtype_class) as named
from short
"""

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

_MODEL = """
select count(*) as num_positions, strict_avg(kl) as kl_mean,
  case when count(kl) = count(*) then quantile_cont(kl, 0.999) end as kl_p999,
  count(*) filter (next_token_equal is false) as num_flips,
  count(*) filter (next_token_equal is null) as num_unknown,
  -- 0 without a flip; null when a flip has no margin
  case when count(*) filter (next_token_equal is false and flip_margin is null) = 0
    then coalesce(max(flip_margin) filter (next_token_equal is false), 0) end as flip_margin,
  count(*) filter (confirmed_backend is distinct from backend) as num_other
from model_replay
where release_id = $release and side = 'candidate' and mode = $mode
"""

# The last position of a prompt has no next token and so no NLL; any other must have one.
_NLL = """
select case when count(*) - count(nll_candidate - nll_champion) <= 1
  then avg(nll_candidate - nll_champion) end
from model_replay
where release_id = $release and side = 'candidate' and mode = $mode group by prompt_id
"""


@fail_closed("replay")
def judge(lake: Path, release_id: str, plan: Plan, *, num_golden: int) -> list[Check]:
    """Judge tensor_replay, model_replay and business_replay of this release; `num_golden` prompts were planned."""
    limits = load_limits("replay", plan.name)
    with Lake(lake, release_id=release_id) as tables:
        return [
            *measured_rows(tables, release_id, limits, TABLES),
            *tensor_checks(tables, release_id, plan, limits),
            *model_checks(tables, release_id, plan, limits),
            *business_checks(tables, release_id, plan, limits, num_planned=num_golden),
        ]


def tensor_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits) -> list[Check]:
    """Evidence first, then the worst case of each dtype class, then the LSE."""
    replay = plan.replay
    planned = len(replay_shapes(replay.max_kv_len)) * len(REPLAY_INPUTS) * replay.seeds
    cases = tables.frame(_CASES, release=release_id)
    cases[["num_absent", "named"]] = tables.frame(_PLANNED, release=release_id, planned=planned)
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
    if int(row["num_lse"]):
        checks += _lse_checks(tables.frame(_LSE, release=release_id), limits)
    return checks


def _class_checks(dtype_class: str, frame: pd.DataFrame, limits: Limits, where: str) -> list[Check]:
    row, limits = frame.iloc[0], limits.of_class(dtype_class)
    num = int(row["num_rows"])
    notes = {"finite": Note(f"1 misplaced NaN or Inf in {num} cases", num)}
    for name, label in (("r_rms", "R_rms"), ("r_max", "R_max"), ("r_row", "R_row"), ("bias_z", "|bias z|")):
        phrase = statistics.headroom_phrase(label, float(row[name]), limits.value(name))
        notes[name] = Note(phrase, num, where)
    return evaluate(load_suite("replay_tensor"), frame, limits, notes, prefix=f"tensor.{dtype_class}.")


def _champion_checks(dtype_class: str, frame: pd.DataFrame, limits: Limits) -> list[Check]:
    """The champion's own ratios, for the reader to compare with; they never block."""
    num, limits = int(frame.iloc[0]["num_rows"]), limits.of_class(dtype_class)
    notes = {f"champion_{name}": Note("recorded, 1 row", num) for name in ("r_rms", "r_max", "r_row")}
    return evaluate(load_suite("replay_champion"), frame, limits, notes, prefix=f"tensor.{dtype_class}.")


def _lse_checks(frame: pd.DataFrame, limits: Limits) -> list[Check]:
    row = frame.iloc[0]
    phrase = statistics.headroom_phrase("LSE error", float(row["lse"]), limits.value("lse"))
    notes = {"lse": Note(phrase, int(row["num_rows"]))}
    return evaluate(load_suite("replay_lse"), frame, limits, notes, prefix="tensor.")


def model_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits) -> list[Check]:
    """Prefill scoring and forced decode apart: only the latter runs the decode kernel."""
    replay = plan.replay
    # Forced decode is one step a token, so a plan asks for fewer of them; half of those is the least.
    forced = replay.model_prompts * replay.decode_tokens // 2
    least = {"prefill": replay.min_positions, "decode": min(replay.min_positions, max(1, forced))}
    checks: list[Check] = []
    for mode in MODES:
        frame = tables.frame(_MODEL, release=release_id, mode=mode)
        differences = [value for (value,) in tables.rows(_NLL, release=release_id, mode=mode)]
        nll = statistics.mean_interval([math.nan if value is None else value for value in differences])
        frame["nll_value"], frame["nll_low"], frame["nll_high"] = nll.value, nll.low, nll.high
        with_least = limits.least(min_positions=least[mode])
        checks += _mode_checks(mode, frame, with_least, nll)
    return checks


def _mode_checks(mode: str, frame: pd.DataFrame, limits: Limits, nll: statistics.Interval) -> list[Check]:
    row = frame.iloc[0]
    num, num_flips = int(row["num_positions"]), int(row["num_flips"])
    flips = statistics.rate(num_flips, num)
    frame["flip_rate"], frame["flip_low"], frame["flip_high"] = flips.value, flips.low, flips.high
    if int(row["num_unknown"]):
        frame[["flip_rate", "flip_low", "flip_high"]] = math.nan

    def headroom(name: str, label: str) -> Note:
        return Note(statistics.headroom_phrase(label, float(row[name]), limits.value(name)), num)

    notes = {
        "positions": Note(f"1 position of {num}", num),
        "confirmed": Note(f"1 position of {num}", num),
        "kl_mean": headroom("kl_mean", "mean KL"),
        "kl_p999": headroom("kl_p999", "KL 99.9 %"),
        "flip_rate": Note(statistics.rate_phrase("flip rate", num_flips, num), num),
        "flip_margin": headroom("flip_margin", "flip margin"),
        "nll_difference": Note(f"NLL +{statistics.detectable_shift(nll):.2g} nats a token", num),
    }
    return evaluate(load_suite("replay_model"), frame, limits, notes, prefix=f"model.{mode}.")
