"""Capability probes: what a backend can really do here, before any traffic meets it.

    python -m attention probe --model PATH --policy PATH [--json]
    python -m attention probe --backends a,b --device cuda --cells attention/cells/hopper.yaml --out FILE.parquet
        [--budget-s 120] [--compiled FILE] [--resume]

The document's nine probes, each on three levels kept apart: `static` (declared rules), `construct`
(import, plan) and `execute` (launch, numbers against the oracle, confirmation). Start-up adds the cheap checks of
`attention.checks` for the features that the model uses; level `full` adds all checks, and the features that the
model does not use. Every backend is probed in a worker process of its own: a crash, a hang or an illegal access
becomes a row with a reason, and a new worker goes on with the next probe. A failing probe says which dimension
failed, never just "kernel error"; what was not tested is `unknown`, with the reason why.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from attention import confirm, sdpa_says
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Execution, Phase
from attention.checks import CHECKS, Measured, NotApplicable, fails, run_check
from attention.checks.common import judge, raised
from attention.isolate import Child
from attention.lifetime import die_with_parent
from attention.matrix import declared_reasons, is_known_bad
from attention.reasons import Code, Reason
from attention.replay.figures import compare
from attention.replay.problems import make

Status = Literal["pass", "fail", "unknown", "known_bad"]
Level = Literal["static", "construct", "execute"]

ProbeSet = Literal["startup", "full"]

# Exit status of a worker whose device is lost (an illegal access): it asks for a fresh one. EX_TEMPFAIL.
_RESTART = 75


class Probe(BaseModel):
    """One probe: a case to run, the feature that it stands for, and the check that judges it.

    Without a check: one run of needles against the oracle, confirmed by the execution layer.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    feature: str
    case: AttentionCase
    required: bool = True  # the serving process launches this; its failure excludes the backend
    check: str | None = None  # a name of `attention.checks.CHECKS`


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


def probes_of(
    spec: AttentionSpec,
    dtype: str,
    page_size: int,
    *,
    level: ProbeSet = "startup",
    num_pages: int | None = None,
) -> list[Probe]:
    """Probes for one kind of layer of a model: the document's nine, then checks of `attention.checks`.

    `startup` has the checks that cost milliseconds and that a wrong answer in service would come from: every
    feature that the layer uses, the causal alignment, and the addresses of `num_pages` pages. `full` has them all.
    """

    def case(phase: Phase, batch: str, execution: Execution = "eager", **changes: Any) -> AttentionCase:
        fields: dict[str, Any] = {
            "heads_q": spec.heads_q,
            "heads_kv": spec.heads_kv,
            "head_dim_qk": spec.head_dim_qk,
            "head_dim_vo": spec.head_dim_vo,
            "window": spec.window,
            "softcap": spec.softcap,
            "alibi": spec.alibi_slopes is not None,
            "sinks": spec.sinks is not None,
            "kv_dtype": "auto" if spec.kv_dtype is None else str(spec.kv_dtype).removeprefix("torch."),
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
    extend = case("extend", "q31s160")
    nine = [
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
        Probe(name="model_mask", feature=feature, case=extend),
        Probe(name="paged_kv", feature="paged_kv", case=case("decode", f"q1s{page_size}_q1s{5 * page_size + 1}")),
        Probe(
            name="graph_or_compile",
            feature="cuda_graph",
            case=case("decode", "4q1s64", execution="cuda_graph"),
            required=False,
        ),
    ]
    found = [*nine, *(Probe(name=n, feature=n, case=extend, check=n) for n in _feature_checks(extend))]
    if num_pages is not None:
        cache = case("decode", f"q1s{num_pages * page_size}")
        found.append(Probe(name="index_range", feature="paged_kv", case=cache, check="index_range", required=False))
    if level == "startup":
        return found
    decode = case("decode", "q1s65_q1s257_q1s16")
    first = Probe(name="first_call", feature="first_call", case=extend, check="first_call", required=False)
    asked = {(p.check, p.case) for p in found}
    more = [
        Probe(name=name, feature=one.phase, case=one, check=name, required=False)
        for one in (extend, decode)
        for name in CHECKS
        if name in _OF_ANY_CASE and (name, one) not in asked
    ]
    graph = case("decode", "q1s65_q1s257", execution="cuda_graph")
    more.append(Probe(name="graph_replay", feature="cuda_graph", case=graph, check="graph_replay", required=False))
    features: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0},
        "kv_scales": {"kv_dtype": "float8_e4m3fn"},
        "window_edge": {"window": (63, 0)},
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
    }
    for name, changes in features.items():
        one = case("extend", "q31s160", **changes)
        if (name, extend) not in asked:
            more.append(Probe(name=name, feature=name, case=one, check=name, required=False))
    return [first, *found, *more]


