"""Four checks that reports need and `attention.checks` does not have; same signature, so that they can move there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from attention import confirm
from attention.backends.base import Backend, Batch, member_keys
from attention.backends.oracle import attend
from attention.cases import AttentionCase
from attention.checks.common import MAX_RATIO, reason
from attention.reasons import Code, Reason
from attention.replay.figures import compare
from attention.replay.problems import make, spec_of

Check = Callable[[Backend, AttentionCase, str], list[Reason]]


def logit_range(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Every key of a member has the same score, far below or above zero: the output is the mean of V.

    -524288 lies below a sentinel that stands for -inf (flashinfer#4451), 524288 above the range of float16.
    """
    found = []
    for level in (-(2.0**19), 2.0**19):
        problem = make(case, "normal", 5, device=device)
        # q = 2^8 and k = level / (D * 2^8), exact in every dtype for head dims that are powers of two.
        q_THD = torch.full_like(problem.q_THD, 2.0**8)
        k = torch.where(problem.k.isnan(), problem.k, level / (case.head_dim_qk * 2.0**8))
        spec = replace(problem.spec, scale=1.0)
        planned = backend.plan(problem.batch, spec)
        out, lse = planned.run(q_THD, k, problem.v)
        truths, row = [], 0
        for i, q_len in enumerate(problem.batch.q_lens):
            keys, values = (member_keys(x, problem.batch, i) for x in (k, problem.v))
            truths.append(attend(q_THD[row : row + q_len], keys, values, spec))
            row += q_len
        for truth, rows in zip(truths, _rows(problem.batch), strict=True):
            figures = compare(out[rows], None if lse is None else lse[rows], truth, spec.dtype)
            if not figures.r_rms <= MAX_RATIO[case.dtype]:
                found.append(reason(Code.NUMERIC_DRIFT, "logit", f"{level:g}", "any finite score", "rows are lost"))
    return found


def nan_query(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """A NaN in one query reaches that query's row and no other: hidden, it would be a wrong answer."""
    problem = make(case, "normal", 6, device=device)
    q_THD = problem.q_THD.clone()
    q_THD[-1] = math.nan
    out, _ = backend.plan(problem.batch, problem.spec).run(q_THD, problem.k, problem.v)
    if not out[-1].isnan().all():
        return [reason(Code.NUMERIC_DRIFT, "NaN query", "finite output", "NaN", "a NaN input leaves as a number")]
    if out[:-1].isnan().any():
        return [reason(Code.PAD_POISON, "NaN query", "NaN in other rows", "its own row", "rows share a NaN")]
    return []


def outside_window(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """NaN in the keys and values that no query's window reaches: they must not be read, not even times zero."""
    left = 3
    windowed = case.model_copy(update={"window": (left, 0), "causal": True})
    spec = spec_of(windowed)
    found = []
    for poisoned in ("k", "v"):
        problem = make(windowed, "normal", 7, device=device)
        for i, (q_len, kv_len) in enumerate(zip(problem.batch.q_lens, problem.batch.kv_lens, strict=True)):
            first = max(0, kv_len - q_len - left)
            slots = _slots(problem.batch, i)[:first]
            getattr(problem, poisoned).flatten(0, 1)[slots] = math.nan
        out, _ = backend.plan(problem.batch, spec).run(problem.q_THD, problem.k, problem.v)
        if out.isnan().any():
            observed = f"NaN in {poisoned} before the window"
            found.append(reason(Code.PAD_POISON, "window", observed, "not read", "0 * NaN is NaN"))
    return found


def confirmation(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The execution layer names the backend that was asked for."""
    problem = make(case, "normal", 8, device=device)
    planned = backend.plan(problem.batch, problem.spec)
    _, ran = confirm.watch(lambda: planned.run(problem.q_THD, problem.k, problem.v), device=device)
    if ran == backend.name:
        return []
    return [reason(Code.UNCONFIRMED, "executed operator", ran, backend.name, "another backend ran")]


EXTRA_CHECKS: dict[str, Check] = {
    "logit_range": logit_range,
    "nan_query": nan_query,
    "outside_window": outside_window,
    "confirmation": confirmation,
}


def _rows(batch: Batch) -> list[slice]:
    ends = [sum(batch.q_lens[: i + 1]) for i in range(len(batch.q_lens))]
    return [slice(end - q_len, end) for end, q_len in zip(ends, batch.q_lens, strict=True)]


def _slots(batch: Batch, member: int) -> torch.Tensor:
    """Flat slots of a member's keys in NHD pages."""
    page, table = batch.page_size or 1, batch.block_tables[member]
    return torch.tensor([table[i // page] * page + i % page for i in range(batch.kv_lens[member])], dtype=torch.long)
