"""Stage `baseline`: prefill, decode and extend apart, champion and candidate interleaved on one machine.

Resident workers, one in each environment, are asked in turns A B B A: a drift of the machine hits both alike. First
the champion is measured against itself: what differs there is noise, today's floor of this machine, and nothing below
it is called a difference. Then the cells: the heaviest buckets of the traffic's mix, weighed by their share of the
attention work of their family. Kernel time per cell beside the machine's ceilings, and where the plan wants it the
model's own TTFT (one prefill) and TPOT (one decode step) in the bucket of the shortest contexts, first calls of fresh
processes, and a stress run. An ambiguous cell is measured longer, within the stage's budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from attention.cases import AttentionCase
from attention.job import BenchJob
from attention.model_config import read_config, resolve_dtype
from data.candidate import OWN
from data.mix import load_mix
from data.plan import TrafficScale
from data.requests import MIN_OUTPUT, MIN_TOKENS, Bucket, Family, RequestLength, lengths, scale, shape_weights
from gates import baseline as gate
from tasks import first_calls, stress
from tasks.context import SIDES, Context, Side, StageOutcome
from tasks.measurement import Compared, Contender, Crew, Effort, Metric, Pair, compare, noise_floor
from tasks.perf_rows import Cell, Who, backend_row, ceiling_rows, pair_row, sample_rows

TWIN = "champion-again"
_FAMILIES: tuple[tuple[Family, Metric | None], ...] = (("prefill", "ttft_s"), ("decode", "tpot_s"), ("extend", None))


def run(context: Context) -> StageOutcome:
    """Measure all cells, write samples and cells, judge."""
    plan = context.plan.baseline
    traffic = request_lengths(context)
    contenders = [_contender(context, side, side) for side in SIDES]
    contenders.append(_contender(context, TWIN, "champion"))
    with Crew(contenders, context.work) as crew:
        cells = list(plan_cells(context, traffic))  # while the workers load
        crew.wait_ready()
        floor = _floor(context, crew, cells)
        _compare(context, crew, cells, floor)
        resolved = {side: crew.worker(side).resolved for side in SIDES}
    if plan.startup:  # with the machine to themselves
        first_calls.run(context, [cell.case for cell in cells if cell.metric == "kernel_s"], resolved)
    stress.run(context, traffic)
    report = gate.judge(context.lake, context.release_id, context.plan)
    return StageOutcome(report, {"cells": len(cells), "aa_floor": floor})


def request_lengths(context: Context) -> list[RequestLength]:
    """Lengths of the traffic that weighs the cells, scaled as the plan plays it: a named mix, or the candidate's own
    traffic (`mix: own`)."""
    name, plan = context.candidate.candidate.traffic.mix, context.plan.traffic
    if name != OWN:
        return [scaled(one, plan) for one in load_mix(name).lengths()]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(context.cell.model_path)
    return lengths(scale(context.candidate.traffic(), plan, tokenizer), tokenizer)


def scaled(one: RequestLength, plan: TrafficScale) -> RequestLength:
    """A request's lengths as the plan plays them; what was cached stays cached in proportion."""
    by = plan.divide_lengths_by
    prompt = max(min(MIN_TOKENS, one.prompt_tokens), one.prompt_tokens // by)
    output = max(MIN_OUTPUT, one.output_tokens // by)
    if plan.max_output_tokens is not None:
        output = min(output, plan.max_output_tokens)
    cached = min(one.cached_tokens // by, prompt - 1)
    return RequestLength(one.custom_id, prompt, output, cached_tokens=cached, count=one.count)


def plan_cells(context: Context, traffic: Sequence[RequestLength]) -> Iterator[Cell]:
    """The heaviest buckets of each family; one of prefill and of decode with the model too."""
    plan = context.plan.baseline
    buckets = [b for b in shape_weights(traffic) if b.kv_len <= plan.max_kv_len]
    for family, metric in _FAMILIES:
        heaviest = [b for b in buckets if b.family == family][: plan.cells_per_family]
        batches = plan.decode_batches if family == "decode" else (1,)
        for bucket in heaviest:
            for batch in batches:  # which share the bucket's work
                part = replace(bucket, weight=bucket.weight / len(batches))
                yield Cell("kernel_s", part, _case(context, bucket, batch))
        if heaviest and metric is not None and plan.model_steps:
            # The bucket with the shortest contexts of these: where most requests are.
            most = min(heaviest, key=lambda bucket: bucket.kv_len)
            yield Cell(metric, most, _case(context, most, batches[0]))


def _case(context: Context, bucket: Bucket, batch: int) -> AttentionCase:
    config = read_config(context.cell.model_path)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    setup = context.setup("candidate")
    return AttentionCase(
        phase=bucket.family,
        batch=f"{batch}q{bucket.q_len}s{bucket.kv_len}",
        heads_q=heads,
        heads_kv=int(config.get("num_key_value_heads") or heads),
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        dtype=resolve_dtype(setup.dtype, setup.device),
        page_size=setup.page_size,
    )


def _contender(context: Context, name: str, side: Side) -> Contender:
    with_model = context.plan.baseline.model_steps and name != TWIN
    return Contender(name, BenchJob(setup=context.setup(side), with_model=with_model), context.environment(side))


def _who(crew: Crew, side: Side, cell: Cell) -> Who:
    worker = crew.worker(side)
    return Who(side, worker.fingerprint_id, worker.resolved[cell.case.phase], worker.device_name)


def _effort(context: Context, margin: float) -> Effort:
    plan = context.plan.baseline
    deadline = time.monotonic() + plan.budget_s
    return Effort(plan.blocks, plan.max_blocks, plan.processes, margin, plan.min_block_s, deadline)


def _floor(context: Context, crew: Crew, cells: Sequence[Cell]) -> float:
    """The champion against itself, on the heaviest cell of each family."""
    heaviest: dict[str, AttentionCase] = {}
    for cell in cells:
        if cell.metric == "kernel_s":
            heaviest.setdefault(cell.bucket.family, cell.case)
    effort = _effort(context, context.plan.baseline.margin)
    floor = noise_floor(crew, [Pair(case) for case in heaviest.values()], "champion", TWIN, effort)
    context.say(f"baseline: the champion is within {100 * floor:.2g} % of itself")
    return floor


def _compare(context: Context, crew: Crew, cells: Sequence[Cell], floor: float) -> None:
    """Champion beside candidate on all cells, and their rows: samples as they come, the rest once all are judged."""
    how = {"margin": max(context.plan.baseline.margin, floor), "aa_floor": floor}
    by_pair = {Pair(cell.case, cell.metric): cell for cell in cells}

    def heard(one: Compared) -> None:
        cell = by_pair[one.pair]
        first_block = one.num_blocks - one.runs[-1].num_blocks
        rows = [row for side in SIDES for row in sample_rows(cell, one.runs[-1], side, _who(crew, side, cell))]
        context.write("perf_samples", [{**row, "block": row["block"] + first_block} for row in rows])
        context.say(f"baseline: {cell.metric} {cell.bucket.shape_bucket}: {one.num_blocks} blocks, {one.seconds:.1f} s")

    found = compare(crew, list(by_pair), "champion", "candidate", _effort(context, how["margin"]), heard=heard)
    for one in found:
        cell, run = by_pair[one.pair], one.run
        who = {side: _who(crew, side, cell) for side in SIDES}
        mix = context.candidate.candidate.traffic.mix
        context.write("perf_backends", [backend_row(cell, run, side, who[side], mix) for side in SIDES])
        context.write("perf_ceilings", ceiling_rows(cell, run, who["champion"]))
        if one.judged is not None:
            context.write("perf_cells", [pair_row(cell, run, one.judged, how, who["champion"], who["candidate"])])
        context.say(f"baseline: {cell.metric} {cell.bucket.shape_bucket}: {_told(one)}")


def _told(one: Compared) -> str:
    """`SLOW 1.053 (1.041 to 1.065)`, or why there is no verdict."""
    if one.judged is None:
        return "; ".join(f"{name} {answer.outcome}: {answer.error}" for name, answer in one.run.lost.items())
    interval = one.judged.interval
    return f"{one.judged.verdict} {interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
