"""Checks of what a kernel reads: slots that nobody owns, strides, empty members, addresses beyond 2^31."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attention.backends.base import Backend
from attention.cases import DTYPE_BYTES, AttentionCase
from attention.checks.common import Result, Skip, batch_text, is_right, judge, plain, raised, reason, run, variant
from attention.matrix import index_bits
from attention.reasons import Code, Reason
from attention.replay.problems import Problem, build, members_of, spec_of

INT32_MAX = 2**31 - 1
_FINITE_POISON = 100.0  # finite in every dtype, and large enough to win any softmax


def pad_poison(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """NaN in every slot that no member owns (K and V; V alone) and in the memory that the output will get.

    V alone, since a kernel that masks scores still multiplies 0 by NaN. Finite poison last: a kernel that turns
    NaN into 0 passes the others though it reads what is not its own. The output's memory is poisoned by freeing
    NaN tensors of its size just before, which the allocator then hands out.
    """
    spec = spec_of(case)
    members = members_of(case, spec, "normal", 13)
    clean = build(case, spec, members, seed=13, device=device, poison=(0.0, 0.0))
    # What is wrong without poison is for other checks.
    if not is_right(_after_poison(backend, clean), clean, case):
        if is_right(run(backend, clean)[0], clean, case):
            text = "the output depends on what its memory held before: not every row is written"
            return [reason(Code.PAD_POISON, "output buffer", "NaN from freed memory", "every row written", text)]
        raise Skip("the output is wrong without poison already")
    found = []
    for where, poison in (
        ("K and V", (math.nan, math.nan)),
        ("V alone", (0.0, math.nan)),
        ("K and V, finite", (_FINITE_POISON, _FINITE_POISON)),
    ):
        problem = build(case, spec, members, seed=13, device=device, poison=poison)
        out = _after_poison(backend, problem)
        if not is_right(out, problem, case):
            seen = "NaN or Inf" if not bool(torch.isfinite(out).all()) else "another answer"
            text = f"slots that no member owns change the output ({where} poisoned)"
            found.append(reason(Code.PAD_POISON, f"unowned slots: {where}", seen, "no effect", text))
    return found


def _after_poison(backend: Backend, problem: Problem) -> torch.Tensor:
    """The output of a run whose buffers come from memory that held NaN."""
    planned = backend.plan(problem.batch, problem.spec)
    wanted = problem.truth.out_QHD
    freed = [torch.full(wanted.shape, math.nan, dtype=problem.spec.dtype, device=wanted.device) for _ in range(4)]
    del freed
    with torch.inference_mode():
        return planned.run(problem.q_THD, problem.k, problem.v)[0]


def strides(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The same values behind other strides: each of q, k, v transposed and sliced, then all three.

    A library that copies passes; one that reads K with the strides of V does not.
    """
    problem, _ = plain(case, device)
    found = []
    for kind in ("transposed", "sliced"):
        for names in (("q_THD",), ("k",), ("v",), ("q_THD", "k", "v")):
            views = {name: restrided(getattr(problem, name), kind) for name in names}
            found += _same_answer(backend, problem, case, views, f"strides of {', '.join(names)} ({kind})")
    return found


