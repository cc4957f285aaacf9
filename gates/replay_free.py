"""Free-running greedy answers of both sides, paired by prompt: recorded figures beside the graders' verdicts.

One tie that falls the other way changes every token after it, so sound backends part as often as faulty ones do (of
eight prompts of 48 tokens four parted for two sound backends, and four for a scale 1 % off). These figures describe
what users would see change; teacher-forced replay judges the numbers.
"""

from __future__ import annotations

import statistics as stdlib
from itertools import takewhile

from data.lake import Lake
from gates import statistics
from gates.evaluate import Note, evaluate, load_suite
from gates.thresholds import Limits
from gates.verdict import Check

_ANSWERS = """
with answers as (
  select prompt_id, side, output_tokens from business_replay
  where release_id = $release and error is null and output_tokens is not null
  qualify row_number() over (partition by prompt_id, side order by time desc) = 1
)
select one.output_tokens, other.output_tokens from answers one join answers other using (prompt_id)
where one.side = 'champion' and other.side = 'candidate' order by prompt_id
"""


def free_checks(tables: Lake, release_id: str, limits: Limits) -> list[Check]:
    """Share of answers that part, the share of an answer before that, and how the lengths change. They never block."""
    import pandas as pd

    pairs = tables.rows(_ANSWERS, release=release_id)
    suite = load_suite("replay_free")
    if not pairs:
        return []
    prefixes = [common_prefix(one, other) for one, other in pairs]
    parted = sum(list(one) != list(other) for one, other in pairs)
    frame = pd.DataFrame(
        {
            "divergence_rate": [parted / len(pairs)],
            "common_prefix": [stdlib.median(n / max(1, len(one)) for n, (one, _) in zip(prefixes, pairs, strict=True))],
            "length_change": [stdlib.fmean(len(other) - len(one) for one, other in pairs)],
        }
    )
    num = len(pairs)
    notes = {
        "divergence_rate": Note(statistics.rate_phrase("answers that part", parted, num), num),
        "common_prefix": Note(f"median of {num} answers", num),
        "length_change": Note(f"mean of {num} answers", num),
    }
    return evaluate(suite, frame, limits, notes, prefix="business.free.")


def common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
