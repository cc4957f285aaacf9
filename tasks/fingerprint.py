"""Stage `fingerprint`: what decides which kernel runs, of champion and candidate, and what differs."""

from __future__ import annotations

from typing import Any

from attention.job import FingerprintJob
from gates import fingerprint as gate
from tasks.context import Context, Side, StageOutcome
from tasks.environment import Job, measure_all

SIDES: tuple[Side, ...] = ("champion", "candidate")


def run(context: Context) -> StageOutcome:
    """Fingerprint both sides in their own environments and judge that both are known."""
    jobs = [
        Job(
            f"fingerprint-{side}",
            FingerprintJob(setup=context.setup(side), evidence=context.evidence(side)),
            context.environment(side),
        )
        for side in SIDES
    ]
    champion, candidate = measure_all(jobs, context.work)
    changed = difference(champion["identity"], candidate["identity"])
    report = gate.judge(context.lake, context.release_id, context.plan)
    detail = {"champion": champion["id"], "candidate": candidate["id"], "changed": changed}
    context.say(f"fingerprint: {candidate['id']} against {champion['id']}; {len(changed)} field(s) differ")
    return StageOutcome(report, detail)


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """`field: old -> new` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            lines += difference(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return lines
    return [] if old == new else [f"{path}: {old} -> {new}"]
