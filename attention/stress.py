"""Load on one instance that serves nobody else: its saturation, then open-loop arrivals at shares of it.

    python -m attention bench stress --job job.json --out DIR      # attention.job.StressJob

The scheduler and the runner are those of `serve`, driven in this process: no HTTP, no detokenizing. Three loads follow
each other. A warm-up pays for first calls and is forgotten. A closed burst, all offered at once, gives the saturation:
requests completed a second while the batch is full. Then, level by level, requests arrive when their time has come,
however far behind the instance is (a closed loop would slow its users down and hide its queue), and TTFT counts from
that time. Two sides with one seed meet the same requests at the same times.

Prompts are random tokens, answers have exactly the length that was drawn: greedy, and no token ends them. What a mix
says of cached prefixes is ignored, because this instance has no prefix cache: every prompt is computed whole.

*Goodput* is what completed with TTFT and TPOT within their objectives, a second (Zhong et al., DistServe, OSDI 2024).
A level ends when the last arrival could no longer be good. What is unfinished then is not good, and its TTFT so far
stays in the percentiles: whoever drops it drops the tail.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention.errors import UserError
from attention.job import StressJob
from attention.limits import Limits
from attention.model import Runner
from attention.outcomes import outcome_of
from attention.sampling import SamplingParams
from attention.scheduler import Generation, QueueFullError, Scheduler, StepResult

Row = dict[str, Any]
Length = tuple[int, int, float]  # prompt tokens, output tokens, requests that it stands for

_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
_TOKENS = (10, 10_000)  # ids to draw from: special tokens often come first


@dataclass(frozen=True)
class Arrival:
    """A request to come, `at_s` seconds after the start of its load."""

    at_s: float
    prompt_ids: tuple[int, ...]
    num_output: int


@dataclass
class Played:
    """What one load did."""

    generations: list[Generation] = field(default_factory=list)  # taken on; unfinished at the end: `cancelled`
    num_refused: int = 0  # the queue was full
    num_out_of_memory: int = 0  # steps
    peak_pages: int = 0
    running_s: float = 0.0  # seconds times requests that ran in them
    elapsed_s: float = 0.0  # from the start until nothing was left


def run(job: StressJob, say: Callable[[str], None]) -> Row:
    """All loads of a job: fingerprint_id, own saturation, the share of requests that do not fit, a row a level.

    Rows have the columns of perf_stress that describe a load. Raises UserError when no length fits this instance,
    RuntimeError when the burst does not complete.
    """
    from attention import startup

    dispatcher = startup.decide(job.setup, [])
    found = startup.identify(job.setup, dispatcher)
    runner = _loaded(job, dispatcher)
    runner.eos_token_ids = frozenset()  # answers are as long as was drawn
    limits = bounded(job.setup.limits, job.max_running)
    lengths, left_out = fitting(runner, limits, job.lengths)
    with torch.inference_mode():
        play(runner, limits, burst(runner, lengths, job.max_running, (job.seed, 0)))
        own = _saturation(job, runner, limits, lengths)
        saturation = job.saturation_per_s or own
        say(f"stress: {job.max_running} running: saturation {own:.3g}/s; levels are shares of {saturation:.3g}/s")
        rows = []
        for nth, level in enumerate(job.levels, start=1):
            coming = poisson(runner, lengths, level * saturation, job.duration_s, (job.seed, 1 + nth))
            drain_s = job.slo_ttft_s + job.slo_tpot_s * max(one.num_output for one in coming)
            played = play(runner, limits, coming, drain_s=drain_s)
            rows.append({"level": level, "max_running": job.max_running, **summary(job, coming, played, runner)})
            say(told(rows[-1]))
    return {"fingerprint_id": found.id, "saturation_per_s": own, "left_out": left_out, "levels": rows}


def bounded(limits: Limits, max_running: int) -> Limits:
    """The instance's limits with another bound on running requests, and room in a step for them and a prompt."""
    room = max(limits.max_step_tokens, max_running + limits.prefill_chunk)
    return replace(limits, max_running=max_running, max_step_tokens=room, prefix_reuse=False)


