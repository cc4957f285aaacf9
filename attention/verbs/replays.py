"""`replay` records one side, `compare` judges two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from attention.errors import UserError
from attention.job import CompareJob, ReplayJob, write_result
from attention.matrix import check_device
from attention.verbs.common import job_of, progress_of, setup_of, write_evidence


def replay(args: argparse.Namespace) -> int:
    if sum(file is not None for file in (args.cases, args.prompts, args.job)) != 1:
        raise UserError("replay takes one of --cases FILE, --prompts FILE and --job FILE, and --out DIR")
    if args.cases is not None:
        from attention.replay.command import record_cases

        return record_cases(args, setup_of(args), progress_of("replay"))
    if args.prompts is not None:
        from attention.replay.prompts import record_prompts

        return record_prompts(args, setup_of(args), progress_of("replay"))
    from attention import startup
    from attention.model import specs_of
    from attention.replay import business, prompts, tensor
    from attention.replay.throughput import Meter
    from attention.replay.truths import Truths, compute

    job: ReplayJob = job_of(args, ReplayJob)
    dispatcher = startup.decide(job.setup, [])
    found = startup.identify(job.setup, dispatcher)
    runner = startup.load(job.setup, dispatcher)
    specs = specs_of(job.setup.model, found.identity.dtype)
    captured = _captured(runner, job, specs, args.out)
    meter = Meter(job.setup.device)
    oracle = meter.oracle(compute)
    truths = Truths(job.tensor.truths, oracle) if job.tensor.truths else None
    sources = tensor.Sources(captured, oracle=truths or oracle, backwards=job.evidence.side == "candidate", meter=meter)
    rows = list(
        tensor.rows(
            job.setup,
            job.tensor,
            specs,
            (found.identity.dtype, "bfloat16"),
            dispatcher.resolved,
            startup.scale_factor(job.setup.fault),
            progress_of("tensor replay"),
            sources,
        )
    )
    throughput = meter.summary(len(rows))
    recorded = prompts.record_side(runner, job, found, args.out, progress_of)
    answers = business.answer(runner, job.business, progress_of("business replay"))
    write_evidence(job.evidence, "tensor_replay", rows, found.id, found.identity.model_id)
    summary = {
        "fingerprint_id": found.id,
        "cases": len(rows),
        "errors": sum("error" in row for row in rows),
        "throughput": throughput.row(),
        "truths": {"computed": truths.num_computed, "read": truths.num_read} if truths else None,
        **recorded,
        "answers": answers.model_dump()["answers"],
    }
    write_result(args.out, summary)
    return 0


def _captured(runner: Any, job: ReplayJob, specs: list[Any], out: Path) -> Any:
    """Activations of the served model, where the plan asks for them."""
    if "activations" not in job.tensor.inputs:
        return {}
    from attention.replay import activations
    from attention.replay.tensor import longest

    path = job.tensor.activations or out / "activations.safetensors"
    num_tokens = longest(job.tensor.max_kv_len)
    return activations.capture(runner, specs, job.model.prompts, job.tensor.seeds[0], num_tokens, path)


def compare(args: argparse.Namespace) -> int:
    if (len(args.recordings), args.job is None) not in ((2, True), (0, False)):
        raise UserError("compare takes two recordings, A and B, or --job FILE and --out DIR")
    if args.recordings:
        from attention.replay import states
        from attention.replay.command import compare_recordings

        check_device(args.device)
        kinds = {folder: states.kind_of(folder) for folder in args.recordings}
        if {"cases", "prompts"} <= set(kinds.values()):
            one, other = (f"{folder} is of {kind}" for folder, kind in kinds.items())
            raise UserError(f"compare: {one}, {other}; name two of a kind")
        if "prompts" not in kinds.values():
            return compare_recordings(args)
        from attention.replay.prompts import compare_prompts

        return compare_prompts(args)
    from attention.replay.prompts import compare_sides

    write_result(args.out, compare_sides(job_of(args, CompareJob)))
    return 0
