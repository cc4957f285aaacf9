"""A person's yes: asked for when a gate cannot decide or a wave wants one, good for that one thing alone.

An approval names the stage that was held when it was given, counts only if it came after that, and is spent by
its use: a yes to noise in a baseline says nothing about the canary that follows.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from tasks.context import Context
from tasks.record import Approval, Record
from tasks.router import Router
from tasks.vigil import Vigil

PROMOTION = "promotion"  # what a wave with `approval: true` waits for
POLL_S = 0.5


def hold(context: Context, stage: str, reason: str) -> None:
    """Mark the release as held at a stage; what was approved before is void."""

    def change(record: Record) -> None:
        record.state, record.reason, record.held_stage, record.approval = "held", reason, stage, None

    context.update(change)


def wait(context: Context, router: Router, stage: str, deadline_s: float) -> Approval | str:
    """Wait for the yes to a held stage, traffic as it is; or why there is none: the deadline, or the candidate.

    The candidate is watched all the while, as in a canary step: users are on it.

    Raises LeaseLostError.
    """
    share = context.store.load().shares.candidate
    vigil = Vigil(context, router, since=datetime.now(UTC), share=share)
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        context.check()
        if (trouble := vigil.trouble()) is not None:
            return trouble
        if (approval := spend(context, stage)) is not None:
            return approval
        time.sleep(POLL_S)
    return "nobody approved it before its deadline"


def spend(context: Context, stage: str) -> Approval | None:
    """The approval of that stage of this release, used up; None if there is none."""
    found = context.store.load().approval
    if found is None or (found.release_id, found.stage) != (context.release_id, stage):
        return None

    def change(record: Record) -> None:
        record.approval = record.held_stage = None

    context.update(change)
    context.say(f"{stage}: approved by {found.by}")
    return found
