"""Compile ahead: what just-in-time backends need for a file of cells, before anything is measured.

    python -m attention.warm --cells attention/cells/hopper.yaml --out compiled.json [--backends flashinfer:fa2,...]
        [--jobs 16] [--budget-s 180] [--resume]

It needs a GPU. Compiled code lands in the caches of the libraries (attention/jit.py counts them), where probes and
benches find it.
FlashInfer compiles in `plan`, one module a job; the others at the first run of a case. What declared rules refuse is
no job. A module that does not compile, or takes longer than the time allows, is a row with its error. The file is
written anew after each row: {"before", "after", "refused", "counts", "rows"}. Exit 3: the time was spent before all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from attention import STARTED, jit
from attention.cases import AttentionCase
from attention.errors import UserError, exit_code, is_file
from attention.flags import check_count, check_seconds
from attention.isolate import NOT_RUN, Outcome, in_workers, short, worker
from attention.replaced import replaced
from attention.yaml_file import read_json


@dataclass(frozen=True)
class Share:
    """How many workers a backend may have at a time, and how many cores each compiles on (ninja's MAX_JOBS)."""

    workers: int
    cores: int = 1


#: Backends that compile at first use, the longest first, so that what is left at the end is short: on a core, about
#: 640 s a module of fa3, 190 s of fa2, 40 s of xqa, 10 s a case of Triton. Shares are of 16 cores; none has all.
COMPILING = {
    "flashinfer:fa3": Share(3, cores=4),
    "flashinfer:fa2": Share(2, cores=2),
    "flashinfer:xqa": Share(3, cores=2),
    "flex_attention:triton": Share(4),
    "triton:paged": Share(4),
}
_COMMAND = (sys.executable, "-m", "attention.warm", "--worker")


@dataclass(frozen=True)
class Compiled:
    """One kind of code of one backend: how long its first use took, and seconds of FlashInfer's modules by name."""

    backend: str
    case_id: str
    kind: str
    seconds: float | None = None
    modules: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def kind_of(backend: str, case: AttentionCase) -> str:
    """What of a case decides which code is compiled, as far as its fields tell."""
    fields: dict[str, Any] = {
        "dims": (case.head_dim_qk, case.head_dim_vo),
        "dtype": (case.dtype, case.kv_dtype),
        "window": case.window[0] is not None,
    }
    if backend == "flashinfer:xqa":
        fields |= {"page": case.page_size, "ratio": case.gqa_ratio, "sinks": case.sinks, "softcap": case.softcap}
    elif backend.startswith("flashinfer:"):  # one module for all phases, layouts, pages and masks
        fields |= {"softcap": case.softcap is not None, "alibi": case.alibi, "sinks": case.sinks}
    else:
        fields |= {
            "features": (case.softcap, case.alibi, case.sinks, case.causal, case.custom_mask),
            "window": case.window,
            "decode": case.phase == "decode",
            "place": (case.layout, case.page_size),
            "heads": (case.heads_q, case.heads_kv),
        }
    return json.dumps(fields, sort_keys=True)


def distinct(backend: str, cases: Sequence[AttentionCase]) -> list[AttentionCase]:
    """The cases that compile different code; the first of each kind."""
    kinds: dict[str, AttentionCase] = {}
    for one in cases:
        kinds.setdefault(kind_of(backend, one), one)
    return list(kinds.values())


def pending(compiled: Path | None) -> Callable[[str, AttentionCase], bool]:
    """Whether a case of a backend would compile at its first run, by the file of an earlier `attention.warm`.

    Without one, or where the caches hold less than it says (another machine), whatever compiles is pending.
    UserError for a file that is not there.
    """
    if compiled is not None and not is_file(compiled):
        raise UserError(
            f"--compiled {compiled}: no such file; write it with `python -m attention.warm --out {compiled}`"
        )
    rows = [row for row in earlier_rows(compiled) if row.error is None] if compiled is not None else []
    there = {(row.backend, row.kind) for row in rows}
    return lambda backend, case: backend in COMPILING and (backend, kind_of(backend, case)) not in there


def earlier_rows(compiled: Path) -> list[Compiled]:
    """Rows of a file whose compiled code is still in the caches; none of another machine's, or without the file.

    UserError for a file of something else.
    """
    if not is_file(compiled):
        return []
    document, here = read_json(compiled), jit.outputs()
    try:
        rows = [Compiled(**row) for row in document["rows"]]
        is_here = all(here.get(name, 0) >= number for name, number in document["after"].items())
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{compiled}: not written by `python -m attention.warm` ({type(error).__name__})") from error
    return rows if is_here else []


def jobs_of(
    backends: Sequence[str], cases: Sequence[AttentionCase], device: str
) -> tuple[dict[str, dict[str, AttentionCase]], dict[str, int]]:
    """By backend, the distinct cases that its declared rules allow, by kind; and how many kinds they refuse."""
    from attention.matrix import declared_reasons

    eager = [case for case in cases if case.execution == "eager"]
    wanted: dict[str, dict[str, AttentionCase]] = {}
    refused: dict[str, int] = {}
    for name in backends:
        allowed = [case for case in eager if not declared_reasons(name, case, device=device)]
        wanted[name] = {kind_of(name, case): case for case in distinct(name, allowed)}
        refused[name] = len({kind_of(name, case) for case in eager} - set(wanted[name]))
    return wanted, refused


def compile_all(
    wanted: dict[str, dict[str, AttentionCase]],
    *,
    device: str,
    jobs: int,
    timeout_s: float = 600.0,
    deadline: float | None = None,
    heard: Callable[[Compiled], None] = lambda row: None,
    command: Sequence[str] = _COMMAND,
) -> list[Compiled]:
    """A row for every backend and kind, on `jobs` cores; `heard` gets each at once. `deadline` is of `monotonic`.

    A worker of FlashInfer compiles one module; the others, whose cases take seconds, go through their part of all.
    """
    rows: list[Compiled] = []
    lock, stopped = Lock(), Event()
    longest_first = sorted(wanted, key=lambda name: list(COMPILING).index(name) if name in COMPILING else -1)
    lanes = {name: _lanes(name, list(wanted[name]), jobs) for name in longest_first}
    running: dict[Future[None], tuple[str, int]] = {}

    def one(backend: str, kinds: Sequence[str], cores: int) -> None:
        names = {f"{backend} {wanted[backend][kind].model_dump_json()}": kind for kind in kinds}

        def hear(found: Outcome) -> None:
            kind = names[found.name]
            said = found.said
            row = Compiled(backend, wanted[backend][kind].case_id, kind, **said, error=found.error)
            with lock:
                rows.append(row)
                heard(row)

        task = {"device": device, "cores": cores}
        in_workers(command, task, list(names), timeout_s=timeout_s, deadline=deadline, stopped=stopped, heard=hear)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool, ExitStack() as ends:
        ends.callback(stopped.set)  # before the pool waits: Ctrl-C ends its workers
        while any(lanes.values()) or running:
            for backend, waiting in lanes.items():
                share = share_of(backend, jobs)
                while (
                    waiting
                    and [name for name, _ in running.values()].count(backend) < share.workers
                    and sum(taken for _, taken in running.values()) + share.cores <= jobs
                ):
                    running[pool.submit(one, backend, waiting.pop(0), share.cores)] = (backend, share.cores)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                future.result()
    return rows


def share_of(backend: str, jobs: int) -> Share:
    """A backend's share of `jobs` cores: twice the workers on 32; on few cores, a third of them a worker at most."""
    share = COMPILING.get(backend, Share(4))
    return Share(share.workers * max(1, jobs // 16), min(share.cores, max(1, jobs // 3)))


def _lanes(backend: str, kinds: list[str], jobs: int) -> list[list[str]]:
    """What each worker of a backend goes through."""
    if backend.startswith("flashinfer:"):
        return [[kind] for kind in kinds]
    workers = share_of(backend, jobs).workers
    return [kinds[i::workers] for i in range(min(workers, len(kinds)))]


def counts(rows: Sequence[Compiled]) -> dict[str, dict[str, int]]:
    """Backend -> how many compiled, failed, and were not reached."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        status = "compiled" if row.error is None else "not run" if row.error == NOT_RUN else "failed"
        found.setdefault(row.backend, Counter())[status] += 1
    return {name: dict(one) for name, one in found.items()}


def _worker() -> None:
    with worker() as (task, channel):
        for name in task["names"]:
            channel.at(name)
            backend, _, text = name.partition(" ")
            # Ninja and Inductor would start a compiler a core, each in its own process.
            os.environ["MAX_JOBS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(task["cores"])
            started = time.perf_counter()
            try:
                modules = _compiled(backend, AttentionCase.model_validate_json(text), task["device"])
                channel.done(name, seconds=round(time.perf_counter() - started, 2), modules=modules)
            except Exception as error:
                channel.done(name, error=short(error))


def _compiled(backend: str, case: AttentionCase, device: str) -> dict[str, float]:
    """Plan (and run) a case: seconds of the modules that FlashInfer built or loaded, by name. UserError for what the
    rules refuse."""
    import torch

    from attention.backends import create
    from attention.replay.problems import make

    made = create(backend, device)
    if reasons := made.check(case):
        raise UserError("; ".join(map(str, reasons)))
    if backend.startswith("flashinfer"):
        from attention.backends.flashinfer_jit import warm

        return {name: round(seconds, 2) for name, seconds in warm(backend, [case], device).items()}
    problem = make(case, "normal", 1, device=device)
    with torch.inference_mode():
        made.plan(problem.batch, problem.spec).run(problem.q_THD, problem.k, problem.v)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return {}


def main() -> int:
    if "--worker" in sys.argv[1:]:
        _worker()
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m attention.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=Path, required=True, help="cases (YAML or JSON), as for `attention probe`")
    parser.add_argument("--out", type=Path, required=True, help="a .json file of what was compiled")
    parser.add_argument("--backends", default=",".join(COMPILING), help="comma-separated")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--budget-s", type=float, help="seconds for all; what is left is not run")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of --out whose code is in the caches; what failed is tried again",
    )
    options = parser.parse_args()
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    from attention.backends import chosen
    from attention.cells import load_cells
    from attention.matrix import check_device

    check_count("--jobs", options.jobs)
    check_seconds("--budget-s", options.budget_s, or_none=True)
    check_device(options.device)
    cases = list(dict.fromkeys(probe.case for probe in load_cells(options.cells)))
    wanted, refused = jobs_of(chosen(options.backends), cases, options.device)
    rows = [row for row in earlier_rows(options.out) if row.error is None] if options.resume else []
    for row in rows:
        wanted.get(row.backend, {}).pop(row.kind, None)
    before = jit.outputs()

    def write() -> None:
        document = {"before": before, "after": jit.outputs(), "refused": refused, "counts": counts(rows)}
        with replaced(options.out) as fresh:
            fresh.write_text(json.dumps({**document, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")

    def heard(row: Compiled) -> None:
        rows.append(row)
        if row.error != NOT_RUN:  # those come all at once, and are written at the end
            write()

    deadline = None if options.budget_s is None else STARTED + options.budget_s
    compile_all(wanted, device=options.device, jobs=options.jobs, deadline=deadline, heard=heard)
    write()
    for backend, one in counts(rows).items():
        seconds = [row.seconds for row in rows if row.backend == backend and row.seconds is not None]
        total = f"{one.get('compiled', 0)} of {sum(one.values())}"
        print(f"{backend:24} {total}, slowest {max(seconds, default=0):.1f} s, {refused.get(backend, 0)} refused")
    return 3 if any(row.error == NOT_RUN for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
