"""Compile ahead: what just-in-time backends need for a file of cells, one process a core, before anything is measured.

    python -m attention.warm --cells attention/cells/hopper.yaml --out compiled.json [--backends flashinfer:fa2,...]
        [--jobs 16] [--budget-s 180]

Compiled code lands in the caches of the libraries (attention/jit.py counts them), where probes and benches find it.
FlashInfer compiles in `plan`; the others at the first run of a case. A module that does not compile, or takes longer
than the time allows, is a row with its error. The file gets {"rows": [...], "before": ..., "after": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attention import jit
from attention.cases import AttentionCase
from attention.errors import UserError
from attention.isolate import in_workers, short, worker

#: Backends that compile at first use, the slowest first: a job of minutes that starts last ends last.
COMPILING = ("flashinfer:fa3", "flashinfer:fa2", "flashinfer:xqa", "flex_attention:triton", "triton:paged")
_COMMAND = (sys.executable, "-m", "attention.warm", "--worker")


@dataclass(frozen=True)
class Compiled:
    """One case of one backend: how long its first use took, and FlashInfer's modules by name."""

    backend: str
    case_id: str
    seconds: float | None = None
    modules: tuple[str, ...] = ()
    error: str | None = None


def distinct(backend: str, cases: Sequence[AttentionCase]) -> list[AttentionCase]:
    """The cases that compile different code, as far as fields of a case tell; the first of each kind."""
    kinds: dict[tuple[Any, ...], AttentionCase] = {}
    for one in cases:
        if backend == "flashinfer:xqa" and one.phase != "decode":
            continue
        kind: tuple[Any, ...] = (one.head_dim_qk, one.head_dim_vo, one.dtype, one.kv_dtype, one.window[0] is not None)
        kind += (one.softcap is not None, one.alibi, one.sinks)
        if not backend.startswith("flashinfer"):
            kind += (one.phase == "decode", one.layout, one.window, one.softcap, one.causal, one.custom_mask)
        if backend not in ("flashinfer:fa2", "flashinfer:fa3"):  # these have one module for all phases and layouts
            kind += (one.page_size, one.heads_q, one.heads_kv)
        kinds.setdefault(kind, one)
    return list(kinds.values())


def compile_all(
    backends: Sequence[str],
    cases: Sequence[AttentionCase],
    *,
    device: str,
    jobs: int,
    timeout_s: float = 240.0,
    budget_s: float | None = None,
) -> list[Compiled]:
    """A row for every backend and kind of case, `jobs` processes side by side."""
    deadline = None if budget_s is None else time.monotonic() + budget_s
    work = {
        f"{name} {one.model_dump_json()}": (name, one)
        for name in backends
        for one in distinct(name, [c for c in cases if c.execution == "eager"])
    }
    names = list(work)

    def some(part: Sequence[str]) -> list[Compiled]:
        found = in_workers(_COMMAND, {"device": device}, part, timeout_s=timeout_s, deadline=deadline)
        return [
            Compiled(*_id(work[one.name]), one.said.get("seconds"), tuple(one.said.get("modules", ())), one.error)
            for one in found
        ]

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return [row for rows in pool.map(some, [names[i::jobs] for i in range(min(jobs, len(names)))]) for row in rows]


def _id(of: tuple[str, AttentionCase]) -> tuple[str, str]:
    return of[0], of[1].case_id


def _worker() -> None:
    with worker() as (task, channel):
        for name in task["names"]:
            channel.at(name)
            backend, _, text = name.partition(" ")
            # Ninja would start a compiler a core in each of as many processes. A module of fa3 takes minutes alone.
            os.environ["MAX_JOBS"] = "4" if backend == "flashinfer:fa3" else "2"
            started = time.perf_counter()
            try:
                modules = _compiled(backend, AttentionCase.model_validate_json(text), task["device"])
                channel.done(name, seconds=round(time.perf_counter() - started, 2), modules=modules)
            except Exception as error:
                channel.done(name, error=short(error))


def _compiled(backend: str, case: AttentionCase, device: str) -> list[str]:
    """Plan (and run) a case: the modules that FlashInfer built or loaded. UserError for what the rules refuse."""
    import torch

    from attention.backends import create
    from attention.replay.problems import make

    made = create(backend, device)
    if reasons := made.check(case):
        raise UserError("; ".join(map(str, reasons)))
    if backend.startswith("flashinfer"):
        from attention.backends.flashinfer_jit import warm

        return list(warm(backend, [case], device))
    problem = make(case, "normal", 1, device=device)
    with torch.inference_mode():
        made.plan(problem.batch, problem.spec).run(problem.q_THD, problem.k, problem.v)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return []


def main() -> int:
    if "--worker" in sys.argv[1:]:
        _worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backends", default=",".join(COMPILING), help="comma-separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--budget-s", type=float)
    options = parser.parse_args()
    from attention.cells import load_cells

    try:
        cases = list(dict.fromkeys(probe.case for probe in load_cells(options.cells)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before = jit.outputs()
    rows = compile_all(
        options.backends.split(","), cases, device=options.device, jobs=options.jobs, budget_s=options.budget_s
    )
    document = {"before": before, "after": jit.outputs(), "rows": [asdict(row) for row in rows]}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        seconds = [row.seconds for row in mine if row.seconds is not None]
        print(f"{backend:24} {len(seconds)} of {len(mine)}, slowest {max(seconds, default=0):.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