def fitting(runner: Runner, limits: Limits, lengths: Sequence[Length]) -> tuple[list[Length], float]:
    """Lengths that the instance can serve at all, and the share of requests that it cannot. UserError if it can none.

    Who is too long is refused under any load, so says nothing of it.
    """
    scheduler, fit = Scheduler(runner, limits), list[Length]()
    reason = ""
    for one in lengths:
        try:
            scheduler.check(one[0], one[1])
            fit.append(one)
        except UserError as error:
            reason = str(error)
    if not fit:
        raise UserError(f"stress: no request of the mix fits this instance: {reason}")
    return fit, 1.0 - sum(one[2] for one in fit) / sum(one[2] for one in lengths)


def burst(runner: Runner, lengths: Sequence[Length], num: int, seed: tuple[int, int]) -> list[Arrival]:
    """`num` requests, all there at the start."""
    return _drawn(runner, lengths, np.zeros(num), np.random.default_rng(seed))


def poisson(
    runner: Runner, lengths: Sequence[Length], rate_per_s: float, duration_s: float, seed: tuple[int, int]
) -> list[Arrival]:
    """Arrivals of a Poisson process, given their number (the nearest to rate times duration, 1 at least).

    Given its count, such a process is that many independent uniform times: the offered rate is exact.
    """
    generator = np.random.default_rng(seed)
    times = np.sort(generator.uniform(0.0, duration_s, max(1, round(rate_per_s * duration_s))))
    return _drawn(runner, lengths, times, generator)


def play(runner: Runner, limits: Limits, arrivals: Sequence[Arrival], *, drain_s: float = float("inf")) -> Played:
    """Offer the arrivals at their times and run steps until all ended, `drain_s` after the last arrival at most.

    A drill's `slow_decode` is left out: only users are to see it (attention/faults.py).
    """
    scheduler, played, coming = Scheduler(runner, limits), Played(), deque(arrivals)
    until_s = arrivals[-1].at_s + drain_s
    started = time.perf_counter()
    while coming or scheduler.has_work:
        now_s = time.perf_counter() - started
        while coming and coming[0].at_s <= now_s:
            _offer(coming.popleft(), scheduler, played, started)
        if now_s > until_s:
            scheduler.cancel_all("cancelled", "unfinished when the load ended")
        elif scheduler.has_work:
            _note(scheduler.step(), scheduler, runner, played, started + now_s)
        elif coming:
            time.sleep(max(0.0, started + coming[0].at_s - time.perf_counter()))
    played.elapsed_s = time.perf_counter() - started
    return played


def saturation_per_s(generations: Sequence[Generation], max_running: int) -> float:
    """Requests completed a second by a burst while the batch was full.

    From the `max_running`-th completion, when as many as began together have gone, to the last admission: from then on
    nobody takes a free place. Raises RuntimeError when a request failed, or nothing completed in between.
    """
    if failed := [g.error for g in generations if not _completed(g)]:
        raise RuntimeError(f"saturation: {len(failed)} of {len(generations)} requests failed: {failed[0]}")
    ends = sorted(g.finished for g in generations if g.finished is not None)
    first, last = ends[max_running - 1], max(g.admitted for g in generations if g.admitted is not None)
    num = sum(first < end <= last for end in ends)
    if not num:
        raise RuntimeError(f"saturation: {len(generations)} requests never fill a batch of {max_running}; offer more")
    return num / (last - first)


def summary(job: StressJob, offered: Sequence[Arrival], played: Played, runner: Runner) -> Row:
    """Columns of perf_stress for one load. A percentile of nothing is None."""
    good = sum(_is_good(job, one) for one in played.generations)
    failed = sum(one.finish_reason == "error" for one in played.generations)
    # Who still waits has waited so long at least; a request that failed has no TTFT.
    waits = [_wait_s(one) for one in played.generations if one.ttft_s is not None or one.finish_reason != "error"]
    paces = [one.tpot_s for one in played.generations if one.tpot_s is not None]
    return {
        "rate_per_s": len(offered) / job.duration_s,
        "duration_s": job.duration_s,
        "num_offered": len(offered),
        "num_completed": sum(map(_completed, played.generations)),
        "num_refused": played.num_refused,
        "num_failed": failed,
        "num_good": good,
        "goodput_per_s": good / job.duration_s,
        "output_tokens_per_s": sum(len(one.output_ids) for one in played.generations) / played.elapsed_s,
        "slo_ttft_s": job.slo_ttft_s,
        "slo_tpot_s": job.slo_tpot_s,
        **_percentiles("ttft", waits),
        **_percentiles("tpot", paces),
        "running_mean": played.running_s / played.elapsed_s,
        "kv_peak_share": played.peak_pages / runner.pool.num_pages,
        # Pages are reserved at admission (attention/scheduler.py), so nothing is ever preempted: it queues instead.
        "num_preempted": 0,
        "num_fallbacks": sum(bool(one.fallback_reasons) for one in played.generations),
        "num_out_of_memory": played.num_out_of_memory,
    }


