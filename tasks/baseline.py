"""Stage `baseline`: prefill and decode apart, champion and candidate interleaved on one machine.

Two resident workers, one in each environment, are asked in turns A B B A: a drift of the machine
hits both alike. The cells are the heaviest buckets of the traffic that the plan plays; each bucket's
weight is its share of the traffic's attention work. Kernel time per cell, and where the plan wants it
(`model_steps`), in the bucket of the shortest contexts, the model's own TTFT (one prefill) and TPOT (one
decode step).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention.cases import AttentionCase
from attention.job import BenchCommand, BenchJob
from attention.model_config import read_config, resolve_dtype
from data.requests import Bucket, lengths, scale, shape_weights
from gates import baseline as gate
from gates.statistics import mean_interval
from tasks.context import SIDES, Context, Side, StageOutcome
from tasks.environment import Job, Worker

DECODE_BATCH = 4
SAME_MARGIN = 0.05  # below this a difference on shared cores says nothing


@dataclass(frozen=True)
class Cell:
    """One thing to measure."""

    metric: str
    bucket: Bucket
    case: AttentionCase


def run(context: Context) -> StageOutcome:
    """Measure all cells, write samples and cells, judge."""
    workers: dict[str, Worker] = {side: Worker(_job(context, side), context.work) for side in SIDES}
    try:
        cells = list(plan_cells(context))  # while the workers load
        for worker in workers.values():
            worker.wait_ready()
        for number, cell in enumerate(cells, start=1):
            _measure(context, cell, workers)
            context.say(f"baseline: cell {number} of {len(cells)}: {cell.metric} {cell.bucket.shape_bucket}")
    finally:
        for worker in workers.values():
            worker.close()
    report = gate.judge(context.lake, context.release_id, context.plan)
    return StageOutcome(report, {"cells": len(cells)})


def plan_cells(context: Context) -> Iterator[Cell]:
    """The heaviest buckets of the played traffic, prefill and decode; one of each with the model too."""
    from transformers import AutoTokenizer

    plan = context.plan.baseline
    tokenizer = AutoTokenizer.from_pretrained(context.cell.model_path)
    requests = scale(context.candidate.traffic(), context.plan.traffic, tokenizer)
    buckets = [b for b in shape_weights(lengths(requests, tokenizer)) if b.kv_len <= plan.max_kv_len]
    for family, metric in (("prefill", "ttft_s"), ("decode", "tpot_s")):
        heaviest = [b for b in buckets if b.family == family][: plan.cells_per_family]
        for bucket in heaviest:
            yield Cell("kernel_s", bucket, _case(context, bucket))
        if heaviest and plan.model_steps:
            # The bucket with the shortest contexts of these: where most requests are.
            most = min(heaviest, key=lambda bucket: bucket.kv_len)
            yield Cell(metric, most, _case(context, most))


def _case(context: Context, bucket: Bucket) -> AttentionCase:
    config = read_config(context.cell.model_path)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    batch = f"q{bucket.kv_len}" if bucket.family == "prefill" else f"{DECODE_BATCH}q1s{bucket.kv_len}"
    setup = context.setup("candidate")
    return AttentionCase(
        phase=bucket.family,
        batch=batch,
        heads_q=heads,
        heads_kv=int(config.get("num_key_value_heads") or heads),
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        dtype=resolve_dtype(setup.dtype, setup.device),
        page_size=setup.page_size,
    )


def _job(context: Context, side: Any) -> Job:
    job = BenchJob(setup=context.setup(side), with_model=context.plan.baseline.model_steps)
    return Job(f"bench-{side}", job, context.environment(side))


def _measure(context: Context, cell: Cell, workers: dict[str, Worker]) -> None:
    command = BenchCommand(metric=cell.metric, case=cell.case, min_s=context.plan.baseline.min_block_s)
    samples: dict[str, list[float]] = {side: [] for side in workers}
    rows = []
    for block in range(-1, context.plan.baseline.blocks):  # block -1 warms up and is not counted
        order: tuple[Side, ...] = SIDES if block % 2 else SIDES[::-1]
        for side in order:
            answer = workers[side].ask(command)
            if answer["error"]:
                raise RuntimeError(f"{side} {cell.metric} {cell.case.case_id}: {answer['error']}")
            row = {
                "side": side,
                "fingerprint_id": workers[side].fingerprint_id,
                "backend": workers[side].resolved[cell.case.phase],
                "confirmed_backend": answer["confirmed"],
                "family": cell.bucket.family,
                "case_id": cell.case.case_id,
                "shape_bucket": cell.bucket.shape_bucket,
                "block": block,
            }
            if answer["first_call_s"] is not None:
                rows.append({**row, "metric": "first_call_s", "seconds": answer["first_call_s"]})
            if block >= 0:
                samples[side].append(answer["seconds"])
                rows.append({**row, "metric": cell.metric, "seconds": answer["seconds"]})
    context.write("perf_samples", rows)
    context.write("perf_cells", [_cell_row(cell, samples, workers)])


def _cell_row(cell: Cell, samples: dict[str, list[float]], workers: dict[str, Worker]) -> dict[str, Any]:
    """One row of perf_cells: the ratio is paired by block, its interval on the log scale."""
    champion, candidate = (np.array(samples[side]) for side in ("champion", "candidate"))
    interval = mean_interval(np.log(candidate / champion).tolist())
    low, ratio, high = (math.exp(x) for x in (interval.low, interval.value, interval.high))
    return {
        "side": "candidate",
        "fingerprint_id": workers["candidate"].fingerprint_id,
        "backend": workers["candidate"].resolved[cell.case.phase],
        "champion_backend": workers["champion"].resolved[cell.case.phase],
        "family": cell.bucket.family,
        "metric": cell.metric,
        "case_id": cell.case.case_id,
        "shape_bucket": cell.bucket.shape_bucket,
        "weight": cell.bucket.weight,
        "champion_p50_s": float(np.quantile(champion, 0.5)),
        "candidate_p50_s": float(np.quantile(candidate, 0.5)),
        "candidate_p95_s": float(np.quantile(candidate, 0.95)),
        "candidate_p99_s": float(np.quantile(candidate, 0.99)),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "verdict": verdict(low, high),
        "num_blocks": len(candidate),
    }


def verdict(low: float, high: float) -> str:
    """SLOW or FAST when the whole interval lies beyond the margin, SAME when inside it, else AMBG."""
    if low > 1 + SAME_MARGIN:
        return "SLOW"
    if high < 1 / (1 + SAME_MARGIN):
        return "FAST"
    inside = low >= 1 / (1 + SAME_MARGIN) and high <= 1 + SAME_MARGIN
    return "SAME" if inside else "AMBG"
