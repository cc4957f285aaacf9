"""Stress run of a release: how much load does each side carry before its users notice?

One process a side and concurrency, one after the other, with the machine to itself. The champion's saturation sets the
rates; the candidate then meets the same requests at the same times. A process that crashes or hangs leaves a row a
level without figures, which the gate calls an error, and an event that says what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attention.job import StressJob
from attention.validated import validated
from data.plan import StressPlan
from data.requests import RequestLength
from tasks.context import SIDES, Context, Side
from tasks.environment import TIMEOUT_S, Job, MeasureError, measure

Row = dict[str, Any]


def run(context: Context, lengths: Sequence[RequestLength], *, random_weights: bool = False) -> list[Row]:
    """Rows of perf_stress of both sides at every concurrency of the plan, also written to the lake; none without a
    stress plan.

    lengths: of the mix, scaled as the plan plays it; requests are drawn from them, each as often as it counts.
    random_weights: for a model folder that holds none. Where the champion is lost there are no rates, and so no rows
    of the candidate. Raises UserError for a plan whose burst is too small for its concurrency.
    """
    plan = context.plan.baseline.stress
    if plan is None:
        return []
    setup = {side: context.setup(side) for side in SIDES}
    rows: list[Row] = []
    for max_running in plan.max_running:
        saturation: float | None = None
        for side in SIDES:
            job = job_of(plan, lengths, max_running, setup=setup[side], saturation_per_s=saturation,
                         random_weights=random_weights)  # fmt: skip
            found = _measured(context, side, job)
            columns = {"side": side, "mix": context.candidate.candidate.traffic.mix}
            own = [{**columns, "fingerprint_id": found["fingerprint_id"], **row} for row in found["levels"]]
            context.write("perf_stress", own)
            rows += own
            saturation = saturation or found["saturation_per_s"]
            if saturation is None:
                break
    return rows


def job_of(plan: StressPlan, lengths: Sequence[RequestLength], max_running: int, **own: Any) -> StressJob:
    """The job of one side at one concurrency; `own` are its further fields. UserError for a plan that gives none."""
    document = {
        "lengths": [(one.prompt_tokens, one.output_tokens, one.count) for one in lengths],
        "max_running": max_running,
        **plan.model_dump(exclude={"max_running"}),
        **own,
    }
    return validated(StressJob, document, "plan: baseline.stress")


def _measured(context: Context, side: Side, job: StressJob) -> Row:
    """result.json of the side; of one that was lost a row a level without figures."""
    name = f"stress-{job.max_running}-{side}"
    try:
        found = measure(Job(name, job, context.environment(side)), context.work, _timeout_s(job))
    except MeasureError as error:
        context.event("stress_lost", str(error), severity="critical", subject=side)
        context.say(f"baseline: {error}")
        return {"fingerprint_id": context.fingerprint_id(side), "saturation_per_s": None, "levels": lost_rows(job)}
    good = ", ".join(f"{row['level']:.0%}: {row['num_good']} of {row['num_offered']}" for row in found["levels"])
    context.say(
        f"baseline: stress of {side}, {job.max_running} running, {found['saturation_per_s']:.3g}/s: good at {good}"
    )
    if found["left_out"]:
        context.say(f"baseline: {found['left_out']:.0%} of the mix is too long for this instance and was left out")
    return found


def lost_rows(job: StressJob) -> list[Row]:
    """perf_stress: what was to be offered, and no figure."""
    saturation = job.saturation_per_s
    return [
        {
            "level": level,
            "rate_per_s": None if saturation is None else level * saturation,
            "max_running": job.max_running,
            "duration_s": job.duration_s,
            "slo_ttft_s": job.slo_ttft_s,
            "slo_tpot_s": job.slo_tpot_s,
        }
        for level in job.levels
    ]


def _timeout_s(job: StressJob) -> float:
    """Room to load and for the burst, then every level with its drain."""
    drain_s = job.slo_ttft_s + job.slo_tpot_s * max(output for _, output, _ in job.lengths)
    return TIMEOUT_S + len(job.levels) * (job.duration_s + drain_s)