#: Checks that a case of any features has something to say to.
_OF_ANY_CASE = (
    "numeric",
    "needles",
    "causal_alignment",
    "lse",
    "pad_poison",
    "strides",
    "expand",
    "empty_members",
    "call_order",
    "repeatability",
    "batch_invariance",
    "equivalences",
)


def _feature_checks(case: AttentionCase) -> list[str]:
    """Checks of the features that a case uses."""
    used = {
        "softcap": case.softcap is not None,
        "kv_scales": case.kv_dtype not in ("auto", case.dtype),
        "window_edge": case.window != (None, None),
        "sinks": case.sinks,
        "alibi": case.alibi,
        "causal_alignment": case.causal,
    }
    return [name for name, on in used.items() if on]


def run_probe(
    backend: str, probe: Probe, device: str, scale_factor: float = 1.0, *, try_declared: bool = False
) -> Iterator[ProbeResult]:
    """The levels of one probe, in order; a level that fails ends it.

    `try_declared` goes on although declared rules refuse the case: the row that follows says who is right.
    """

    def result(level: Level, status: Status, **fields: Any) -> ProbeResult:
        return _row(backend, probe, level, status, **fields)

    reasons = declared_reasons(backend, probe.case, device=device)
    status: Status = "pass" if not reasons else "known_bad" if is_known_bad(reasons) else "fail"
    yield result("static", status, reasons=_with_torchs_own(backend, probe.case, device, reasons))
    if reasons and not try_declared:
        return
    if probe.check is not None:
        yield _checked(backend, probe, device, try_declared)
        return
    started = time.perf_counter()
    problem = make(probe.case, "needle", 7, device=device)
    spec = replace(problem.spec, scale=problem.spec.scale * scale_factor)
    try:
        planned = create(backend, device).plan(problem.batch, spec)
    except Exception as error:
        yield result("construct", "fail", reasons=(raised("construct", error),))
        return
    yield result("construct", "pass", seconds=time.perf_counter() - started)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # sdpa_kernel gives its reasons as warnings, one a reason
        try:
            with torch.inference_mode():
                (out, lse), confirmed = confirm.watch(
                    lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
                )
        except Exception as error:
            found = raised("launch", error)
            told = "; ".join(dict.fromkeys(str(w.message).split(" (Triggered")[0] for w in said))
            message = f"{found.message}{f'; warned: {told[:400]}' if told else ''}"
            yield result("execute", "fail", reasons=(found.model_copy(update={"message": message}),))
            return
    seconds = time.perf_counter() - started
    found_all = judge(
        out, problem, probe.case, "error against the fp64 oracle, in units of the dtype class's own error"
    )
    max_abs = compare(out, lse, problem.truth, problem.spec.dtype).max_abs if out.numel() else 0.0
    found_all += _unconfirmed(backend, confirmed)
    yield result(
        "execute",
        "fail" if found_all else "pass",
        reasons=tuple(found_all),
        confirmed_backend=confirmed,
        max_abs_error=max_abs if math.isfinite(max_abs) else None,
        seconds=seconds,
    )


def _row(backend: str, probe: Probe, level: Level, status: Status, **fields: Any) -> ProbeResult:
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


