"""`bench`: what stdin asks for, a stress run, or the host overhead of `run`."""

from __future__ import annotations

import argparse
import json
import sys

from attention.errors import UserError
from attention.flags import check_count
from attention.job import BenchJob, StressJob, write_result
from attention.matrix import check_device
from attention.verbs.common import job_of


def bench(args: argparse.Namespace) -> int:
    if args.what == "dispatch":
        return _bench_dispatch(args)
    if args.what == "stress":
        return _bench_stress(args)
    from attention import bench

    bench.main(job_of(args, BenchJob))
    return 0


def _bench_stress(args: argparse.Namespace) -> int:
    from attention import stress

    job = job_of(args, StressJob)
    write_result(args.out, stress.run(job, lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def _bench_dispatch(args: argparse.Namespace) -> int:
    """Exit 1 when a captured graph has another number of nodes than the plain call's, or other kernels."""
    from attention import bench_dispatch
    from attention.backends import expand
    from attention.cases import parse_batch
    from attention.matrix import declared_reasons
    from attention.model_config import resolve_dtype

    check_device(args.device)
    check_count("--calls", args.calls)
    batches, dtype = tuple(args.batch or ("q1s64", "q16")), resolve_dtype(args.dtype, args.device)
    for batch in batches:
        parse_batch(batch)
    rows = []
    for wish in args.backend or ("torch_sdpa",):
        for name in expand(wish):
            for case in bench_dispatch.cases(batches, dtype, bench_dispatch.PAGE_SIZES.get(name, 16)):
                # A family's kernels that cannot run here are passed over; one that was named must run.
                if name != wish and (reasons := declared_reasons(name, case, device=args.device)):
                    print(f"left out: {name} {case.case_id}: {reasons[0]}", file=sys.stderr)
                    continue
                rows.append(bench_dispatch.measure(name, case, device=args.device, calls=args.calls))
    if not rows:
        raise UserError(f"bench dispatch: none of {', '.join(args.backend)} runs on {args.device}; see above")
    print(json.dumps(bench_dispatch.document(rows), indent=1) if args.json else "\n".join(bench_dispatch.table(rows)))
    return 1 if any(row.failed for row in rows) else 0
