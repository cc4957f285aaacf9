"""Stage `expand`: the candidate as the only backend of the cell, then the hand-over.

The hand-over loses nothing: while the candidate serves everything, the champion's endpoint becomes the
candidate's port; only then do the shares go to 100/0/0, which by then is the same process. The old
champion is kept warm as `previous`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

from data.requests import TrafficRequest
from gates import expand as gate
from gates.served import CANDIDATE, Span
from gates.verdict import Breach, GateReport
from tasks.context import Context, StageOutcome
from tasks.instances import command_of
from tasks.moves import move, settle
from tasks.record import Deployed, Record, Shares
from tasks.router import EnvoyRouter, RouterError
from tasks.traffic import endless, play
from tasks.vigil import Vigil, watched
from tasks.windows import write_windows


def run(context: Context, router: EnvoyRouter, requests: list[TrafficRequest]) -> StageOutcome:
    """Play the plan's requests with everything on the candidate, and judge its rows."""
    plan = context.plan.expand
    start = datetime.now(UTC)
    move(context, router, mirror=0.0, shares=Shares(champion=0, control=0, candidate=100))

    vigil = Vigil(context, router, since=start)
    played = play(
        endless(requests, start=len(requests) // 2),
        f"http://127.0.0.1:{router.port}",
        max_in_flight=context.plan.traffic.max_in_flight,
        enough=lambda so_far: so_far.sent >= plan.requests,
        most=plan.requests,
        tick=lambda so_far: watched(context, router, vigil, so_far),
        shares=Shares(champion=0, control=0, candidate=100),
    )
    outcome = played.outcome()
    if played.stopped is not None:
        breach = vigil.breach or Breach(played.stopped)
        report = GateReport(stage="expand", checks=(breach.check(outcome.sent),))
        return StageOutcome(report, {"sent": outcome.sent, "lost": outcome.lost})
    settle(context, start, {CANDIDATE: played.of("candidate")})
    span = Span(start, datetime.now(UTC))
    report = gate.judge(context.lake, context.release_id, context.plan, span=span, client=outcome)
    write_windows(context, "expand", 100, span, 0)
    context.say(f"expand: {outcome.ok} of {outcome.sent} requests answered by the candidate alone")
    return StageOutcome(report, {"sent": outcome.sent, "lost": outcome.lost})


def hand_over(context: Context, router: EnvoyRouter, fingerprint_id: str, backends: dict[str, str]) -> Record:
    """Make the candidate the champion and the champion `previous`; the new record.

    Raises RouterError before the record names a new champion, so that a failure leaves the old one.
    """
    held = context.update(lambda record: None)
    if held.candidate_instance is None:
        raise RuntimeError("the record names no candidate instance to hand over")
    try:
        router.set_endpoint("champion", held.candidate_instance.port, generation=held.generation)
    except RouterError:
        # Told, but not confirmed: the candidate that is stopped next must not stand behind the champion's cluster.
        if held.champion is not None and held.champion.instance is not None:
            with suppress(RouterError):
                router.set_endpoint("champion", held.champion.instance.port, generation=held.generation)
        raise

    def change(record: Record) -> None:
        record.previous = record.champion
        record.champion = Deployed(
            release_id=context.release_id,
            candidate=context.candidate.candidate.name,
            candidate_file=str(context.candidate.file),
            identity=context.candidate.identity,
            fingerprint_id=fingerprint_id,
            backends=backends,
            model_path=str(context.cell.model_path),
            policy=str(context.candidate.policy_path),
            environment=context.candidate.candidate.environment,
            command=command_of(context, "candidate"),
            instance=record.candidate_instance,
            promoted_at=time.time(),
        )
        record.candidate_instance = record.control_instance = None
        record.state, record.shares, record.mirror, record.reason = "promoted", Shares(), 0.0, "every gate passed"

    record = context.update(change)
    try:
        router.set_shares(100, 0, 0, record.generation)
    except RouterError as error:
        # Both clusters are the new champion's process by now, so users notice nothing; the watchdog goes on trying.
        context.event("shares_not_confirmed", str(error), severity="warning", subject=context.release_id)
        context.say(f"promoted, but the router did not confirm 100/0/0: {error}")
    context.event("promoted", f"{context.candidate.candidate.name} is champion", subject=context.release_id)
    return record
