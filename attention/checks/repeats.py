"""Checks that run more than once: the same call again, after another, in company, and from a captured graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from attention.backends.base import Backend, Batch, Planned
from attention.backends.oracle import attend
from attention.cases import AttentionCase
from attention.checks.common import (
    Measured,
    Result,
    Skip,
    batch_text,
    gap,
    is_right,
    judge,
    plain,
    raised,
    reason,
    run,
    same_bits,
    settle,
    variant,
)
from attention.checks.memory import restrided
from attention.reasons import Code, Reason
from attention.replay.members import Member
from attention.replay.problems import Problem
from attention.replay.truths import joined

#: (planned, q, k, v) -> the static output, and how to replay.
Capture = Callable[
    [Planned, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, Callable[[], None]],
]


def first_call(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Seconds of a first plan and run, compilation included when nothing ran before in this process."""
    problem, _ = plain(case, device)
    started = time.perf_counter()
    run(backend, problem)
    return Measured(time.perf_counter() - started)


def repeatability(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """The same call twice from one plan, and once from a new one, gives the same bits."""
    problem, _ = plain(case, device)
    planned = backend.plan(problem.batch, problem.spec)
    with torch.inference_mode():
        first, again = (_copied(planned.run(problem.q_THD, problem.k, problem.v)) for _ in range(2))
    settle(problem.q_THD)
    found = []
    for what, other in (("one plan run twice", again), ("a new plan", run(backend, problem))):
        if not same_bits(first, other):
            text = f"the same call gives other bits ({what})"
            found.append(reason(Code.NONDETERMINISTIC, what, gap(first, other), "bit-equal", text))
    return found


def call_order(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """A, then B of other strides or shape, then A again: caches keyed by too little replay the wrong kernel
    (flashinfer PR#4270). A must keep its bits, and B must be right."""
    a, _ = plain(case, device)
    first, control = _copied(run(backend, a)), run(backend, a)
    if not same_bits(first, control):
        raise Skip("a repeated call alone changes bits already: see repeatability")
    others: list[tuple[str, Problem, AttentionCase]] = []
    b, _ = plain(case, device, seed=12)
    b = replace(b, q_THD=restrided(b.q_THD, "sliced"), k=restrided(b.k, "transposed"), v=restrided(b.v, "transposed"))
    others.append(("other strides", b, case))
    longer = batch_text((m.q_len + 17 * (m.q_len == m.kv_len), m.kv_len + 17) for m in case.members)
    try:
        shape = variant(backend, case, batch=longer)
        others.append(("another shape", plain(shape, device, seed=12)[0], shape))
    except Skip:
        pass
    found: list[Reason] = []
    for what, other, its_case in others:
        try:
            between = _copied(run(backend, other))
        except Exception:  # noqa: S112 - strides that are refused are the check `strides`
            continue
        again = run(backend, a)
        if not is_right(between[0], other, its_case) and is_right(run(backend, _dense(other))[0], other, its_case):
            text = f"wrong after a call with the same shape ({what})"
            found.append(reason(Code.NUMERIC_DRIFT, f"call order: {what}", "B is wrong after A", "right", text))
        if same_bits(first, again):
            continue
        if is_right(again[0], a, case):
            text = f"the same call after one with {what} runs another kernel"
            found.append(reason(Code.SUBKERNEL_CHANGED, f"call order: {what}", gap(first, again), "bit-equal", text))
        else:
            text = f"the same call after one with {what} is wrong: it replays the other's plan"
            found.append(reason(Code.NUMERIC_DRIFT, f"call order: {what}", gap(first, again), "bit-equal", text))
    return found


def _dense(problem: Problem) -> Problem:
    return replace(problem, q_THD=problem.q_THD.contiguous(), k=problem.k.contiguous(), v=problem.v.contiguous())


def _copied(result: Result) -> Result:
    """A copy: a plan may give the same buffers to every run."""
    return result[0].clone(), None if result[1] is None else result[1].clone()


def batch_invariance(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """A member alone and in company. Only rounding may differ, which is recorded as BATCH_VARIANT with its size;
    a member whose answer itself depends on its company is NUMERIC_DRIFT."""
    lengths = [(m.q_len, m.kv_len) for m in case.members]
    if len(lengths) == 1:
        q_len, kv_len = lengths[0]
        lengths.append((q_len, kv_len + 29) if q_len != kv_len else (kv_len + 29, kv_len + 29))
    whole = variant(backend, case, batch=batch_text(lengths))
    problem, _ = plain(whole, device)
    together = _copied(run(backend, problem))
    found: list[Reason] = []
    row, largest = 0, 0.0
    for i, (q_len, _) in enumerate(lengths):
        rows = slice(row, row + q_len)
        row += q_len
        if not q_len or lengths.index(lengths[i]) != i or i > 8:
            continue
        single = variant(backend, whole, batch=batch_text([lengths[i]]))
        one = alone(problem, i)
        out, _ = run(backend, one)
        if torch.equal(out, together[0][rows]):
            continue
        in_company = together[0][rows]
        if is_right(out, one, single) and not is_right(in_company, one, single):
            text = f"member {i} of {whole.batch} is right alone and wrong in company"
            found.append(reason(Code.NUMERIC_DRIFT, "company", gap((out, None), (in_company, None)), "right", text))
        else:
            largest = max(largest, float((out.double() - in_company.double()).abs().max()))
    if largest:
        text = "a member's rounding depends on its company"
        found.append(reason(Code.BATCH_VARIANT, "company", f"max abs {largest:.3g}", "bit-equal", text))
    return found


def alone(problem: Problem, member: int) -> Problem:
    """The problem of one member, on its part of the same cache."""
    batch, truth = problem.batch, problem.truth
    start = sum(batch.q_lens[:member])
    rows = slice(start, start + batch.q_lens[member])
    k, v = problem.k, problem.v
    if batch.layout == "contiguous":
        longest = batch.kv_lens[member]  # some libraries plan for a cache as long as its longest member
        k, v = k[member : member + 1, :longest], v[member : member + 1, :longest]
    elif batch.layout == "ragged":
        first = sum(batch.kv_lens[:member])
        k, v = (t[first : first + batch.kv_lens[member]] for t in (k, v))
    own = Batch(
        (batch.q_lens[member],),
        (batch.kv_lens[member],),
        (batch.block_tables[member],) if batch.paged else (),
        batch.page_size,
        layout=batch.layout,
        masks=None if batch.masks is None else (batch.masks[member],),
    )
    its_truth = replace(
        truth,
        out_QHD=truth.out_QHD[rows],
        lse_QH=truth.lse_QH[rows],
        rounded_QHD=truth.rounded_QHD[rows],
    )
    return replace(problem, batch=own, q_THD=problem.q_THD[rows], k=k, v=v, truth=its_truth)


def graph_replay(backend: Backend, case: AttentionCase, device: str) -> list[Reason]:
    """Capture with the case's lengths, replan shorter on other pages, replay, and compare with the oracle."""
    if not device.startswith("cuda"):
        raise Skip("CUDA graphs need a CUDA device")
    return replayed(backend, case, device, _cuda_capture)


@torch.inference_mode()
def replayed(backend: Backend, case: AttentionCase, device: str, capture: Capture) -> list[Reason]:
    """`graph_replay` with the way to capture as an argument."""
    if case.custom_mask:
        raise Skip("a custom mask is planned for its lengths")
    case = variant(backend, case, execution="cuda_graph")
    a, _ = plain(case, device)
    b, members = plain(case, device, seed=12)
    try:
        planned = backend.plan(a.batch, a.spec, graph=True)
        q, k, v = a.q_THD.clone(), a.k.clone(), a.v.clone()
        out, replay = capture(planned, q, k, v)
        replay()
        settle(out)
    except Exception as error:
        return [raised("capture", error).model_copy(update={"code": Code.GRAPH_CAPTURE_FAILED})]
    found = judge(out, a, case, "replay of the captured lengths")
    if found:
        return [r.model_copy(update={"code": Code.GRAPH_REPLAY_STALE, "dimension": "same lengths"}) for r in found]
    short = _shorter(b, members, device)
    try:
        planned.replan(short.batch)
    except Exception as error:
        return [raised("replan", error).model_copy(update={"code": Code.GRAPH_CAPTURE_FAILED})]
    for static, fresh in ((q, b.q_THD), (k, b.k), (v, b.v)):
        static.copy_(fresh)
    out.fill_(math.nan)
    replay()
    settle(out)
    if is_right(out, short, case):
        return []
    # What the old lengths and pages would give on the new inputs says which of the two is stale.
    stale = replace(b, batch=a.batch)
    old = run(backend, stale)[0]
    seen = "the captured lengths and pages" if torch.allclose(old, out, rtol=1e-2, atol=1e-2) else "another answer"
    if not bool(torch.isfinite(out).all()):
        seen = "rows that were not written, or NaN"
    text = "a replay after replan does not serve the new batch"
    return [reason(Code.GRAPH_REPLAY_STALE, "kv_lens and pages", seen, "the new lengths", text)]


def _shorter(problem: Problem, members: list[Member], device: str) -> Problem:
    """The same caches with about half the keys of every member, and its truth."""
    batch = problem.batch
    kv_lens = tuple(max(q, (kv + 1) // 2) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True))
    truths = [
        attend(m.q_QHD.to(device), m.k_LGD[:n].to(device), m.v_LGD[:n].to(device), problem.spec)
        for m, n in zip(members, kv_lens, strict=True)
    ]
    return replace(problem, batch=replace(batch, kv_lens=kv_lens), truth=joined(truths))


def _cuda_capture(
    planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], None]]:
    with torch.inference_mode():
        # Lazy set-up (workspaces, autotuning) must not be captured: PyTorch's notes ask for warm-up on a side stream.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                planned.run(q, k, v)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = planned.run(q, k, v)
    return out, graph.replay
