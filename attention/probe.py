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
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from attention import confirm, sdpa_says
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Execution, Phase
from attention.checks import CHECKS, Measured, NotApplicable, fails, run_check
from attention.checks.common import judge, raised
from attention.matrix import declared_reasons, is_known_bad
from attention.reasons import Code, Reason
from attention.replay.figures import compare
from attention.replay.problems import make

Status = Literal["pass", "fail", "unknown", "known_bad"]
Level = Literal["static", "construct", "execute"]

ProbeSet = Literal["startup", "full"]


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
        return result_row(backend, probe, level, status, **fields)

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


def result_row(backend: str, probe: Probe, level: Level, status: Status, **fields: Any) -> ProbeResult:
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
        return result_row(backend, probe, "construct", "fail", reasons=(raised("construct", error),))

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
        return result_row(backend, probe, "execute", "unknown", reasons=(why,), seconds=seconds)
    if isinstance(found, Measured):
        seconds = found.seconds
    reasons = [*found, *(_unconfirmed(backend, confirmed) if confirmed is not None else [])]
    return result_row(
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
