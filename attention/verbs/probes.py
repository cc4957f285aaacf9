"""`probe`: the capability probes of a policy, or of a file of cells."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from attention import STARTED
from attention.flags import check_count, check_seconds
from attention.job import ProbeJob, write_result
from attention.matrix import check_device
from attention.verbs.common import job_of, progress_of, setup_of, write_evidence


class ProbeSummary(BaseModel):
    fingerprint_id: str
    requested: dict[str, str]
    resolved: dict[str, str]
    fallbacks: list[dict[str, Any]]
    results: list[dict[str, Any]]


def probe(args: argparse.Namespace) -> int:
    from attention import startup
    from attention.drift import check_place, write_rows
    from attention.probe import unmet

    check_count("--jobs", args.jobs)
    check_seconds("--timeout-s", args.timeout_s)
    check_seconds("--budget-s", args.budget_s, or_none=True)
    if args.cells is not None:
        return _probe_cells(args)
    if args.out and args.out.suffix:
        check_place(args.out)
    job: ProbeJob = (
        job_of(args, ProbeJob) if args.job else ProbeJob(setup=setup_of(args), level="full", timeout_s=args.timeout_s)
    )
    results = startup.probe(
        job.setup,
        job.timeout_s,
        level=job.level,
        backends=backends_of(args, job),
        jobs=args.jobs or _jobs(job.setup.device),
        try_declared=args.try_declared_failures,
    )
    if not args.out and not args.json:
        _show(results)  # before the decision: with no backend left, these rows say why
    dispatcher = startup.decide(job.setup, results)
    found = startup.identify(job.setup, dispatcher)
    summary = ProbeSummary(
        fingerprint_id=found.id,
        requested=dict(dispatcher.requested),
        resolved=dict(dispatcher.resolved),
        fallbacks=[
            {
                "phase": f.phase,
                "from": f.from_backend,
                "to": f.to_backend,
                "reasons": [str(r) for r in f.reasons],
            }
            for f in dispatcher.fallbacks
        ],
        results=[r.model_dump(mode="json") for r in results],
    )
    if job.evidence:
        write_evidence(job.evidence, "probes", [r.row() for r in results], found.id, found.identity.model_id)
    if args.out and args.out.suffix:
        write_rows(args.out, results)
    elif args.out:
        write_result(args.out, summary)
    failed = unmet(results)
    if args.json:
        print(summary.model_dump_json(indent=1))
    elif not args.out:
        print(f"resolved: {', '.join(f'{phase} {name}' for phase, name in dispatcher.resolved.items())}")
        print(_verdict(failed))
    return 1 if failed else 0


def backends_of(args: argparse.Namespace, job: ProbeJob) -> tuple[str, ...] | None:
    """The backends to probe; None for those of the policy."""
    from attention.backends import NAMES, chosen

    if args.backends is not None:
        return chosen(args.backends)
    return None if args.job or job.setup.device != "cpu" else NAMES


def _verdict(failed: list[tuple[str, str]]) -> str:
    """What the exit code of `probe` says."""
    if not failed:
        return "exit 0: every required probe that the declared rules allow here passed"
    return f"exit 1: required and not passed: {', '.join(f'{backend} {probe}' for backend, probe in failed)}"


def _probe_cells(args: argparse.Namespace) -> int:
    """Probe a file of cells: rows, and no decision."""
    from attention.backends import chosen
    from attention.cells import load_cells
    from attention.drift import RowsLog, check_place
    from attention.probe import was_not_reached
    from attention.probe_workers import probe_all
    from attention.warm import pending

    check_device(args.device)
    backends, probes = chosen("all" if args.backends is None else args.backends), load_cells(args.cells)
    is_pending = pending(args.compiled)
    if args.out:
        check_place(args.out)
    earlier = _reached(args.out) if args.resume and args.out else []
    known = {(row.backend, row.probe, row.case) for row in earlier}
    if all((name, probe.name, probe.case) in known for name in backends for probe in probes):
        print(f"{args.out}: has the rows of all these probes already, and stays as it is", file=sys.stderr)
        if args.json:
            print(json.dumps({"results": []}, indent=1))
        return 0
    log = RowsLog(args.out, earlier) if args.out else None
    try:
        results = probe_all(
            backends,
            probes,
            device=args.device,
            timeout_s=args.timeout_s,
            jobs=args.jobs or _jobs(args.device),
            try_declared=args.try_declared_failures,
            by_head_dim=True,
            budget_s=None if args.budget_s is None else args.budget_s - (time.monotonic() - STARTED),
            known=known,
            is_pending=is_pending,
            heard=log.add if log else lambda rows: None,
            progress=progress_of("probes"),
        )
    except KeyboardInterrupt:
        if log:
            print(f"stopped; --out {args.out} --resume goes on with what is left", file=sys.stderr)
        raise
    finally:
        if log:
            log.close()
    if log:
        ended = [row for row in results if row.level == "execute" or row.status != "pass"]
        print(f"{args.out}: {_counts(ended)}", file=sys.stderr)
    if args.json:
        print(json.dumps({"results": [r.model_dump(mode="json") for r in results]}, indent=1))
    elif not args.out:
        _show(results)
        print("a file of cells requires nothing")
    return 3 if any(map(was_not_reached, results)) else 0


def _reached(out: Path) -> list[Any]:
    """Rows of an earlier run but those of probes that it did not reach."""
    from attention.drift import finish_log, read_rows
    from attention.probe import was_not_reached

    finish_log(out)
    rows = read_rows(out) if out.is_file() else []
    lacking = {(row.backend, row.probe, row.case) for row in rows if was_not_reached(row)}
    return [row for row in rows if (row.backend, row.probe, row.case) not in lacking]


def _jobs(device: str) -> int:
    return 4 if device.startswith("cuda") else 2


def _show(results: list[Any]) -> None:
    """A line a row under a header, then how many of each status."""
    rows: list[tuple[str, ...]] = [("backend", "probe", "phase", "level", "required", "status", "reasons")]
    for result in results:
        required, reasons = "yes" if result.required else "no", "; ".join(map(str, result.reasons))
        rows.append((result.backend, result.probe, result.case.phase, result.level, required, result.status, reasons))
    print("\n".join(_aligned(rows)))
    print(f"{len(results)} rows: {_counts(results)}")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines, every column as wide as its widest entry; an empty column is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*kept, strict=True)
    ]


def _counts(results: list[Any]) -> str:
    """How many rows have which status; what declared rules refuse apart from what ran and failed."""
    ended = Counter("refused" if row.level == "static" and row.status == "fail" else row.status for row in results)
    shown = [f"{ended[status]} {status}" for status in ("pass", "fail")]
    return ", ".join([*shown, *(f"{num} {status}" for status, num in ended.items() if status not in ("pass", "fail"))])
