"""Model layer of the replay gate: both sides forced along the same tokens, prefill scoring and forced decode apart.

Three views of the same positions, each of which can fail alone:

- all of them, against limits that hold on every day;
- all of them, against a multiple of today's floor: the champion beside itself, executed a second sound way;
- by bucket (language, length of the prompt, position): a fault of one language or of long contexts drowns in the mean
  over all. Buckets with too few positions are named as not judged.

A floor smaller than the least that was ever seen between sound executions is raised to it: two runs of one backend may
agree to the last bit, and any multiple of that would fail the next sound kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.lake import Lake
from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import Limits
from gates.verdict import Check

if TYPE_CHECKING:
    import pandas as pd

MODES = ("prefill", "decode")
ALL = "all"
#: Figure -> the limit that says how small a floor is believed.
LEAST = {
    "kl_mean": "kl_mean_floor_least",
    "kl_p999": "kl_p999_floor_least",
    "flip_rate": "flip_rate_floor_least",
    "flip_margin": "flip_margin_floor_least",
}

_BUCKETS = """
with named as (
  select *, [
    'all',
    'language ' || coalesce(language, 'und'),
    'length ' || case when num_tokens <= 64 then 'to 64' when num_tokens <= 256 then 'to 256'
      when num_tokens <= 1024 then 'to 1024' when num_tokens <= 4096 then 'to 4096'
      when num_tokens is null then 'unknown' else 'above 4096' end,
    'position ' || case when position < 64 then 'below 64' when position < 256 then 'below 256'
      when position < 1024 then 'below 1024' when position < 4096 then 'below 4096' else 'from 4096' end
  ] as buckets
  from model_replay where release_id = $release and side = $side and mode = $mode
)
select bucket, count(*) as num_positions, count(distinct prompt_id) as num_prompts,
  strict_avg(kl) as kl_mean,
  case when count(kl) = count(*) then quantile_cont(kl, 0.999) end as kl_p999,
  avg(topk_overlap) as topk_overlap,
  count(*) filter (next_token_equal is false) as num_flips,
  count(*) filter (next_token_equal is null) as num_unknown,
  -- 0 without a flip; null when a flip has no margin
  case when count(*) filter (next_token_equal is false and flip_margin is null) = 0
    then coalesce(max(flip_margin) filter (next_token_equal is false), 0) end as flip_margin,
  count(*) filter (confirmed_backend is distinct from backend) as num_other,
  coalesce(min(dtype_class), 'unknown') as dtype_class
from (select *, unnest(buckets) as bucket from named) group by bucket
order by bucket <> 'all', bucket
"""

# The last position of a prompt has no next token and so no NLL; any other must have one.
_NLL = """
select case when count(*) - count(nll_candidate - nll_champion) <= 1
  then avg(nll_candidate - nll_champion) end
