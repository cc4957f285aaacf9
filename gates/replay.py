"""Gate of the replay stage: tensor, model and business layer in one report.

Tensor: `gates.replay_tensor`. Model: `gates.replay_model`. Business: the golden set, paired by prompt,
`gates.business`. Fewer cases or prompts than the plan implies, on either side, or a case that the champion has and the
candidate lacks, is a lost shard; a case with an `error` has no figures: all are errors, never a smaller table that
passes.
"""

from __future__ import annotations

from pathlib import Path

from data.lake import Lake
from data.plan import Plan
from gates.business import business_checks
from gates.fingerprint import measured_rows
from gates.replay_free import free_checks
from gates.replay_model import model_checks
from gates.replay_tensor import tensor_checks
from gates.thresholds import load_limits
from gates.verdict import Check, fail_closed

TABLES = ("tensor_replay", "model_replay", "business_replay")


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
            *free_checks(tables, release_id, limits),
        ]
