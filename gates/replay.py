"""Gate of the replay stage: tensor, model and business layer in one report.

Tensor: `gates.replay_tensor`. Model: `gates.replay_model`. Business: the golden set, paired by prompt. Fewer cases or
prompts than the plan implies, on either side, or a case that the champion has and the candidate lacks, is a lost shard;
a case with an `error` has no figures: all are errors, never a smaller table that passes.
"""

from __future__ import annotations

from pathlib import Path

from data.golden_set import load_golden
from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.fingerprint import measured_rows
from gates.replay_free import free_checks
from gates.replay_model import model_checks
from gates.replay_tensor import tensor_checks
from gates.thresholds import Limits, load_limits
from gates.verdict import Check, fail_closed

TABLES = ("tensor_replay", "model_replay", "business_replay")

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
            *free_checks(tables, release_id, limits),
        ]


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
