"""Stage `shadow`: live requests are copied to the candidate, whose replies nobody gets.

Proxies discard shadow replies, so both instances record their own rows in `requests`; they pair by
x-request-id, and their tokens must agree. Requests that are sampled without a seed are not played here.
"""

from __future__ import annotations

from datetime import UTC, datetime

from attention.errors import UserError
from data.requests import TrafficRequest
from gates import shadow as gate
from gates.served import CANDIDATE_SHADOW, CHAMPION, Span
from tasks.context import Context, StageOutcome
from tasks.envoy_config import SHADOW_CONCURRENCY
from tasks.moves import move, settle
from tasks.router import EnvoyRouter
from tasks.traffic import Played, endless, play


def run(context: Context, router: EnvoyRouter, requests: list[TrafficRequest]) -> StageOutcome:
    """Mirror the plan's fraction to the candidate, play the plan's requests, compare the pairs."""
    plan = context.plan.shadow
    requests = comparable(requests)
    before = router.observe().counts["shadow"]
    start = datetime.now(UTC)
    move(context, router, mirror=plan.fraction, mirror_to="candidate", state="shadow")
    played = play(
        endless(requests),
        f"http://127.0.0.1:{router.port}",
        # More at once than the shadow's circuit breaker takes would only be dropped.
        max_in_flight=min(context.plan.traffic.max_in_flight, SHADOW_CONCURRENCY),
        enough=lambda so_far: so_far.sent >= plan.requests,
        most=plan.requests,
        tick=lambda so_far: _tick(context, so_far),
    )
    move(context, router, mirror=0.0)
    copied = router.observe().counts["shadow"].total - before.total
    settle(context, start, {CANDIDATE_SHADOW: copied, CHAMPION: played.of("champion")})
    after = router.observe().counts["shadow"]
    report = gate.judge(
        context.lake,
        context.release_id,
        context.plan,
        span=Span(start, datetime.now(UTC)),
        overflow=after.overflow - before.overflow,
    )
    outcome = played.outcome()
    context.say(f"shadow: {outcome.ok} of {outcome.sent} user requests answered, {after.total - before.total} copied")
    return StageOutcome(report, {"sent": outcome.sent, "lost": outcome.lost, "copied": after.total - before.total})


def comparable(requests: list[TrafficRequest]) -> list[TrafficRequest]:
    """The requests whose two answers must agree; of a sampled one without a seed each answer is another draw.

    Raises UserError when there is none.
    """
    exact = [request for request in requests if request.exact]
    if not exact:
        raise UserError(
            f"traffic: all {len(requests)} requests are sampled (temperature above 0) without a seed, so that shadow "
            f"can compare none; use traffic that holds requests with temperature 0 or a seed"
        )
    return exact


def _tick(context: Context, played: Played) -> str | None:
    context.check()
    return None
