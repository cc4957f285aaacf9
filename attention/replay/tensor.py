"""Tensor layer: run a seeded plan of cases on the resolved backends and compare with the oracle.

The shapes are those of the model: its heads and head dim, prefill, decode and extend, single and
batched, in the serving dtype and in bfloat16 (whose class rounds P, where kernels differ most).
A case that raises is a row with `error`; the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def cases(spec: AttentionSpec, dtype: str, page_size: int, max_kv_len: int) -> Iterator[AttentionCase]:
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
            window=spec.window,
            softcap=spec.softcap,
            page_size=page_size,
        )


def longest(max_kv_len: int) -> int:
    """KV length of the longest member of the plan's cases, in tokens: as many activations are worth capturing."""
    return max((m.kv_len for _, batch in replay_shapes(max_kv_len) for m in parse_batch(batch)), default=1)


def rows(
    setup: Setup,
    plan: TensorPlan,
    specs: list[AttentionSpec],
    dtypes: tuple[str, ...],
    resolved: dict[Phase, str],
    scale_factor: float,
    progress: Any = lambda done, total: None,
    captured: Mapping[AttentionSpec, Captured] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of `tensor_replay`, one a (case, inputs, seed); `captured` are the activations of each kind of layer."""
    problems = [
        (case, inputs, seed, (captured or {}).get(spec))
        for spec in dict.fromkeys(specs)
        for dtype in dict.fromkeys(dtypes)
        for case in cases(spec, dtype, setup.page_size, plan.max_kv_len)
        for inputs in plan.inputs
        if inputs != "window_edge" or case.windowed
        for seed in plan.seeds
    ]
    for done, (case, inputs, seed, kept) in enumerate(problems, start=1):
        yield {
            **_row(case, inputs, seed, resolved[case.phase], setup.device, scale_factor, kept),
            "time": datetime.now(UTC),
        }
        progress(done, len(problems))


def _row(
    case: AttentionCase,
    inputs: Inputs,
    seed: int,
    backend: str,
    device: str,
    scale_factor: float,
    captured: Captured | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "backend": backend,
        "case_id": case.case_id,
        "case_json": case.model_dump_json(),
        "inputs": inputs,
        "seed": seed,
        "dtype_class": case.dtype,
    }
    try:
        problem = make(case, inputs, seed, device=device, captured=captured)
        spec = problem.spec
        if scale_factor != 1.0:
            from dataclasses import replace

            spec = replace(spec, scale=spec.scale * scale_factor)
        with torch.inference_mode():
            planned = create(backend, device).plan(problem.batch, spec)
            (out, lse), confirmed = confirm.watch(
                lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
            )
        figures = compare(out, lse, problem.truth, problem.spec.dtype, problem.batch.q_lens)
    except Exception as error:  # a case that raises is a row, never the end of the run
        return {**row, "error": f"{type(error).__name__}: {error}"[:500]}
    return {**row, "confirmed_backend": confirmed, **figures.row()}
