"""The business layer of the replay gate: answers to the golden set, paired by prompt.

Three questions. Did the champion pass enough prompts for a loss to be seen? Is the candidate worse (exact
McNemar)? Is it different (flip rate, which as many won as lost would hide from the paired test)? They are asked
of the whole set, and of each category where the plan states `min_category_passes`; the error rate of the
category tests is shared out among them (Bonferroni). A prompt graded twice passed if it always did.
"""

from __future__ import annotations

import pandas as pd

from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import Limits
from gates.verdict import Check

_GOLDEN = """
with graded as (
  select prompt_id, side, any_value(category) as category, bool_and(passed) as passed,
    count(*) filter (error is not null or passed is null) as errors,
    count(*) filter (error is null and confirmed_backend is distinct from backend) as other
  from business_replay where release_id = $release group by prompt_id, side
),
champion as (select * from graded where side = 'champion'),
candidate as (select * from graded where side = 'candidate')
select champion.category, grouping(champion.category) = 1 as whole,
  count(candidate.prompt_id) as num_pairs,
  count(*) filter (champion.passed) as champion_passes,
  count(*) filter (champion.passed and not candidate.passed) as num_lost,
  count(*) filter (candidate.passed and not champion.passed) as num_won,
  coalesce(sum(champion.errors), 0) + coalesce(sum(candidate.errors), 0) as num_errors,
  count(*) filter (candidate.prompt_id is null) as num_missing,
  coalesce(sum(candidate.other), 0) as num_other,
  string_agg(champion.prompt_id, ', ' order by champion.prompt_id)
    filter (champion.passed and not candidate.passed) as lost
from champion left join candidate using (prompt_id)
group by grouping sets ((), (champion.category)) order by champion.category
"""


def business_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits, *, num_planned: int) -> list[Check]:
    """Judge the whole set, then each category; `num_planned` prompts were drawn for this release."""
    replay = plan.replay
    frame = tables.frame(_GOLDEN, release=release_id)
    of_set = limits.least(min_golden_passes=replay.min_golden_passes, planned_prompts=num_planned)
    checks = _checks("replay_business", frame[frame["whole"]].copy(), of_set, prefix="business.")
    if replay.min_category_passes is None:
        return checks
    categories = frame[~frame["whole"]]
    of_category = limits.least(min_category_passes=replay.min_category_passes)
    for name in categories["category"]:
        mine = categories[categories["category"] == name].copy()
        prefix = f"business.{name}."
        checks += _checks("replay_category", mine, of_category, prefix=prefix, num_tests=len(categories))
    return checks


def _checks(suite: str, frame: pd.DataFrame, limits: Limits, *, prefix: str, num_tests: int = 1) -> list[Check]:
    """The suite over one row, each test at its share of the error rate."""
    row = frame.iloc[0]
    num, lost, won, passes = (int(row[name]) for name in ("num_pairs", "num_lost", "num_won", "champion_passes"))
    alpha = (1 - statistics.CONFIDENCE) / num_tests
    needed = statistics.mcnemar_detectable(won, limits.value("mcnemar_p") / num_tests)
    flips = statistics.rate(lost + won, num, 1 - alpha)
    frame["mcnemar_p"] = min(1.0, num_tests * statistics.mcnemar_p(lost, won))
    frame["flip_rate"], frame["flip_low"], frame["flip_high"] = flips.value, flips.low, flips.high
    # Only what the champion passes can be lost.
    frame["num_lacking"] = max(0, needed - passes)
    worse = f"{needed} prompts lost of {num}" + (f" ({statistics.percent(needed / num)})" if num else "")
    names, one = f"lost: {str(row['lost'])[:300]}" if lost else "", f"1 prompt of {num}"
    notes = {
        "champion_passes": Note(one, num, f"champion passed {passes} of {num}; {needed} lost would show"),
        "planned_prompts": Note(one, num, f"{num} pairs of prompts"),
        "errors": Note(one, num, "prompts without a grade"),
        "lost_prompts": Note(one, num, "prompts that only the champion answered"),
        "confirmed": Note(one, num),
        "mcnemar_p": Note(worse, num, names),
        "flip_rate": Note(statistics.rate_phrase("flip rate", lost + won, num, 1 - alpha), num, names),
    }
    return evaluate(load_suite(suite), frame, limits, notes, prefix=prefix)
