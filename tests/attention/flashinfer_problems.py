"""Problems that FlashInfer's tests share, on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention.backends.base import member_keys
from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase, Inputs
from attention.replay.problems import Problem, make

MLA = {"heads_q": 16, "heads_kv": 1, "head_dim_qk": 576, "head_dim_vo": 512}


def case(batch: str = "q5s37_q1s16_q20", **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "extend",
        "heads_q": 6,
        "heads_kv": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "dtype": "bfloat16",
    }
    fields |= changes
    if fields.get("layout", "paged_nhd") in ("contiguous", "ragged"):
        fields.setdefault("page_size", None)
    return AttentionCase(batch=batch, **fields)


def problem_of(one: AttentionCase, inputs: Inputs, seed: int, *, device: str = "cpu") -> Problem:
    """As `make`, with V as the first columns of K in absorbed MLA."""
    problem = make(one, inputs, seed, device=device)
    if (one.heads_kv, one.head_dim_qk, one.head_dim_vo) == (1, 576, 512):
        problem = with_truth(replace(problem, v=problem.k[..., :512]))
    return problem


def shorter(problem: Problem) -> Problem:
    """The same problem as if the last three keys of every member were not there yet."""
    batch = replace(problem.batch, kv_lens=tuple(kv - 3 for kv in problem.batch.kv_lens))
    return with_truth(replace(problem, batch=batch))


def with_truth(problem: Problem) -> Problem:
    """The problem with the truth of what it holds now."""
    truths, row = [], 0
    for i, q_len in enumerate(problem.batch.q_lens):
        k, v = (member_keys(cache, problem.batch, i) for cache in (problem.k, problem.v))
        mask = None if problem.batch.masks is None else problem.batch.masks[i]
        truths.append(attend(problem.q_THD[row : row + q_len], k, v, problem.spec, mask))
        row += q_len
    names = ("out_QHD", "lse_QH", "rounded_QHD")
    return replace(problem, truth=Truth(*(torch.cat([getattr(t, name) for t in truths]) for name in names)))