def _checked(backend: str, probe: Probe, device: str, try_declared: bool) -> ProbeResult:
    """The execute row of a probe with a check; what did not apply is unknown, with why."""
    name = probe.check or ""
    started = time.perf_counter()
    try:
        made = create(backend, device)
    except Exception as error:
        return _row(backend, probe, "construct", "fail", reasons=(raised("construct", error),))

    def check() -> list[Reason]:
        return run_check(name, made, probe.case, device, try_declared=try_declared)

    # What the serving process launches must be confirmed; the rest is not worth the profiler's time.
    found, confirmed = confirm.watch(check, device=device) if probe.required else (check(), None)
    seconds = time.perf_counter() - started
    if isinstance(found, NotApplicable):
        why = Reason(
            code=Code.NOT_PROBED,
            dimension=name,
            observed="not applicable",
            allowed="a case that it applies to",
            source="probe",
            message=found.why,
        )
        return _row(backend, probe, "execute", "unknown", reasons=(why,), seconds=seconds)
    if isinstance(found, Measured):
        seconds = found.seconds
    reasons = [*found, *(_unconfirmed(backend, confirmed) if confirmed is not None else [])]
    return _row(
        backend,
        probe,
        "execute",
        "fail" if fails(reasons) else "pass",
        reasons=tuple(reasons),
        confirmed_backend=confirmed,
        seconds=seconds,
    )


def _unconfirmed(backend: str, confirmed: str) -> list[Reason]:
    if confirmed == backend:
        return []
    return [
        Reason(
            code=Code.UNCONFIRMED,
            dimension="executed operator",
            observed=confirmed,
            allowed=backend,
            source="profiler",
            message=f"asked for {backend}, the execution layer ran {confirmed}",
        )
    ]


def _with_torchs_own(backend: str, case: AttentionCase, device: str, reasons: list[Reason]) -> tuple[Reason, ...]:
    """Declared reasons, the first with what PyTorch itself says to the case where it can be asked."""
    said = sdpa_says.refusal(backend, case, device) if reasons else None
    if said is None:
        return tuple(reasons)
    first = reasons[0].model_copy(update={"message": f"{reasons[0].message}; PyTorch itself says: {said}"})
    return (first, *reasons[1:])


class WorkerTask(BaseModel):
    """What a probe worker reads from stdin."""

    backend: str
    device: str
    scale_factor: float
    probes: tuple[Probe, ...]
    try_declared: bool = False


#: Backend, name and case of a probe.
Key = tuple[str, str, AttentionCase]

# Seconds that a unit of probes keeps its worker at least while others wait: most of a turn is the import.
_SHORTEST_TURN_S = 20.0
# A probe that is under way at the end of a turn may take this much longer, in turns.
_GRACE = 0.5


def probe_all(
    backends: tuple[str, ...],
    probes: list[Probe],
    *,
    device: str,
    scale_factor: float = 1.0,
    timeout_s: float = 120.0,
    jobs: int = 2,
    try_declared: bool = False,
    by_head_dim: bool = False,
    budget_s: float | None = None,
    known: Collection[Key] = frozenset(),
    is_pending: Callable[[str, AttentionCase], bool] = lambda backend, case: False,
    heard: Callable[[list[ProbeResult]], None] = lambda rows: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ProbeResult]:
    """All probes of all backends but the `known` ones, in worker processes; rows for whatever a worker lost.

    What a declared rule refuses gets its static row without a process. A probe that gives no row for `timeout_s` is
    lost. `jobs` workers run at a time: a worker's cost is mostly its import, and the machine may serve others.
    `by_head_dim` gives each head dim of a backend its own worker, so that kernels compile side by side. `heard` gets
    the rows of a probe at its end.

    With `budget_s` the backends take turns, so that a slow one cannot starve the rest; those whose kernels would
    compile first (`is_pending`) come last in each round. At its end all workers are killed; the rest is `unknown`.
    """
    deadline = None if budget_s is None else time.monotonic() + budget_s
    found: list[ProbeResult] = []
    wanted = [(b, p) for b in backends for p in probes if (b, p.name, p.case) not in known]
    total, left = len(wanted), set(wanted)

    lock = Lock()

    def hear(rows: list[ProbeResult]) -> None:
        with lock:
            found.extend(rows)
            heard(rows)

    allowed = []
    for backend, probe in wanted:
        if try_declared or not declared_reasons(backend, probe.case, device=device):
            allowed.append((backend, probe))
        else:
            hear([next(run_probe(backend, probe, device))])
            left.remove((backend, probe))
    progress(total - len(left), total)
    queue = _units(allowed, by_head_dim, is_pending)
    turn_s = None if budget_s is None else max(_SHORTEST_TURN_S, budget_s * jobs / max(1, len(queue)))
    running: dict[Future[list[Probe]], _Unit] = {}
    spent = dict.fromkeys(backends, 0.0)  # seconds

    def one(unit: _Unit) -> list[Probe]:
        task = WorkerTask(
            backend=unit.backend,
            device=device,
            scale_factor=scale_factor,
            probes=unit.probes,
            try_declared=try_declared,
        )
        started = time.monotonic()
        turn = None if turn_s is None else Turn(started + turn_s, turn_s * _GRACE, lambda: bool(queue))
        try:
            return _in_worker(task, timeout_s, deadline, turn, hear)
        finally:
            spent[unit.backend] += time.monotonic() - started

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        while (queue and not _is_over(deadline)) or running:
            while queue and len(running) < jobs and not _is_over(deadline):
                at_work = Counter(unit.backend for unit in running.values())
                unit = min(
                    queue, key=lambda u: (u.round, u.pending, u.only_checks, at_work[u.backend], spent[u.backend])
                )
                queue.remove(unit)
                running[pool.submit(one, unit)] = unit
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                rest = future.result()
                left -= {(unit.backend, p) for p in set(unit.probes) - set(rest)}
                if rest:
                    queue.append(replace(unit, probes=tuple(rest), round=unit.round + 1))
                progress(total - len(left), total)
    for backend, probe in allowed:
        if (backend, probe) in left:
            declared = [] if try_declared else [_row(backend, probe, "static", "pass")]
            hear([*declared, _unprobed(backend, probe)])
    order = {(b, p.name, p.case): i for i, (b, p) in enumerate(wanted)}
    return sorted(found, key=lambda row: order[row.backend, row.probe, row.case])


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


