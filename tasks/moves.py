"""Moving traffic: the record first, then the router with the record's generation, confirmed.

A crash between the two leaves a record that says more than the router does; the watchdog then reverts
a router that was safe already. The other order could leave traffic that no record knows of.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from gates.served import Span, arm, served_rows
from tasks.context import Context
from tasks.record import Record, Shares, State
from tasks.router import Router

SETTLE_S = 10.0  # instances flush their rows every half second


def move(
    context: Context,
    router: Router,
    *,
    shares: Shares | None = None,
    mirror: float | None = None,
    mirror_to: str = "candidate",
    state: State | None = None,
) -> Record:
    """Set shares and mirror; each is confirmed by the router before the next. Raises RouterError, LeaseLostError."""

    def change(record: Record) -> None:
        record.shares = shares or record.shares
        record.mirror = record.mirror if mirror is None else mirror
        record.state = state or record.state

    record = context.update(change)
    if mirror is not None:
        router.set_mirror(mirror, mirror_to, generation=record.generation)  # type: ignore[arg-type]
    if shares is not None:
        router.set_shares(shares.champion, shares.control, shares.candidate, record.generation)
    said = f"{record.shares.champion}/{record.shares.control}/{record.shares.candidate}"
    context.event("share_changed", f"champion/control/candidate {said}, mirror {record.mirror:g}", subject=said)
    return record


def settle(context: Context, since: datetime, expected: Mapping[str, int]) -> None:
    """Wait until the instances have written their rows since then, or `SETTLE_S` went by.

    `expected`: how many rows of each arm, by its condition in gates/served.py. Every arm that the gate reads: a
    champion that writes half a second after the candidate would leave shadows without their primaries.
    """
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        with served_rows(context.lake, context.release_id, Span(since, datetime.now(UTC))) as tables:
            if all(arm(tables, context.release_id, which).num_requests >= num for which, num in expected.items()):
                return
        time.sleep(0.25)