def restrided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values as a view: of a tensor stored with two dimensions swapped, or of the last half of a tensor
    twice as wide whose first half is NaN. The last dimension keeps stride 1."""
    if kind == "transposed":
        at = tensor.dim() - 3
        return tensor.transpose(at, at + 1).contiguous().transpose(at, at + 1)
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan, device=tensor.device).to(tensor.dtype)
    view = wide[..., tensor.shape[-1] :]
    view.copy_(tensor)
    return view


def expand(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """K and V of one head, expanded over all with stride 0, at kv_len % 32 == 1 (pytorch#191937)."""
    if case.heads_kv == 1:
        raise Skip("one KV head: nothing to expand")
    lengths = []
    for m in case.members:
        kv_len = max(33, -(-m.kv_len // 32) * 32 + 1)
        lengths.append((kv_len if m.q_len == m.kv_len else m.q_len, kv_len))
    one = variant(backend, case, batch=batch_text(lengths))
    spec, at = spec_of(one), 1 if one.layout == "paged_hnd" else -2
    members = []
    for member in members_of(one, spec, "normal", 17):
        k, v = (t[:, :1].repeat(1, spec.heads_kv, 1) for t in (member.k_LGD, member.v_LGD))
        members.append(replace(member, k_LGD=k, v_LGD=v))
    problem = build(one, spec, members, seed=17, device=device, poison=(0.0, 0.0))
    views = {
        name: getattr(problem, name).narrow(at, 0, 1).contiguous().expand_as(getattr(problem, name))
        for name in ("k", "v")
    }
    return _same_answer(backend, problem, one, views, "stride 0 of k, v (expanded heads)")


def _same_answer(
    backend: Backend, problem: Problem, case: AttentionCase, views: dict[str, torch.Tensor], dimension: str
) -> list[Reason]:
    try:
        out, _ = run(backend, problem, **views)
    except Exception as error:
        return [raised(dimension, error).model_copy(update={"code": Code.STRIDE_UNSUPPORTED})]
    if is_right(out, problem, case):
        return []
    if not is_right(run(backend, problem)[0], problem, case):
        raise Skip("the output is wrong with contiguous inputs already")
    text = "silently wrong: the strides are not read"
    return [reason(Code.STRIDE_UNSUPPORTED, dimension, "wrong output", "the output of contiguous inputs", text)]


def empty_members(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Members without a token, without keys, and with more queries than keys, in company and in each position."""
    company = [(m.q_len, m.kv_len) for m in case.members]
    kinds = {"zero-length member": (0, 0), "member without keys": (1, 0), "more queries than keys": (5, 3)}
    found: list[Reason] = []
    declared: list[str] = []
    for name, lengths in kinds.items():
        for members in ([lengths, *company], [*company, lengths]):
            try:
                one = variant(backend, case, batch=batch_text(members))
            except Skip as refused:
                declared.append(str(refused))
                continue
            found += [r for r in _empty(backend, one, device, name) if r not in found]
    if len(declared) == 2 * len(kinds):
        raise Skip(declared[0])
    return found


def _empty(backend: Backend, case: AttentionCase, device: str, name: str) -> list[Reason]:
    problem, _ = plain(case, device)
    try:
        out, lse = run(backend, problem)
    except Exception as error:
        return [raised(name, error).model_copy(update={"code": Code.EMPTY_KV_UNSUPPORTED})]
    empty_T = torch.isinf(problem.truth.lse_QH).all(-1)
    if bool(empty_T.any()) and out.shape == problem.truth.out_QHD.shape:
        values = out[empty_T].float()
        if not bool((values.abs() <= 1e-6).all()):
            seen = "NaN or Inf" if not bool(torch.isfinite(values).all()) else f"up to {float(values.abs().max()):.3g}"
            text = "a row that sees no key must give 0"
            return [reason(Code.EMPTY_ROW_SEMANTICS, name, seen, "0", text)]
        if _empty_lse_is_wrong((out, lse), empty_T):
            text = "the LSE of a row that sees no key must be -inf"
            return [reason(Code.EMPTY_ROW_SEMANTICS, f"{name}: lse", "not -inf", "-inf", text)]
    text = f"a batch with a {name} gives wrong rows to others"
    return [r.model_copy(update={"dimension": f"{name}: {r.dimension}"}) for r in judge(out, problem, case, text)]


def _empty_lse_is_wrong(result: Result, empty_T: torch.Tensor) -> bool:
    return result[1] is not None and not bool(torch.isneginf(result[1][empty_T]).all())


def index_range(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Offsets that the case's KV cache needs, from the configuration alone: nothing is run."""
    if case.page_size is None:
        raise Skip("the KV cache is not paged")
    num_pages = sum(-(-m.kv_len // case.page_size) for m in case.members)
    return [] if index_bits(backend.name, device) > 32 else index_reasons(num_pages, case)


def index_reasons(num_pages: int, case: AttentionCase) -> list[Reason]:
    """INDEX_RANGE when the last element of `num_pages` pages lies beyond a signed 32-bit offset
    (vllm#50427, PR#47671: silently wrong keys, one block apart, or a crash)."""
    stride = (case.page_size or 1) * case.heads_kv * max(case.head_dim_qk, case.head_dim_vo)
    last = num_pages * stride - 1
    if last <= INT32_MAX:
        return []
    size = DTYPE_BYTES.get(case.dtype, 2) if case.kv_dtype in ("auto", case.dtype) else 1
    text = f"{num_pages} pages of {stride} elements ({num_pages * stride * size / 2**30:.3g} GiB of K)"
    message = f"32-bit offsets wrap at page {INT32_MAX // stride}: fewer pages, or a kernel with 64-bit offsets"
    return [reason(Code.INDEX_RANGE, "num_pages x page stride", text, f"<= {INT32_MAX} elements", message)]
