"""Survey of a matrix: every backend on every cell of a traffic mix, in turns, on one machine.

    found = run(Plan("cpu", load_matrix("cpu"), load_mix("chat"), "cpu"), lake=lake_dir(), work=folder, say=print)

One resident worker a backend; in each block all take a turn forwards and one backwards, with the machine's ceilings
between the blocks. What is refused, crashes or hangs is a row. Rows go to the lake under a release id of their own,
case by case, so that a survey that is killed keeps what it measured.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attention.cases import AttentionCase
from attention.errors import UserError
from attention.job import BenchJob, Setup
from attention.schemas import write_rows
from data.baseline_matrix import BaselineMatrix, MatrixCell, cells, covered
from data.environment import Environment, load_environment
from data.mix import Mix
from data.requests import Family
from gates.selection import Measured, layout_of
from tasks import first_calls
from tasks.environment import MeasureError
from tasks.files import write_atomically
from tasks.measurement import Contender, Crew, Run, survey
from tasks.perf_rows import Cell, Who, backend_row, ceiling_rows, sample_rows

Say = Callable[[str], None]


#: Outcomes of a worker that may have been bad luck: measured once more before they count.
_ONCE_MORE = ("crashed", "illegal_access")


@dataclass(frozen=True)
class Plan:
    """What to survey, where, and for how long."""

    name: str  # of the matrix
    matrix: BaselineMatrix
    mix: Mix
    gpu: str  # as waves spell it; `cpu` without one
    backends: tuple[str, ...] = ()  # default: those of the matrix
    blocks: int = 6
    min_block_s: float = 0.01
    with_startup: bool = False
    budget_s: float | None = None


@dataclass(frozen=True)
class Survey:
    """What was measured: rows of perf_backends, and what the selection chooses from."""

    release_id: str
    device_name: str
    rows: tuple[dict[str, Any], ...]
    measured: tuple[Measured, ...]
    num_left_out: int  # cells, for want of time
    covered: dict[Family, float]  # share of each family's work that lies in the buckets measured


def run(plan: Plan, *, lake: Path, work: Path, say: Say) -> Survey:
    """Raises UserError for a mix of which the matrix leaves no cell, and where no worker can start."""
    started = time.monotonic()
    names = list(plan.backends or plan.matrix.contenders())
    wanted = cells(plan.matrix, plan.mix)
    device = "cpu" if plan.gpu == "cpu" else "cuda"
    setup = setup_of_shape(wanted[0].case, names, device, work)
    environment = load_environment("current")
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    release_id = f"baseline-{plan.name}-{plan.mix.name}-{when}-{secrets.token_hex(2)}"
    say(f"{release_id}: {len(names)} backends on {len(wanted)} cells")
    out = _Rows(lake, release_id, plan.gpu)
    contenders = [Contender(name, BenchJob(setup=setup), environment, backend=name) for name in names]
    found: list[dict[str, Any]] = []
    measured: list[Measured] = []
    num_done = 0
    with Crew(contenders, work) as crew:
        device_name = _first_ready(crew, names)
        say(f"workers ready on {device_name}")
        for one in wanted:
            if plan.budget_s is not None and time.monotonic() - started > plan.budget_s:
                say(f"budget of {plan.budget_s:g} s spent: {len(wanted) - num_done} cells are left out")
                break
            taken = survey(crew, one.case, blocks=plan.blocks, min_s=plan.min_block_s)
            if any(lost.outcome in _ONCE_MORE for lost in taken.lost.values()):
                say("a worker was lost: once more, in a fresh one")
                taken = survey(crew, one.case, blocks=plan.blocks, min_s=plan.min_block_s)
            rows = _write(out, crew, one, taken, plan.mix.name)
            found += rows
            measured += _measured(one, taken, rows)
            num_done += 1
            say(f"cell {num_done} of {len(wanted)}: {where(one.case)}: {_told(rows)}")
    if plan.with_startup:
        left_s = math.inf if plan.budget_s is None else plan.budget_s - (time.monotonic() - started)
        _startup(out, names, [one.case for one in wanted], device, environment, left_s, say)
    left_out = len(wanted) - num_done
    whole = complete(wanted, measured)
    families = dict.fromkeys(bucket.family for bucket in plan.mix.buckets())
    shares = dict.fromkeys(families, 0.0) | covered([one for one in wanted if _is_in(one, whole)])
    return Survey(release_id, device_name, tuple(found), tuple(whole), left_out, shares)


def complete(wanted: Sequence[MatrixCell], measured: Sequence[Measured]) -> list[Measured]:
    """What the selection may choose from: the buckets of which some backend measured every batch in that layout and
    execution. A choice from a part of a bucket's batches would be another one."""
    needed: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for one in wanted:
        needed[one.bucket.shape_bucket, layout_of(one.case), one.case.execution].add(one.case.case_id)
    for row in measured:
        found[_place(row)].add(row.case_id)
    return [row for row in measured if found[_place(row)] == needed[_place(row)]]


def _place(row: Measured) -> tuple[str, str, str]:
    return row.shape_bucket, row.layout, row.execution


