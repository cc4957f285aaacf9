"""The part of an error that quantised KV makes by itself, whatever kernel reads it.

An output over float8 KV is off for two reasons. Rounding K and V changes the question: float64 attention over the
stored numbers times their scales, against float64 over K and V as the query's dtype holds them (a cache that is not
quantised). What the kernel adds is its output against float64 over the stored numbers: those are the figures `r_max`,
`r_rms` and `r_row`, gated like those of the query's dtype class. Quantisation is recorded in the same unit, the class's
own error, and not gated: it is the choice of a model's owner, which the model and business layers judge.
"""

from __future__ import annotations

from dataclasses import replace

from attention.backends.base import AttentionSpec
from attention.cases import AttentionCase, Inputs
from attention.replay.figures import compare
from attention.replay.inputs import Captured
from attention.replay.problems import Problem, members_of
from attention.replay.truths import Oracle, compute


def quantisation_row(
    case: AttentionCase,
    inputs: Inputs,
    seed: int,
    problem: Problem,
    *,
    device: str = "cpu",
    captured: Captured | None = None,
    oracle: Oracle = compute,
) -> dict[str, float]:
    """Columns `quantisation_r_*` of a case; none where its KV has the query's dtype."""
    if problem.spec.kv_dtype is None:
        return {}
    plain = unquantised(problem.spec)
    exact = oracle(members_of(case, plain, inputs, seed, captured, device), plain, device)
    found = compare(problem.truth.out_QHD, None, exact, problem.spec.dtype)
    return {f"quantisation_{name}": getattr(found, name) for name in ("r_max", "r_rms", "r_row")}


def unquantised(spec: AttentionSpec) -> AttentionSpec:
    """The same layer over a cache in the query's dtype."""
    return replace(spec, kv_dtype=None, k_scale=1.0, v_scale=1.0)
