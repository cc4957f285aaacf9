"""Tensor layer: run a seeded plan of cases on the resolved backends and compare with the oracle.

The shapes are those of the model: its heads and head dim, prefill, decode and extend, single and
batched, in the serving dtype and in bfloat16 (whose class rounds P, where kernels differ most).
A case that raises is a row with `error`; the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Inputs, Phase, parse_batch, replay_shapes
from attention.job import Setup, TensorPlan
from attention.replay.figures import compare
from attention.replay.inputs import Captured
from attention.replay.problems import make
from attention.replay.quantisation import quantisation_row
from attention.replay.truths import Oracle, compute


def cases(
    spec: AttentionSpec, dtype: str, page_size: int, max_kv_len: int, kv_dtype: str = "auto"
) -> Iterator[AttentionCase]:
    """Cases of one model in one dtype, up to a KV length."""
    for phase, batch in replay_shapes(max_kv_len):
        yield AttentionCase(
            phase=phase,
            batch=batch,
            heads_q=spec.heads_q,
            heads_kv=spec.heads_kv,
            head_dim_qk=spec.head_dim_qk,
            head_dim_vo=spec.head_dim_vo,
            dtype=dtype,
            kv_dtype=kv_dtype,
            window=spec.window,
            softcap=spec.softcap,
            page_size=page_size,
        )


def longest(max_kv_len: int) -> int:
    """KV length of the longest member of the plan's cases, in tokens: as many activations are worth capturing."""
    return max((m.kv_len for _, batch in replay_shapes(max_kv_len) for m in parse_batch(batch)), default=1)


@dataclass(frozen=True)
class Sources:
    """Where problems come from: activations of each kind of layer, and who knows the truth."""

    captured: Mapping[AttentionSpec, Captured] = field(default_factory=dict)
    oracle: Oracle = compute
    backwards: bool = False  # the last case first: two sides that share truths meet in the middle


def rows(
    setup: Setup,
    plan: TensorPlan,
    specs: list[AttentionSpec],
    dtypes: tuple[str, ...],
    resolved: dict[Phase, str],
    scale_factor: float,
    progress: Any = lambda done, total: None,
    sources: Sources | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of `tensor_replay`, one a (case, inputs, seed)."""
    sources = sources or Sources()
    questions = [
        _Question(case, inputs, seed, sources.captured.get(spec))
        for spec in dict.fromkeys(specs)
        for dtype in dict.fromkeys(dtypes)
        for kv_dtype in plan.kv_dtypes
        for case in cases(spec, dtype, setup.page_size, plan.max_kv_len, kv_dtype)
        for inputs in plan.inputs
        if inputs != "window_edge" or case.windowed
        for seed in plan.seeds
    ]
    for done, one in enumerate(reversed(questions) if sources.backwards else questions, 1):
        backend = resolved[one.case.phase]
        yield {
            "backend": backend,
            "case_id": one.case.case_id,
            "case_json": one.case.model_dump_json(),
            "inputs": one.inputs,
            "seed": one.seed,
            "dtype_class": one.case.dtype,
            **_figures(one, sources.oracle, backend, setup.device, scale_factor),
            "time": datetime.now(UTC),
        }
        progress(done, len(questions))


@dataclass(frozen=True)
class _Question:
    case: AttentionCase
    inputs: Inputs
    seed: int
    captured: Captured | None


def _figures(one: _Question, oracle: Oracle, backend: str, device: str, scale_factor: float) -> dict[str, Any]:
    """Figures of one question on a backend, or why there are none."""
    try:
        problem = make(one.case, one.inputs, one.seed, device=device, captured=one.captured, oracle=oracle)
        spec = problem.spec
        if scale_factor != 1.0:
            spec = replace(spec, scale=spec.scale * scale_factor)
        with torch.inference_mode():
            planned = create(backend, device).plan(problem.batch, spec)
            (out, lse), confirmed = confirm.watch(
                lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
            )
        found = compare(out, lse, problem.truth, problem.spec.dtype, problem.batch.q_lens).row()
        found |= quantisation_row(
            one.case, one.inputs, one.seed, problem, device=device, captured=one.captured, oracle=oracle
        )
    except Exception as error:  # a case that raises is a row, never the end of the run
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"confirmed_backend": confirmed, **found}