@dataclass(frozen=True)
class _Unit:
    """Probes of one backend that one worker runs; `pending`: their kernels would compile first."""

    backend: str
    probes: tuple[Probe, ...]
    pending: bool
    round: int = 0

    @property
    def only_checks(self) -> bool:
        return all(probe.check is not None for probe in self.probes)


def _units(
    wanted: list[tuple[str, Probe]], by_head_dim: bool, is_pending: Callable[[str, AttentionCase], bool]
) -> list[_Unit]:
    """By backend, and by head dim too; then the plain probes come first, and the head dims of a backend apart."""
    groups: dict[tuple[str, bool, int | None], list[Probe]] = {}
    for backend, probe in wanted:
        head_dim = probe.case.head_dim_qk if by_head_dim else None
        groups.setdefault((backend, by_head_dim and is_pending(backend, probe.case), head_dim), []).append(probe)
    units = []
    for (backend, pending, _), probes in groups.items():
        ordered = sorted(probes, key=lambda p: p.check is not None) if by_head_dim else probes
        units.append(_Unit(backend, tuple(ordered), pending))
    return units


@dataclass(frozen=True)
class Turn:
    """Until when a unit keeps its worker, if others wait then."""

    end: float
    grace_s: float
    others_wait: Callable[[], bool]

    def is_over(self, between_probes: bool) -> bool:
        return time.monotonic() >= self.end + (0.0 if between_probes else self.grace_s) and self.others_wait()


_FRESH = (Code.LAUNCH_FAILED, "the device is lost; a fresh worker goes on")
_STOPPED = (Code.NOT_PROBED, "its turn, or the time for all, was over")
_TICK_S = 0.2


def _in_worker(
    task: WorkerTask,
    timeout_s: float,
    deadline: float | None,
    turn: Turn | None,
    hear: Callable[[list[ProbeResult]], None],
) -> list[Probe]:
    """Run a task in fresh workers until every probe has an outcome, or its turn is over: the probes without one.

    A probe that kills a worker is a row.
    """
    left = list(task.probes)
    while left and not _is_over(deadline):
        ended, begun, why = _worker_run(
            task.model_copy(update={"probes": tuple(left)}), timeout_s, deadline, turn, hear
        )
        # A probe is told apart by its case too: a model with two kinds of layers has each twice.
        lost = [p for p in left if (p.name, p.case) not in ended]
        if why == _STOPPED:
            return lost
        if why == _FRESH:
            if len(lost) == len(left):
                raise RuntimeError(f"probe worker of {task.backend} asked for a fresh one before any probe")
        elif why is not None and lost:
            hear([*begun, _lost(task.backend, lost[0], why)])
            lost = lost[1:]
        elif lost:
            raise RuntimeError(f"probe worker of {task.backend} ended well without {lost[0].name}")
        left = lost
    return left


