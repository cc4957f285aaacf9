"""Stage `fingerprint`: what decides which kernel runs, of champion and candidate, and what differs."""

from __future__ import annotations

from attention.difference import difference
from attention.job import FingerprintJob
from gates import fingerprint as gate
from tasks.context import Context, StageOutcome
from tasks.environment import measure_sides


def run(context: Context) -> StageOutcome:
    """Fingerprint both sides in their own environments and judge that both are known."""
    found = measure_sides(context, lambda s: FingerprintJob(setup=context.setup(s), evidence=context.evidence(s)))
    champion, candidate = found["champion"], found["candidate"]
    changed = difference(champion["identity"], candidate["identity"])
    report = gate.judge(context.lake, context.release_id, context.plan)
    detail = {"champion": champion["id"], "candidate": candidate["id"], "changed": changed}
    context.say(f"fingerprint: {candidate['id']} against {champion['id']}; {len(changed)} field(s) differ")
    return StageOutcome(report, detail)