def told(row: Row) -> str:
    """A level in words."""
    tails = (f"{name} p95 {row[f'{name.lower()}_p95_s'] or float('nan'):.3g} s" for name in ("TTFT", "TPOT"))
    return (
        f"stress: {row['max_running']} running, {row['level']:.0%}, {row['rate_per_s']:.3g}/s: {row['num_good']} of "
        f"{row['num_offered']} good, {', '.join(tails)}, KV {row['kv_peak_share']:.0%}"
    )


def _loaded(job: StressJob, dispatcher: Any) -> Runner:
    from attention import startup

    if not job.random_weights:
        return startup.load(job.setup, dispatcher)
    from attention.bench_replay import with_random_weights

    with tempfile.TemporaryDirectory() as scratch:
        model = with_random_weights(job.setup.model, Path(scratch) / job.setup.model.resolve().name)
        return startup.load(job.setup.model_copy(update={"model": model}), dispatcher)


def _saturation(job: StressJob, runner: Runner, limits: Limits, lengths: Sequence[Length]) -> float:
    roomy = replace(limits, max_queue=job.saturation_requests)
    at_once = burst(runner, lengths, job.saturation_requests, (job.seed, 1))
    return saturation_per_s(play(runner, roomy, at_once).generations, job.max_running)


def _drawn(
    runner: Runner, lengths: Sequence[Length], times: np.ndarray[Any, Any], generator: np.random.Generator
) -> list[Arrival]:
    """A length for each time, drawn with replacement, and random tokens."""
    counts = np.array([one[2] for one in lengths])
    low, high = _TOKENS[0], min(_TOKENS[1], len(runner.tokenizer))
    drawn = [lengths[i] for i in generator.choice(len(lengths), len(times), p=counts / counts.sum())]
    return [
        Arrival(float(at_s), tuple(generator.integers(low, high, num_prompt).tolist()), num_output)
        for at_s, (num_prompt, num_output, _) in zip(times, drawn, strict=True)
    ]


def _offer(arrival: Arrival, scheduler: Scheduler, played: Played, started: float) -> None:
    """Submit a request as of its arrival: the step that kept us from it is part of its TTFT."""
    generation = Generation(
        request_id=f"stress-{len(played.generations)}",
        prompt_ids=arrival.prompt_ids,
        params=SamplingParams(max_tokens=arrival.num_output, temperature=0.0),
        submitted=started + arrival.at_s,
    )
    try:
        scheduler.submit(generation)
    except QueueFullError:
        played.num_refused += 1
    else:
        played.generations.append(generation)


def _note(result: StepResult, scheduler: Scheduler, runner: Runner, played: Played, began: float) -> None:
    """Book a step that began at `began`, a `time.perf_counter` second."""
    num_running = scheduler.num_running + len(result.finished)
    played.running_s += num_running * (time.perf_counter() - began)
    freed = sum(-(-one.num_cached // runner.page_size) for one in result.finished)  # they held them in the step
    played.peak_pages = max(played.peak_pages, runner.pool.num_pages - runner.pool.num_free + freed)
    if result.failure is not None and outcome_of(result.failure) == "out_of_memory":
        played.num_out_of_memory += 1


def _completed(generation: Generation) -> bool:
    return generation.finish_reason == "length"


def _is_good(job: StressJob, generation: Generation) -> bool:
    if not _completed(generation) or generation.ttft_s is None:
        return False
    return generation.ttft_s <= job.slo_ttft_s and (generation.tpot_s or 0.0) <= job.slo_tpot_s


def _wait_s(generation: Generation) -> float:
    """TTFT, or how long the request has waited for it when the load ended."""
    if generation.ttft_s is not None:
        return generation.ttft_s
    return (generation.finished or generation.submitted) - generation.submitted


def _percentiles(name: str, values: Sequence[float]) -> Row:
    return {f"{name}_{word}_s": float(np.quantile(values, q)) if values else None for word, q in _QUANTILES}
