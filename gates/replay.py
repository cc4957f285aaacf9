"""Gate of the replay stage: tensor, model and business layer in one report.

Tensor: `gates.replay_tensor`. Model: teacher-forced, both sides on the same tokens, prefill scoring and forced decode
apart. Business: the golden set, paired by prompt, `gates.business`. Fewer cases or prompts than the plan implies, on
either side, or a case that the champion has and the candidate lacks, is a lost shard; a case with an `error` has no
figures: all are errors, never a smaller table that passes.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.business import business_checks
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
