"""Stage `probe`: the startup capability probes of both sides, and the chain that they leave."""

from __future__ import annotations

from attention.job import ProbeJob
from gates import probe as gate
from tasks.context import Context, StageOutcome
from tasks.environment import measure_sides


def run(context: Context) -> StageOutcome:
    """Probe in each environment; every required cell of the candidate's chain must have passed."""
    sides = measure_sides(context, lambda side: ProbeJob(setup=context.setup(side), evidence=context.evidence(side)))
    found = sides["candidate"]
    resolved = sorted(set(found["resolved"].values()))
    # Whoever may stand in for a resolved backend must have passed as well.
    executed = {r["backend"] for r in found["results"] if r["level"] == "execute"}
    fallbacks = sorted(executed - set(resolved))
    required = sorted(
        {
            (r["backend"], r["probe"])
            for r in found["results"]
            if r["required"] and r["backend"] in (*resolved, *fallbacks)
        }
    )
    for fallback in found["fallbacks"]:
        text = f"{fallback['phase']}: {fallback['from']} gave way to {fallback['to']}: {'; '.join(fallback['reasons'])}"
        context.event("startup_fallback", text, severity="warning", subject=fallback["phase"])
    report = gate.judge(context.lake, context.release_id, context.plan, required=required, fallbacks=tuple(fallbacks))
    chosen = ", ".join(f"{phase} {backend}" for phase, backend in found["resolved"].items())
    context.say(f"probe: {len(required)} required cells; {chosen}")
    return StageOutcome(report, {"resolved": found["resolved"], "fallbacks": found["fallbacks"]})
