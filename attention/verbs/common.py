"""What several verbs share: a job or flags in, rows of evidence and lines of progress out."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import Any

from attention.errors import UserError
from attention.job import BenchJob, Evidence, Setup, read_job
from attention.lifetime import die_with_parent
from attention.matrix import check_device


def job_of(args: argparse.Namespace, kind: type[Any]) -> Any:
    if args.job is not None:
        die_with_parent()
    if args.job is None or (args.out is None and kind is not BenchJob):
        raise UserError(f"{args.verb} needs --job FILE and --out DIR")
    job = read_job(args.job, kind)
    check_device(job.setup.device)
    return job


def setup_of(args: argparse.Namespace) -> Setup:
    check_device(args.device)
    return Setup(model=args.model, policy=args.policy, device=args.device)


def write_evidence(evidence: Evidence, table: str, rows: list[dict[str, Any]], fingerprint_id: str, model: str) -> None:
    from attention.fingerprint import node
    from attention.schemas import write_rows

    common = {
        "fingerprint_id": fingerprint_id,
        "node": node(),
        "gpu": evidence.gpu,
        "model": model,
        "side": evidence.side,
        "time": datetime.now(UTC),
    }
    write_rows(evidence.lake, table, ({**common, **row} for row in rows), release_id=evidence.release_id)


def progress_of(what: str) -> Any:
    """A line every tenth of the work on stderr, which callers show or log."""
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        if not total:
            return
        if done * 10 // total > shown or done == total:
            shown = done * 10 // total
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return tell
