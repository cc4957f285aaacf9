"""Gate of the expand stage: the candidate carried all traffic alone, before it becomes the champion."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data.plan import Plan
from gates.evaluate import Note, evaluate, load_suite
from gates.served import (
    CANDIDATE,
    LIVE,
    ClientOutcome,
    Span,
    arm,
    candidate_figures,
    candidate_notes,
    client_figures,
    client_notes,
    recorded,
    served_rows,
)
from gates.thresholds import load_limits
from gates.verdict import Check, fail_closed

_OTHERS = f"{LIVE} and not ({CANDIDATE})"


@fail_closed("expand")
def judge(lake: Path, release_id: str, plan: Plan, *, span: Span, client: ClientOutcome) -> list[Check]:
    """Judge the candidate's live rows inside `span`, in which nothing else may have served."""
    limits = load_limits("expand", plan.name).least(min_requests=plan.expand.requests)
    with served_rows(lake, release_id, span) as tables:
        candidate = arm(tables, release_id, CANDIDATE)
        others = arm(tables, release_id, _OTHERS)
        num_recorded = recorded(tables, release_id)
    num = candidate.num_requests
    figures = candidate_figures(candidate) | client_figures(client, num_recorded)
    figures["num_others"] = others.num_requests
    notes = candidate_notes(candidate) | client_notes(client, num_recorded)
    notes["requests"] = Note(f"1 request of {num}", num, f"{num} candidate requests")
    notes["only_backend"] = Note(f"1 request of {num}", num, "another arm served live requests")
    return evaluate(load_suite("expand"), pd.DataFrame([figures]), limits, notes)
