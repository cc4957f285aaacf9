"""Stage `canary`: real requests, a growing share, a control beside the candidate, rollback at once.

While a step runs, every half second the fast layer looks at what both arms served so far and ends the
step on the first breach. A step whose evidence does not decide gathers as much again, a few times;
then it is held. At 100 % no live request is left for a control, so it gets a copy of each one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from data.requests import TrafficRequest
from gates import canary as gate
from gates.served import CANDIDATE, CHAMPION, CONTROL, ClientOutcome, Span
from gates.verdict import Breach, Check, GateReport, Verdict
from tasks.context import Context, StageOutcome
from tasks.envoy_config import SHADOW_CONCURRENCY
from tasks.moves import move, settle
from tasks.record import Shares
from tasks.router import EnvoyRouter
from tasks.traffic import Played, endless, play
from tasks.vigil import Vigil, watched
from tasks.windows import write_windows


@dataclass
class _Step:
    """One share: replies so far and the time they span."""

    share: int
    start: datetime
    played: list[Played]

    def client(self) -> ClientOutcome:
        parts = [p.outcome() for p in self.played]
        elsewhere = sum((Counter(p.elsewhere) for p in parts), Counter())
        sent, ok, lost = (sum(getattr(p, name) for p in parts) for name in ("sent", "ok", "lost"))
        return ClientOutcome(sent, ok, lost, elsewhere)

    def served(self, role: str) -> int:
        return sum(p.of(role) for p in self.played)


def shares_of(percent: int) -> Shares:
    """Candidate and control alike, the champion the rest; above 50 % control gets what is left."""
    control = min(percent, 100 - percent)
    return Shares(champion=100 - percent - control, control=control, candidate=percent)


def run(context: Context, router: EnvoyRouter, requests: list[TrafficRequest]) -> StageOutcome:
    """All steps of the plan, up to the first that is not passed."""
    checks: list[Check] = []
    detail: dict[str, Any] = {"steps": []}
    arrivals = endless(requests)
    for share in context.plan.canary.steps:
        step = _Step(share, datetime.now(UTC), [])
        move(
            context,
            router,
            shares=shares_of(share),
            mirror=1.0 if share == 100 else 0.0,
            mirror_to="control" if share == 100 else "candidate",
            state="canary",
        )
        report = _judged(context, router, step, arrivals)
        client = step.client()
        detail["steps"].append(
            {"share": share, "sent": client.sent, "lost": client.lost, "candidate": step.served("candidate")}
        )
        checks += [c.model_copy(update={"check": f"{share}%.{c.check}"}) for c in report.checks]
        context.say(
            f"canary: {share} %: {step.served('candidate')} requests by the candidate,"
            f" {client.lost} of {client.sent} lost{_whose(client)}, {report.verdict}"
        )
        if report.verdict is not Verdict.PASS:
            break
    detail |= {name: sum(step[name] for step in detail["steps"]) for name in ("sent", "lost")}
    return StageOutcome(GateReport(stage="canary", checks=tuple(checks)), detail)


def _judged(
    context: Context, router: EnvoyRouter, step: _Step, arrivals: Iterator[tuple[float, TrafficRequest]]
) -> GateReport:
    """Gather and judge; an inconclusive step gathers again, `max_extensions` times."""
    plan = context.plan.canary
    report = GateReport(stage="canary", checks=())
    for turn in range(plan.max_extensions + 1):
        wanted = plan.min_candidate_requests * (turn + 1)
        breach = _gather(context, router, step, arrivals, wanted)
        if breach is not None:
            return GateReport(stage="canary", checks=(breach.check(step.served("candidate")),))
        span = Span(step.start, datetime.now(UTC))
        report = gate.judge(
            context.lake, context.release_id, context.plan, share=step.share, span=span, client=step.client()
        )
        write_windows(context, "canary", step.share, span, turn)
        if report.verdict is not Verdict.INCONCLUSIVE:
            break
        if turn < plan.max_extensions:
            context.say(f"canary: {step.share} %: not decided by {wanted} requests ({report.reason}); gathering more")
    return report


def _gather(
    context: Context, router: EnvoyRouter, step: _Step, arrivals: Iterator[tuple[float, TrafficRequest]], wanted: int
) -> Breach | None:
    """Play until the candidate served `wanted` requests in this step; the breach that ended it early."""
    have = step.served("candidate")
    missing = wanted - have
    if missing <= 0:
        return None
    most_at_once = context.plan.traffic.max_in_flight
    vigil = Vigil(context, router, since=step.start, share=step.share)
    played = play(
        _from_now(arrivals),
        f"http://127.0.0.1:{router.port}",
        # At 100 % the control gets copies, and no more at once than the shadow's circuit breaker takes: both
        # arms are to carry the same load.
        max_in_flight=min(most_at_once, SHADOW_CONCURRENCY) if step.share == 100 else most_at_once,
        enough=lambda so_far: so_far.begun["candidate"] >= missing,
        most=math.ceil(missing * 100 / step.share) * 3 + 50,
        tick=lambda so_far: watched(context, router, vigil, so_far),
        shares=shares_of(step.share),
    )
    step.played.append(played)
    if played.stopped is not None:
        return vigil.breach or Breach(played.stopped)
    arms = {CANDIDATE: "candidate", CONTROL: "control", CHAMPION: "champion"}
    settle(context, step.start, {which: step.served(role) for which, role in arms.items()})
    return None


def _from_now(arrivals: Iterator[tuple[float, TrafficRequest]]) -> Iterator[tuple[float, TrafficRequest]]:
    """The rest of the arrivals, with the next one at second 0."""
    first: float | None = None
    for moment, request in arrivals:
        first = moment if first is None else first
        yield moment - first, request


def _whose(client: ClientOutcome) -> str:
    beside = ", ".join(f"{num} by the {role}" for role, num in sorted(client.elsewhere.items()))
    return f" ({beside})" if beside else ""