def _is_in(one: MatrixCell, measured: Sequence[Measured]) -> bool:
    return any(row.case_id == one.case.case_id for row in measured)


def setup_of_shape(case: AttentionCase, names: Sequence[str], device: str, work: Path) -> Setup:
    """A model of the matrix's shape without weights, and a policy that names all backends: kernels need no more."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": case.heads_q * case.head_dim_qk,
        "num_attention_heads": case.heads_q,
        "num_key_value_heads": case.heads_kv,
        "head_dim": case.head_dim_qk,
    }
    write_atomically(work / "model" / "config.json", json.dumps(config, indent=1))
    policy = {"attention_policy": {"mode": "preferred-with-fallback", "preferred": list(names), "fallback": ["math"]}}
    write_atomically(work / "policy.yaml", json.dumps(policy, indent=1))  # JSON is YAML
    threads = max(1, (os.cpu_count() or 1) // 2) if device == "cuda" else 1
    return Setup(
        model=work / "model", policy=work / "policy.yaml", device=device, dtype=case.dtype, num_threads=threads
    )


def _first_ready(crew: Crew, names: Sequence[str]) -> str:
    """The device's name, once all workers have loaded; one that cannot is told of when it is asked."""
    found, why = None, ""
    for name in names:
        try:
            found = crew.worker(name).device_name
        except MeasureError as error:
            why = str(error)
    if found is None:
        raise UserError(f"no backend's worker can start here: {why}")
    return found


class _Rows:
    """Writes rows of one survey."""

    def __init__(self, lake: Path, release_id: str, gpu: str) -> None:
        self._lake, self._release_id = lake, release_id
        self._common = {"node": socket.gethostname(), "gpu": gpu, "model": "", "side": "candidate"}

    def write(self, table: str, rows: Sequence[dict[str, Any]]) -> None:
        common = {**self._common, "time": datetime.now(UTC)}
        write_rows(self._lake, table, ({**common, **row} for row in rows), release_id=self._release_id)


def _write(out: _Rows, crew: Crew, one: MatrixCell, taken: Run, mix: str) -> list[dict[str, Any]]:
    cell = Cell("kernel_s", one.bucket, one.case, one.calls)
    rows, samples = [], []
    who = None
    for name in crew.contenders:
        try:
            worker = crew.worker(name)
        except MeasureError:  # it died on this case and does not come back: its outcome is in the run
            identity, device_name = "", ""
        else:
            identity, device_name = worker.fingerprint_id, worker.device_name
        who = Who("candidate", identity, name, device_name)
        rows.append(backend_row(cell, taken, name, who, mix))
        samples += sample_rows(cell, taken, name, who)
    out.write("perf_samples", samples)
    out.write("perf_backends", rows)
    if who is not None:
        out.write("perf_ceilings", ceiling_rows(cell, taken, who))
    return rows


def _measured(one: MatrixCell, taken: Run, rows: Sequence[dict[str, Any]]) -> list[Measured]:
    """What the selection may choose from; a figure that no machine reaches is not among it."""
    return [
        Measured(
            backend=row["backend"],
            family=one.bucket.family,
            case_id=one.case.case_id,
            shape_bucket=one.bucket.shape_bucket,
            layout=layout_of(one.case),
            weight=one.bucket.weight,
            calls=one.calls,
            rounds=tuple(taken.block_medians(row["backend"])),
            execution=one.case.execution,
        )
        for row in rows
        if row["outcome"] == "measured"
    ]


def where(case: AttentionCase) -> str:
    """`decode 64q1s4k paged_nhd/16 cuda_graph`."""
    pages = "" if case.page_size is None else f"/{case.page_size}"
    return f"{case.phase} {case.batch} {case.layout}{pages} {case.execution}"


def _told(rows: Sequence[dict[str, Any]]) -> str:
    """`fastest torch_sdpa:flash 41.2 us, 0.31 of its limit; 2 of 10 without a figure`."""
    good = [row for row in rows if row["outcome"] == "measured"]
    lost = f"{len(rows) - len(good)} of {len(rows)} without a figure"
    if not good:
        return lost
    best = min(good, key=lambda row: float(row["p50_s"]))
    said = f"fastest {best['backend']} {1e6 * best['p50_s']:.1f} us, {best['limit_ratio']:.2f} of its limit"
    return said if len(good) == len(rows) else f"{said}; {lost}"


def _startup(
    out: _Rows,
    names: Sequence[str],
    cases: Sequence[AttentionCase],
    device: str,
    environment: Environment,
    left_s: float,
    say: Say,
) -> None:
    """Some side by side, where there are cores for their compilers. What is not done when the time is over is a row
    that says so."""
    deadline = time.monotonic() + left_s

    def one(name: str) -> list[dict[str, Any]]:
        return first_calls.cold_and_warm(name, first_calls.one_a_phase(cases), device, environment.python, deadline)

    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 4)) as pool:
        coming = {pool.submit(one, name): name for name in names}
        for done in as_completed(coming):
            rows = done.result()
            out.write("perf_startup", rows)
            say(f"first call of {coming[done]}: {first_calls.told(rows)}")
