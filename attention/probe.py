"""Startup capability probes: what a backend can really do here, before any traffic meets it.

    python -m attention probe --model PATH --policy PATH [--json]

The document's nine probes, each on three levels kept apart: `static` (declared rules), `construct`
(import, plan) and `execute` (launch, numbers against the oracle, confirmation). Every backend is
probed in a worker process of its own: a crash, a hang or an illegal access becomes a row with a
reason, and the next backend goes on. A failing probe says which dimension failed, never just
"kernel error".
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Execution, Phase
from attention.lifetime import die_with_parent
from attention.matrix import declared_reasons
from attention.reasons import Code, Reason
from attention.replay.figures import compare
from attention.replay.problems import make

Status = Literal["pass", "fail", "unknown", "known_bad"]
Level = Literal["static", "construct", "execute"]

# Sanity limits of a start-up probe, in units of the dtype class's own error. They catch what is
# plainly wrong within seconds; the replay gate, with its calibrated limits, judges the rest.
MAX_RATIO = {"bfloat16": 10.0, "float16": 10.0, "float32": 1000.0}


class Probe(BaseModel):
    """One probe: a case to run and the feature that it stands for."""

    model_config = ConfigDict(frozen=True)

    name: str
    feature: str
    case: AttentionCase
    required: bool = True  # the serving process launches this; its failure excludes the backend


class ProbeResult(BaseModel):
    """One row of `probes`."""

    model_config = ConfigDict(frozen=True)

    backend: str
    probe: str
    level: Level
    feature: str
    required: bool
    case: AttentionCase
    status: Status
    reasons: tuple[Reason, ...] = ()
    confirmed_backend: str | None = None
    max_abs_error: float | None = None
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Columns of the lake's `probes` table."""
        return {
            **self.model_dump(exclude={"case", "reasons", "required"}),
            "case_json": self.case.model_dump_json(),
            "reasons_json": json.dumps([reason.model_dump(mode="json") for reason in self.reasons]),
        }


def probes_of(spec: AttentionSpec, dtype: str, page_size: int) -> list[Probe]:
    """The document's nine probes for one kind of layer of a model."""

    def case(phase: Phase, batch: str, execution: Execution = "eager", **changes: Any) -> AttentionCase:
        fields: dict[str, Any] = {
            "heads_q": spec.heads_q,
            "heads_kv": spec.heads_kv,
            "head_dim_qk": spec.head_dim_qk,
            "head_dim_vo": spec.head_dim_vo,
            "window": spec.window,
            "softcap": spec.softcap,
        }
        return AttentionCase(
            phase=phase,
            batch=batch,
            dtype=dtype,
            page_size=page_size,
            execution=execution,
            **{**fields, **changes},
        )

    feature = "sliding_window" if spec.window != (None, None) else "softcap" if spec.softcap else "causal"
    return [
        Probe(name="short_prefill", feature="prefill", case=case("prefill", "q16")),
        Probe(name="long_prefill", feature="prefill", case=case("prefill", "q512")),
        Probe(name="single_decode", feature="decode", case=case("decode", "q1s257")),
        Probe(name="multi_decode", feature="decode", case=case("decode", "3q1s64_q1s65_q1s500")),
        Probe(
            name="max_head_dim",
            feature="head_dim",
            case=case("decode", "q1s64", head_dim_qk=256, head_dim_vo=256),
            required=False,
        ),
        Probe(name="gqa_mqa", feature="gqa", case=case("prefill", "q33", heads_kv=1), required=False),
        Probe(name="model_mask", feature=feature, case=case("extend", "q31s160")),
        Probe(name="paged_kv", feature="paged_kv", case=case("decode", f"q1s{page_size}_q1s{5 * page_size + 1}")),
        Probe(
            name="graph_or_compile",
            feature="cuda_graph",
            case=case("decode", "4q1s64", execution="cuda_graph"),
            required=False,
        ),
    ]


def run_probe(backend: str, probe: Probe, device: str, scale_factor: float = 1.0) -> Iterator[ProbeResult]:
    """The levels of one probe, in order; a level that fails ends it."""

    def result(level: Level, status: Status, **fields: Any) -> ProbeResult:
        return ProbeResult(
            backend=backend,
            probe=probe.name,
            level=level,
            feature=probe.feature,
            required=probe.required,
            case=probe.case,
            status=status,
            **fields,
        )

    reasons = declared_reasons(backend, probe.case, device=device)
    yield result("static", "fail" if reasons else "pass", reasons=tuple(reasons))
    if reasons:
        return
    started = time.perf_counter()
    problem = make(probe.case, "needle", 7, device=device)
    spec = replace(problem.spec, scale=problem.spec.scale * scale_factor)
    try:
        planned = create(backend, device).plan(problem.batch, spec)
    except Exception as error:
        yield result("construct", "fail", reasons=(_raised(Code.IMPORT_FAILED, "construct", error),))
        return
    yield result("construct", "pass", seconds=time.perf_counter() - started)
    started = time.perf_counter()
    try:
        with torch.inference_mode():
            (out, lse), confirmed = confirm.watch(
                lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
            )
    except Exception as error:
        yield result("execute", "fail", reasons=(_raised(Code.LAUNCH_FAILED, "launch", error),))
        return
    seconds = time.perf_counter() - started
    figures = compare(out, lse, problem.truth, problem.spec.dtype)
    found = list(_numeric(figures.finite_mask_equal, figures.r_rms, probe.case.dtype))
    if confirmed != backend:
        found.append(
            Reason(
                code=Code.UNCONFIRMED,
                dimension="executed operator",
                observed=confirmed,
                allowed=backend,
                source="profiler",
                message=f"asked for {backend}, the execution layer ran {confirmed}",
            )
        )
    yield result(
        "execute",
        "fail" if found else "pass",
        reasons=tuple(found),
        confirmed_backend=confirmed,
        max_abs_error=figures.max_abs if math.isfinite(figures.max_abs) else None,
        seconds=seconds,
    )


