"""Moving traffic: the record first, then the router with the record's generation, confirmed.

A crash between the two leaves a record that says more than the router does; the watchdog then reverts
a router that was safe already. The other order could leave traffic that no record knows of.
"""

from __future__ import annotations

import time
from datetime import datetime

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


def settle(context: Context, side: str, *, shadow: bool, since: datetime, at_least: int) -> None:
    """Wait until the instances have written `at_least` rows since then, or `SETTLE_S` went by."""
    from data.lake import Lake

    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        with Lake(context.lake, release_id=context.release_id) as lake:
            [(found,)] = lake.rows(
                "select count(*) from requests where release_id = $release and side = $side and shadow = $shadow"
                " and epoch(time) >= $since",
                release=context.release_id,
                side=side,
                shadow=shadow,
                since=since.timestamp(),
            )
        if found >= at_least:
            return
        time.sleep(0.25)