def _ends(result: ProbeResult, try_declared: bool) -> bool:
    """Whether nothing follows this row."""
    if result.level == "static":
        return result.status != "pass" and not try_declared
    return result.level == "execute" or result.status == "fail"


def _worker_run(
    task: WorkerTask,
    timeout_s: float,
    deadline: float | None,
    turn: Turn | None,
    hear: Callable[[list[ProbeResult]], None],
) -> tuple[set[tuple[str, AttentionCase]], list[ProbeResult], tuple[Code, str] | None]:
    """What one worker ended, rows of the probe that it was at, and why it ended early: _FRESH when it asks for a
    successor, None when it did not."""
    ended: set[tuple[str, AttentionCase]] = set()
    begun: list[ProbeResult] = []
    with Child([sys.executable, "-m", "attention.probe"], task.model_dump_json()) as child:
        said_at = time.monotonic()
        while True:
            if _is_over(deadline) or (turn is not None and turn.is_over(bool(ended) and not begun)):
                return ended, begun, _STOPPED
            try:
                line = child.line(_TICK_S)
            except TimeoutError:
                if time.monotonic() - said_at >= timeout_s:
                    return ended, begun, (Code.TIMEOUT, f"no answer within {timeout_s:g} s")
                continue
            said_at = time.monotonic()
            if line is None:
                break
            if not (line.startswith("{") and line.rstrip().endswith("}")):
                continue
            begun.append(ProbeResult.model_validate_json(line))
            if _ends(begun[-1], task.try_declared):
                hear(begun)
                ended.add((begun[-1].probe, begun[-1].case))
                begun = []
        if child.exit_code() == _RESTART:
            return ended, begun, _FRESH
        how = child.death()
        return ended, begun, None if how is None else (Code.LAUNCH_FAILED, f"the probe worker died {how}")


def _lost(backend: str, probe: Probe, why: tuple[Code, str]) -> ProbeResult:
    reason = Reason(code=why[0], dimension="process", observed="died", allowed="alive", source="probe", message=why[1])
    return _row(backend, probe, "execute", "fail", reasons=(reason,))


def _unprobed(backend: str, probe: Probe) -> ProbeResult:
    reason = Reason(
        code=Code.NOT_PROBED,
        dimension="time",
        observed="budget spent",
        allowed="a run",
        source="probe",
        message="the time was spent before it",
    )
    return _row(backend, probe, "execute", "unknown", reasons=(reason,))


def was_not_reached(result: ProbeResult) -> bool:
    """Whether the time was spent before this probe."""
    return any(reason.code == Code.NOT_PROBED and reason.dimension == "time" for reason in result.reasons)


def failed_reasons(results: list[ProbeResult]) -> dict[str, list[Reason]]:
    """By backend, the reasons of its required probes that did not pass: what `resolve` leaves out."""
    failed: dict[str, list[Reason]] = {}
    for result in results:
        if result.required and result.status != "pass" and result.level != "static":
            failed.setdefault(result.backend, []).extend(result.reasons)
    return failed


def unmet(results: list[ProbeResult]) -> list[tuple[str, str]]:
    """(backend, probe) of every required probe that declared rules allow here and that did not pass."""
    refused = {(r.backend, r.probe, r.case) for r in results if r.level == "static" and r.status != "pass"}
    bad = [r for r in results if r.required and r.status != "pass" and (r.backend, r.probe, r.case) not in refused]
    return list(dict.fromkeys((r.backend, r.probe) for r in bad))


def _worker() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    task = WorkerTask.model_validate_json(sys.stdin.read())
    for probe in task.probes:
        for result in run_probe(task.backend, probe, task.device, task.scale_factor, try_declared=task.try_declared):
            print(result.model_dump_json(), flush=True)
        if _device_is_lost(task.device):
            # Nothing runs on it any more in this process; atexit handlers would hang or crash on it.
            os._exit(_RESTART)


def _device_is_lost(device: str) -> bool:
    """Whether an illegal access has ended this process's CUDA context."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


if __name__ == "__main__":
    _worker()
