"""Gate of the shadow stage: the candidate on copies of real requests, whose replies nobody waits for.

Every instance records its own requests; a shadow is paired with the champion's primary by request id.
Two sound backends part at ties, so outputs may differ: what is judged is how often, per pair and per
token up to the point of parting. Proxies drop copies when the shadow is slow, so the gate also asks
whether the mirror copied at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from data.plan import Plan
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.served import (
    CANDIDATE_SHADOW,
    CHAMPION,
    Span,
    arm,
    candidate_figures,
    candidate_notes,
    rows_of,
    served_rows,
)
from gates.thresholds import load_limits
from gates.verdict import Check, fail_closed

_COLUMNS = "request_id, ok, fault, token_ids, time"


@dataclass(frozen=True)
class Pairs:
    """Shadows beside their primaries."""

    num_pairs: int
    num_faults: int  # the primary was answered, the shadow was not
    num_compared: int  # both answered
    num_untold: int  # answered without token ids
    num_diverged: int
    num_tokens: int  # compared up to the first difference
    first_divergence: float  # median token index (from 1) where pairs part; tokens of the longest if none do


@fail_closed("shadow")
def judge(lake: Path, release_id: str, plan: Plan, *, span: Span, overflow: int = 0) -> list[Check]:
    """Judge the shadows inside `span`; `overflow` copies were dropped by the router on purpose."""
    limits = load_limits("shadow", plan.name).least(min_pairs=plan.shadow.min_pairs)
    with served_rows(lake, release_id, span) as tables:
        shadows = arm(tables, release_id, CANDIDATE_SHADOW)
        primaries = arm(tables, release_id, CHAMPION)
        pairs = _compare(
            rows_of(tables, release_id, CHAMPION, _COLUMNS),
            rows_of(tables, release_id, CANDIDATE_SHADOW, _COLUMNS),
        )
    parted = statistics.rate(pairs.num_diverged, pairs.num_compared)
    per_token = statistics.rate(pairs.num_diverged, pairs.num_tokens)
    if pairs.num_untold:
        parted = per_token = statistics.Interval(math.nan, math.nan, math.nan)
    due = plan.shadow.fraction * primaries.num_requests
    figures = candidate_figures(shadows) | {
        "num_pairs": pairs.num_pairs,
        "mirrored_share": (shadows.num_requests + overflow) / due if due else math.nan,
        "faults": pairs.num_faults,
        "primary_extra_ids": max(0, primaries.num_ids - 1),
        "divergence_share": parted.value,
        "divergence_share_low": parted.low,
        "divergence_share_high": parted.high,
        "divergence_rate": per_token.value,
        "divergence_rate_low": per_token.low,
        "divergence_rate_high": per_token.high,
        "first_divergence": pairs.first_divergence,
    }
    one = f"1 pair of {pairs.num_pairs}"
    copied = f"{shadows.num_requests} shadows and {overflow} dropped of {primaries.num_requests} primaries"
    notes = candidate_notes(shadows) | {
        "pairs": Note(one, pairs.num_pairs),
        "mirrored": Note(f"1 copy of {primaries.num_requests}", primaries.num_requests, copied),
        "faults": Note(one, pairs.num_pairs, shadows.errors),
        "primary_fingerprint": Note(one, primaries.num_requests, "the champion's environment changed"),
        "divergence_share": Note(
            statistics.rate_phrase("outputs that part", pairs.num_diverged, pairs.num_compared),
            pairs.num_compared,
        ),
        "divergence_rate": Note(
            statistics.rate_phrase("tokens that part", pairs.num_diverged, pairs.num_tokens),
            pairs.num_tokens,
        ),
        "first_divergence": Note("1 token", pairs.num_compared),
    }
    return evaluate(load_suite("shadow"), pd.DataFrame([figures]), limits, notes)


def _compare(primaries: pd.DataFrame, shadows: pd.DataFrame) -> Pairs:
    """Pair by request id; of a request that was recorded twice, the later row."""
    latest = [frame.drop_duplicates("request_id", keep="last") for frame in (primaries, shadows)]
    both = latest[0].merge(latest[1], on="request_id", suffixes=("_primary", "_shadow"))
    answered = both[both["ok_primary"] & both["ok_shadow"]]
    told = answered.dropna(subset=["token_ids_primary", "token_ids_shadow"])
    partings: list[int] = []
    num_tokens = longest = 0
    for left, right in zip(told["token_ids_primary"], told["token_ids_shadow"], strict=True):
        compared, diverged = _until_parting(list(left), list(right))
        num_tokens, longest = num_tokens + compared, max(longest, compared)
        if diverged:
            partings.append(compared)
    return Pairs(
        num_pairs=len(both),
        num_faults=int((both["ok_primary"] & both["fault_shadow"]).sum()),
        num_compared=len(answered),
        num_untold=len(answered) - len(told),
        num_diverged=len(partings),
        num_tokens=num_tokens,
        first_divergence=float(pd.Series(partings).median()) if partings else float(longest),
    )


def _until_parting(left: list[int], right: list[int]) -> tuple[int, bool]:
    """Tokens compared, the differing one included, and whether there was one (a shorter output differs
    where it ends)."""
    for index in range(max(len(left), len(right))):
        if left[index : index + 1] != right[index : index + 1]:
            return index + 1, True
    return len(left), False
