"""Tensor layer: run a seeded plan of cases on the resolved backends and compare with the oracle.

The shapes are those of the model: its heads and head dim, prefill, decode and extend, single and
batched, in the serving dtype and in bfloat16 (whose class rounds P, where kernels differ most).
A case that raises is a row with `error`; the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from attention import confirm
from attention.backends import create
from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Phase, parse_batch, replay_shapes
from attention.job import Setup, TensorPlan
from attention.replay.figures import compare
from attention.replay.inputs import Captured
from attention.replay.problems import Problem, make
from attention.replay.truths import Oracle, compute


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
    problems = [
        (case, inputs, seed, sources.captured.get(spec))
        for spec in dict.fromkeys(specs)
        for dtype in dict.fromkeys(dtypes)
        for case in cases(spec, dtype, setup.page_size, plan.max_kv_len)
        for inputs in plan.inputs
        if inputs != "window_edge" or case.windowed
        for seed in plan.seeds
    ]
    for done, (case, inputs, seed, captured) in enumerate(reversed(problems) if sources.backwards else problems, 1):
        draw = partial(make, case, inputs, seed, device=setup.device, captured=captured, oracle=sources.oracle)
        yield {
            "backend": resolved[case.phase],
            "case_id": case.case_id,
            "case_json": case.model_dump_json(),
            "inputs": inputs,
            "seed": seed,
            "dtype_class": case.dtype,
            **_figures(draw, resolved[case.phase], setup.device, scale_factor),
            "time": datetime.now(UTC),
        }
        progress(done, len(problems))


def _figures(draw: Callable[[], Problem], backend: str, device: str, scale_factor: float) -> dict[str, Any]:
    """Figures of one problem on a backend, or why there are none."""
    try:
        problem = draw()
        spec = problem.spec
        if scale_factor != 1.0:
            spec = replace(spec, scale=spec.scale * scale_factor)
        with torch.inference_mode():
            planned = create(backend, device).plan(problem.batch, spec)
            (out, lse), confirmed = confirm.watch(
                lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device
            )
        found = compare(out, lse, problem.truth, problem.spec.dtype, problem.batch.q_lens)
    except Exception as error:  # a case that raises is a row, never the end of the run
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"confirmed_backend": confirmed, **found.row()}