def _numeric(finite_equal: bool, r_rms: float, dtype: str) -> Iterator[Reason]:
    limit = MAX_RATIO[dtype]
    if not finite_equal:
        yield Reason(
            code=Code.PAD_POISON,
            dimension="finite mask",
            observed="NaN or Inf where the oracle is finite",
            allowed="finite",
            source="probe",
            message="non-finite output: unused slots hold NaN, so they leak or the kernel overflows",
        )
    elif not r_rms <= limit:
        yield Reason(
            code=Code.NUMERIC_DRIFT,
            dimension="R_rms",
            observed=f"{r_rms:.3g}",
            allowed=f"<= {limit:g}",
            source="probe",
            message="error against the fp64 oracle, in units of the dtype class's own error",
        )


def _raised(code: Code, dimension: str, error: Exception) -> Reason:
    return Reason(
        code=code,
        dimension=dimension,
        observed=type(error).__name__,
        allowed="no exception",
        source="probe",
        message=" ".join(str(error).split())[:400] or type(error).__name__,
    )


class WorkerTask(BaseModel):
    """What a probe worker reads from stdin."""

    backend: str
    device: str
    scale_factor: float
    probes: tuple[Probe, ...]


def probe_all(
    backends: tuple[str, ...],
    probes: list[Probe],
    *,
    device: str,
    scale_factor: float = 1.0,
    timeout_s: float = 120.0,
) -> list[ProbeResult]:
    """All probes of all backends, each backend in a worker process; rows for whatever a worker lost.

    A backend that no declared rule allows here gets its static rows without a process.
    """

    def one(backend: str) -> list[ProbeResult]:
        if all(declared_reasons(backend, p.case, device=device) for p in probes):
            return [next(run_probe(backend, probe, device)) for probe in probes]
        task = WorkerTask(backend=backend, device=device, scale_factor=scale_factor, probes=tuple(probes))
        return _in_worker(task, timeout_s)

    # Two at a time: a worker's cost is mostly its import, and the machine may serve others.
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [result for results in pool.map(one, backends) for result in results]


def _in_worker(task: WorkerTask, timeout_s: float) -> list[ProbeResult]:
    """Run a task in fresh workers until every probe has an outcome; a probe that kills one is a row."""
    results: list[ProbeResult] = []
    left = list(task.probes)
    while left:
        done, why = _worker_run(task.model_copy(update={"probes": tuple(left)}), timeout_s)
        results += done
        # A model with two kinds of layers has each probe twice: the case tells them apart.
        finished = {(r.probe, r.case) for r in done if r.level == "execute" or r.status == "fail"}
        lost = [p for p in left if (p.name, p.case) not in finished]
        if why is not None and lost:
            results.append(_lost(task.backend, lost[0], why))
            lost = lost[1:]
        elif lost:
            raise RuntimeError(f"probe worker of {task.backend} ended well without {lost[0].name}")
        left = lost
    return results


def _worker_run(task: WorkerTask, timeout_s: float) -> tuple[list[ProbeResult], tuple[Code, str] | None]:
    command = [sys.executable, "-m", "attention.probe"]
    try:
        done = subprocess.run(
            command,
            input=task.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        output, why = done.stdout, None
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
            why = (Code.LAUNCH_FAILED, f"the probe worker died ({how}): {tail}")
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode() if isinstance(raw, bytes) else raw
        why = (Code.TIMEOUT, f"no answer within {timeout_s:g} s")
    lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return [ProbeResult.model_validate_json(line) for line in lines], why


def _lost(backend: str, probe: Probe, why: tuple[Code, str]) -> ProbeResult:
    reason = Reason(code=why[0], dimension="process", observed="died", allowed="alive", source="probe", message=why[1])
    return ProbeResult(
        backend=backend,
        probe=probe.name,
        level="execute",
        feature=probe.feature,
        required=probe.required,
        case=probe.case,
        status="fail",
        reasons=(reason,),
    )


def failed_reasons(results: list[ProbeResult]) -> dict[str, list[Reason]]:
    """By backend, the reasons of its required probes that did not pass: what `resolve` leaves out."""
    failed: dict[str, list[Reason]] = {}
    for result in results:
        if result.required and result.status != "pass" and result.level != "static":
            failed.setdefault(result.backend, []).extend(result.reasons)
    return failed


def _worker() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    task = WorkerTask.model_validate_json(sys.stdin.read())
    for probe in task.probes:
        for result in run_probe(task.backend, probe, task.device, task.scale_factor):
            print(result.model_dump_json(), flush=True)


if __name__ == "__main__":
    _worker()
