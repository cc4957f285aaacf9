"""Checks without an oracle: two ways to ask for the same answer.

They hold for any kernel, at any size, also where float64 attention would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attention.backends.base import Backend
from attention.cases import AttentionCase
from attention.checks.common import SAME_ANSWER, Skip, batch_text, distance, dtype_class, reason, run, variant
from attention.reasons import Code, Reason
from attention.replay.members import Member
from attention.replay.problems import Problem, build, members_of, spec_of

_SEED = 19


def equivalences(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """V = 1 gives 1; permuted pages and keys; halves merged through the LSE; paged = contiguous; GQA = MHA."""
    parts: tuple[Callable[[Backend, AttentionCase, str], list[Reason]], ...] = (
        _ones,
        _permuted_pages,
        _permuted_keys,
        _merged_halves,
        _other_layout,
        _repeated_heads,
    )
    found: list[Reason] = []
    skipped = []
    for part in parts:
        try:
            found += part(backend, case, device)
        except Skip as why:
            skipped.append(str(why))
    if len(skipped) == len(parts):
        raise Skip("; ".join(dict.fromkeys(skipped)))
    return found


def _problem(case: AttentionCase, members: list[Member], device: str) -> Problem:
    return build(case, spec_of(case), members, seed=_SEED, device=device, poison=(0.0, 0.0))


def _members(case: AttentionCase) -> list[Member]:
    return members_of(case, spec_of(case), "normal", _SEED)


def _differ(case: AttentionCase, what: str, one: torch.Tensor, other: torch.Tensor) -> list[Reason]:
    limit, found = SAME_ANSWER[dtype_class(case)], distance(one, other)
    if found <= limit:
        return []
    text = f"two ways to ask for the same answer disagree: {what}"
    return [reason(Code.NUMERIC_DRIFT, what, f"relative L2 {found:.3g}", f"<= {limit:g}", text)]


def _ones(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """A weighted mean of ones is one (rows without a key: 0)."""
    if case.sinks:
        raise Skip("a sink takes weight from V")
    one = 1 / spec_of(case).v_scale
    members = [replace(m, v_LGD=torch.full(m.v_LGD.shape, one).to(m.v_LGD.dtype)) for m in _members(case)]
    problem = _problem(case, members, device)
    out, _ = run(backend, problem)
    wanted = (~torch.isinf(problem.truth.lse_QH)).double()[..., None].expand_as(problem.truth.out_QHD)
    return _differ(case, "V = 1 gives 1", out, wanted)


def _permuted_pages(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The same pages under other numbers."""
    if case.page_size is None:
        raise Skip("the KV cache is not paged")
    problem = _problem(case, _members(case), device)
    order = torch.randperm(len(problem.k), generator=torch.Generator().manual_seed(_SEED))
    where = torch.argsort(order).tolist()  # page p moves to where[p]
    tables = tuple(tuple(where[p] for p in table) for table in problem.batch.block_tables)
    moved = replace(
        problem,
        batch=replace(problem.batch, block_tables=tables),
        k=_rows(problem.k, order),
        v=_rows(problem.v, order),
    )
    return _differ(case, "permuted pages", run(backend, moved)[0], run(backend, problem)[0])


def _rows(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return raw[order.to(tensor.device)].view(tensor.dtype)


def _unmasked(backend: Backend, case: AttentionCase) -> AttentionCase:
    """A variant in which every query sees every key: not causal, or single queries."""
    changes = {"window": (None, None), "alibi": False, "custom_mask": False}
    try:
        return variant(backend, case, causal=False, **changes)
    except Skip:
        singles = [(1, m.kv_len) for m in case.members if m.kv_len]
        return variant(backend, case, batch=batch_text(singles), **changes)


def _permuted_keys(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Attention without a mask does not know the order of its keys."""
    case = _unmasked(backend, case)
    members, generator = _members(case), torch.Generator().manual_seed(_SEED)
    moved = []
    for m in members:
        order = torch.randperm(len(m.k_LGD), generator=generator)
        moved.append(replace(m, k_LGD=_rows(m.k_LGD, order), v_LGD=_rows(m.v_LGD, order)))
    outs = [run(backend, _problem(case, some, device))[0] for some in (members, moved)]
    return _differ(case, "permuted keys", *outs)


def _merged_halves(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Two halves of the keys, merged with their LSE as weights, are the whole."""
    if case.sinks:
        raise Skip("each half would count the sink")
    case = _unmasked(backend, case)
    whole = _members(case)
    if min(len(m.k_LGD) for m in whole) < 2:
        raise Skip("a member has fewer than two keys")
    out, lse = run(backend, _problem(case, whole, device))
    if lse is None:
        raise Skip(f"{backend.name} gives no LSE")
    halves = []
    for first in (True, False):
        parts = []
        for m in whole:
            cut = len(m.k_LGD) // 2
            rows = slice(0, cut) if first else slice(cut, None)
            parts.append(replace(m, k_LGD=m.k_LGD[rows], v_LGD=m.v_LGD[rows]))
        lengths = [(len(m.q_QHD), len(m.k_LGD)) for m in parts]
        half = variant(backend, case, batch=batch_text(lengths))
        halves.append(run(backend, _problem(half, parts, device)))
    (one, one_lse), (two, two_lse) = halves
    if one_lse is None or two_lse is None:
        raise Skip(f"{backend.name} gives no LSE")
    weight = torch.sigmoid(one_lse.double() - two_lse.double())[..., None]
    merged = weight * one.double() + (1 - weight) * two.double()
    return _differ(case, "halves merged through the LSE", merged, out)


def _other_layout(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Paged and contiguous KV of the same keys."""
    if case.page_size is None:
        other = variant(backend, case, layout="paged_nhd", page_size=16)
    else:
        other = variant(backend, case, layout="contiguous", page_size=None)
    members = _members(case)
    outs = [run(backend, _problem(c, members, device))[0] for c in (case, other)]
    return _differ(case, "paged = contiguous", *outs)


def _repeated_heads(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Grouped heads are ordinary heads whose K and V are repeated."""
    if case.gqa_ratio == 1:
        raise Skip("every query head has its own KV head")
    other = variant(backend, case, heads_kv=case.heads_q)
    members, ratio = _members(case), case.gqa_ratio
    repeated = [replace(m, k_LGD=_repeat(m.k_LGD, ratio), v_LGD=_repeat(m.v_LGD, ratio)) for m in members]
    outs = [run(backend, _problem(c, some, device))[0] for c, some in ((case, members), (other, repeated))]
    return _differ(case, "GQA = repeated MHA", *outs)


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return raw.repeat_interleave(times, 1).view(tensor.dtype)
