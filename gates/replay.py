"""Gate of the replay stage: tensor, model and business layer in one report.

Tensor: `gates.replay_tensor`. Model: teacher-forced, both sides on the same tokens, prefill scoring and forced decode
apart. Business: the golden set, paired by prompt. Fewer cases or prompts than the plan implies, on either side, or a
case that the champion has and the candidate lacks, is a lost shard; a case with an `error` has no figures: all are
errors, never a smaller table that passes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from data.golden_set import load_golden
from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.fingerprint import measured_rows
from gates.replay_tensor import tensor_checks
from gates.thresholds import Limits, load_limits
from gates.verdict import Check, fail_closed

MODES = ("prefill", "decode")
TABLES = ("tensor_replay", "model_replay", "business_replay")

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

_GOLDEN = """
with graded as (
  select prompt_id, side, bool_and(passed) as passed,
    count(*) filter (error is not null or passed is null) as errors,
    count(*) filter (error is null and confirmed_backend is distinct from backend) as other
  from business_replay where release_id = $release group by prompt_id, side
),
champion as (select * from graded where side = 'champion'),
candidate as (select * from graded where side = 'candidate')
select count(candidate.prompt_id) as num_pairs,
  count(*) filter (champion.passed) as champion_passes,
  count(*) filter (candidate.passed) as candidate_passes,
  count(*) filter (champion.passed and not candidate.passed) as num_lost,
  count(*) filter (candidate.passed and not champion.passed) as num_won,
  coalesce(sum(champion.errors), 0) + coalesce(sum(candidate.errors), 0) as num_errors,
  count(*) filter (candidate.prompt_id is null) as num_missing,
  coalesce(sum(candidate.other), 0) as num_other,
  string_agg(champion.prompt_id, ', ') filter (champion.passed and not candidate.passed) as lost
from champion left join candidate using (prompt_id)
"""


@fail_closed("replay")
def judge(lake: Path, release_id: str, plan: Plan) -> list[Check]:
    """Judge tensor_replay, model_replay and business_replay of this release."""
    limits = load_limits("replay", plan.name)
    with Lake(lake, release_id=release_id) as tables:
        return [
            *measured_rows(tables, release_id, limits, TABLES),
            *tensor_checks(tables, release_id, plan, limits),
            *model_checks(tables, release_id, plan, limits),
            *business_checks(tables, release_id, plan, limits),
        ]


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


def business_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits) -> list[Check]:
    """Paired by prompt. The paired test asks whether the candidate is worse; the flip rate, whether it
    is different, which as many won as lost would hide. A prompt graded twice passed if it always did."""
    frame = tables.frame(_GOLDEN, release=release_id)
    row = frame.iloc[0]
    num, lost, won = (int(row[name]) for name in ("num_pairs", "num_lost", "num_won"))
    flips = statistics.rate(lost + won, num)
    frame["mcnemar_p"] = statistics.mcnemar_p(lost, won)
    frame["flip_rate"], frame["flip_low"], frame["flip_high"] = flips.value, flips.low, flips.high
    needed = statistics.mcnemar_detectable(won, limits.value("mcnemar_p"))
    worse = f"{needed} prompts lost of {num}"
    if num:
        worse += f" ({statistics.percent(needed / num)})"
    names, one = f"lost: {row['lost']}" if lost else "", f"1 prompt of {num}"
    notes = {
        "champion_passes": Note(one, num, f"champion passed {row['champion_passes']} of {num}"),
        "planned_prompts": Note(one, num, f"{num} pairs of prompts"),
        "errors": Note(one, num, "prompts without a grade"),
        "lost_prompts": Note(one, num, "prompts that only the champion answered"),
        "confirmed": Note(one, num),
        "mcnemar_p": Note(worse, num, names),
        "flip_rate": Note(statistics.rate_phrase("flip rate", lost + won, num), num, names),
    }
    known, asked = len(load_golden().prompts), plan.replay.golden_prompts
    planned = known if asked is None else min(asked, known)
    limits = limits.least(min_golden_passes=plan.replay.min_golden_passes, planned_prompts=planned)
    return evaluate(load_suite("replay_business"), frame, limits, notes, prefix="business.")