from model_replay
where release_id = $release and side = 'candidate' and mode = $mode group by prompt_id
"""

_DIVERGED = """
with firsts as (
  select prompt_id, min(position) filter (next_token_equal is false) - min(position) as tokens,
    arg_min(flip_margin, position) filter (next_token_equal is false) as margin
  from model_replay where release_id = $release and side = 'candidate' and mode = $mode group by prompt_id
)
select count(*), count(tokens), median(tokens), median(margin) from firsts
"""


@dataclass(frozen=True)
class Bucket:
    """Candidate beside champion over the positions of a mode that share something; the floor over the same ones.

    KL and margins in nats; None where there is no figure. `judged` is False where there are too few positions.
    """

    mode: str
    bucket: str
    positions: int
    prompts: int
    kl_mean: float | None
    kl_p999: float | None
    topk_overlap: float | None
    flips: int
    flip_margin: float | None
    floor_kl_mean: float | None
    judged: bool


@dataclass(frozen=True)
class Divergence:
    """Prompts of a mode whose most likely next token differs somewhere: after how many tokens, at which margin."""

    mode: str
    prompts: int
    diverged: int
    median_tokens: float | None
    median_margin: float | None


def model_checks(tables: Lake, release_id: str, plan: Plan, limits: Limits) -> list[Check]:
    """Prefill scoring and forced decode apart: only the latter runs the decode kernel."""
    replay = plan.replay
    # Forced decode is one step a token, so a plan asks for fewer of them; half of those is the least.
    forced = replay.model_prompts * replay.decode_tokens // 2
    least = {"prefill": replay.min_positions, "decode": min(replay.min_positions, max(1, forced))}
    checks: list[Check] = []
    for mode in MODES:
        candidate, floor = (_frame(tables, release_id, mode, side) for side in ("candidate", "champion"))
        mine = limits.least(min_positions=least[mode])
        if not candidate.empty:
            mine = mine.of_class(str(candidate.iloc[0]["dtype_class"]))
        differences = [value for (value,) in tables.rows(_NLL, release=release_id, mode=mode)]
        nll = statistics.mean_interval([math.nan if value is None else value for value in differences])
        checks += _whole_checks(mode, candidate[candidate["bucket"] == ALL].copy(), mine, nll)
        checks += _floor_checks(mode, _beside(candidate, floor, mine), mine)
    return checks


def buckets(tables: Lake, release_id: str, limits: Limits) -> tuple[Bucket, ...]:
    """Every bucket of both modes, all positions first; for reports."""
    found = []
    for mode in MODES:
        candidate, floor = (_frame(tables, release_id, mode, side) for side in ("candidate", "champion"))
        floors = dict(zip(floor["bucket"], floor["kl_mean"], strict=True))
        for row in candidate.to_dict("records"):
            found.append(
                Bucket(
                    mode=mode,
                    bucket=str(row["bucket"]),
                    positions=int(row["num_positions"]),
                    prompts=int(row["num_prompts"]),
                    kl_mean=_figure(row["kl_mean"]),
                    kl_p999=_figure(row["kl_p999"]),
                    topk_overlap=_figure(row["topk_overlap"]),
                    flips=int(row["num_flips"]),
                    flip_margin=_figure(row["flip_margin"]),
                    floor_kl_mean=_figure(floors.get(row["bucket"])),
                    judged=row["bucket"] == ALL or int(row["num_positions"]) >= limits.value("bucket_positions"),
                )
            )
    return tuple(found)


def divergences(tables: Lake, release_id: str) -> tuple[Divergence, ...]:
    """Where the two sides first part, by mode; for reports."""
    found = []
    for mode in MODES:
        [(num, diverged, tokens, margin)] = tables.rows(_DIVERGED, release=release_id, mode=mode)
        if num:
            found.append(Divergence(mode, int(num), int(diverged), _figure(tokens), _figure(margin)))
    return tuple(found)


def _figure(value: float | None) -> float | None:
    """None for null and NaN."""
    return None if value is None or math.isnan(value) else float(value)


def _frame(tables: Lake, release_id: str, mode: str, side: str) -> pd.DataFrame:
    """One row a bucket, with the interval of its flip rate."""
    frame = tables.frame(_BUCKETS, release=release_id, mode=mode, side=side)
    rates = [
        statistics.rate(int(flips), int(num)) if not unknown else statistics.Interval(math.nan, math.nan, math.nan)
        for flips, num, unknown in zip(frame["num_flips"], frame["num_positions"], frame["num_unknown"], strict=True)
    ]
    for name, values in (
        ("flip_rate", [one.value for one in rates]),
        ("flip_low", [one.low for one in rates]),
        ("flip_high", [one.high for one in rates]),
    ):
        frame[name] = [float(value) for value in values]
    return frame


def _whole_checks(mode: str, frame: pd.DataFrame, limits: Limits, nll: statistics.Interval) -> list[Check]:
    """All positions of a mode against limits that no floor moves."""
    suite = load_suite("replay_model")
    if frame.empty:
        return evaluate(suite, frame, limits, {}, prefix=f"model.{mode}.")
    frame["nll_value"], frame["nll_low"], frame["nll_high"] = nll.value, nll.low, nll.high
    row = frame.iloc[0]
    num, num_flips = int(row["num_positions"]), int(row["num_flips"])

    def headroom(name: str, label: str) -> Note:
        return Note(statistics.headroom_phrase(label, float(row[name]), limits.value(name)), num)

    notes = {
        "positions": Note(f"1 position of {num}", num),
        "confirmed": Note(f"1 position of {num}", num),
        "kl_mean": headroom("kl_mean", "mean KL"),
        "kl_p999": headroom("kl_p999", "KL 99.9 %"),
        "topk_overlap": Note("1 token of ten", num),
        "flip_rate": Note(statistics.rate_phrase("flip rate", num_flips, num), num),
        "flip_margin": headroom("flip_margin", "flip margin"),
        "nll_difference": Note(f"NLL +{statistics.detectable_shift(nll):.2g} nats a token", num),
    }
    return evaluate(suite, frame, limits, notes, prefix=f"model.{mode}.")


def _beside(candidate: pd.DataFrame, floor: pd.DataFrame, limits: Limits) -> pd.DataFrame:
    """Candidate's buckets with `<figure>_times`: how many times the floor of the same bucket they are.

    A bucket's floor is at least that of all positions: few positions may show a small floor by chance.
    """
    if candidate.empty or floor.empty:
        return candidate.iloc[:0].copy()
    whole = floor[floor["bucket"] == ALL].iloc[0]
    both = candidate.merge(floor, on="bucket", how="left", suffixes=("", "_of_floor"))
    for name, bound_below in LEAST.items():
        least = limits.value(bound_below)
        own = both[f"{name}_of_floor"].astype(float)
        # A floor with a NaN of its own is no floor: what is measured in it is NaN, and so an error.
        bound = own.where(own.isna(), own.clip(lower=max(least, float(whole[name]))))
        shown = both["flip_low"] if name == "flip_rate" else both[name].astype(float)
        both[f"{name}_floor"] = bound
        both[f"{name}_times"] = shown / bound
    both["num_unmatched"] = (both["num_positions"] - both["num_positions_of_floor"].fillna(0)).abs()
    return both


def _floor_checks(mode: str, both: pd.DataFrame, limits: Limits) -> list[Check]:
    """All positions, then each bucket, as multiples of their floor."""
    whole = both[both["bucket"] == ALL]
    checks = evaluate(load_suite("replay_floor"), whole, limits, _floor_notes(whole, limits), prefix=f"model.{mode}.")
    parts = both[both["bucket"] != ALL]
    is_judged = parts["num_positions"] >= limits.value("bucket_positions")
    judged, left_out = parts[is_judged], parts[~is_judged]
    if not both.empty and judged.empty:
        return checks  # the whole is small: it is its only bucket
    notes = _bucket_notes(judged, left_out, limits) if not judged.empty else {}
    return checks + evaluate(load_suite("replay_buckets"), judged, limits, notes, prefix=f"model.{mode}.bucket.")


def _floor_notes(whole: pd.DataFrame, limits: Limits) -> dict[str, Note]:
    if whole.empty:
        return {}
    row = whole.iloc[0]
    num = int(row["num_positions"])
    notes = {"floor_positions": Note(f"1 position of {num}", num, "positions that only one of candidate and floor has")}
    for name, label in (
        ("kl_mean", "mean KL"),
        ("kl_p999", "KL 99.9 %"),
        ("flip_rate", "flip rate"),
        ("flip_margin", "flip margin"),
    ):
        bound = float(row[f"{name}_floor"])
        allowed = limits.value(f"{name}_floor_ratio") * bound
        notes[f"{name}_times"] = Note(f"{label} {allowed:.2g}", num, f"the floor is {bound:.3g}")
    return notes


def _bucket_notes(judged: pd.DataFrame, left_out: pd.DataFrame, limits: Limits) -> dict[str, Note]:
    num = int(judged["num_positions"].min())
    skipped = [f"{name} ({n})" for name, n in zip(left_out["bucket"], left_out["num_positions"], strict=True)]
    aside = f"; not judged: {', '.join(skipped)}" if skipped else ""
    notes = {}
    for name, label in (("kl_mean", "mean KL"), ("flip_rate", "flip rate")):
        limit = limits.value(f"{name}_floor_ratio")
        most = float((limit * judged[f"{name}_floor"]).max())
        worst = _worst(judged, f"{name}_times")
        notes[f"{name}_times"] = Note(f"{label} {most:.2g} in {len(judged)} buckets{aside}", num, f"worst: {worst}")
    phrase = statistics.headroom_phrase("mean KL", float(judged["kl_mean"].max()), limits.value("kl_mean"))
    notes["kl_mean"] = Note(f"{phrase}{aside}", num, f"worst: {_worst(judged, 'kl_mean')}")
    return notes


def _worst(judged: pd.DataFrame, figure: str) -> str:
    """The bucket with the largest figure; one that has none is the worst."""
    values = [math.inf if math.isnan(value) else value for value in judged[figure].astype(float)]
    return str(judged["bucket"].iloc[values.index(max(values))])
