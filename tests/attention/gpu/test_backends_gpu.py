"""Every backend that is declared for a case computes it on this GPU, judged by the float64 oracle.

    python -m pytest -q -m gpu tests/attention/gpu/test_backends_gpu.py -k fa2

A case with declared reasons is skipped with them, and so is a plan that is refused by name. One failure says
everything that is wrong at once. After an illegal memory access nothing else can run in that process: run one
backend a process (`-k`); cases with empty members come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from attention import confirm
from attention.backends import create, expand
from attention.backends.base import Batch, Planned
from attention.cases import AttentionCase, Inputs
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.replay.figures import compare
from attention.replay.problems import Problem, make
from gates.thresholds import load_limits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = (*expand("flash_attn"), *expand("flex_attention"), *expand("torch_sdpa"), "triton:paged")
#: cuDNN promises no bitwise repetition: 8q1s300 with head dim 256 differs by an ulp from run to run on an H200.
NOT_REPEATABLE = ("torch_sdpa:cudnn",)
PAGES = {"flash_attn:fa2": (256,)}  # what a backend cannot read, its matrix says; elsewhere these
LAYOUTS = ("paged_nhd", "paged_hnd", "ragged", "contiguous")

MIXED = "q5s40_q1s33_q20_q130s300"
BATCHES = {
    "mixed": MIXED,
    "prefill": "q257",
    "square": "2q129",
    "decode": "q1s31_q1s64_q1s129_q1s600",
    "one decode": "q1s2000",
    "even decode": "8q1s300",
    "speculative": "4q4s333",
    "residues": "q1s2_q1s31_q1s32_q1s33_q1s63_q1s64_q1s65_q1s127_q1s128_q1s129",
    "prefill residues": "q31_q32_q33_q63_q64_q65_q127_q128_q129",
    "pages": "q3s600_q1s513_q17s700",
}
EDGES = {
    "one key": "q1s1_q1s65",
    "more queries than keys": "q40s33_q9s5_q1s64",
    "even, more queries than keys": "2q9s5",
    "no keys": "q3s0_q5s40",
    "decode without keys": "q1s0_q1s33_q1s300",
    "no queries": "q0s20_q3s9_q1s64",
    "nothing": "q4s0_q0s7",
}
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 0)},
    "window of one": {"window": (0, 0)},
    "two-sided window": {"causal": False, "window": (20, 5)},
    "not causal": {"causal": False},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi": True},
    "ALiBi, not causal": {"alibi": True, "causal": False},
    "sinks": {"sinks": True},
    "custom mask": {"custom_mask": True},
    "custom mask, not causal": {"custom_mask": True, "causal": False},
    "window, softcap": {"window": (20, 0), "softcap": 5.0},
    "window, sinks": {"window": (20, 0), "sinks": True},
}


def case(batch: str = MIXED, **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "extend",
        "batch": batch,
        "heads_q": 8,
        "heads_kv": 2,
        "head_dim_qk": 64,
        "dtype": "bfloat16",
        "layout": "paged_nhd",
        **changes,
    }
    fields.setdefault("head_dim_vo", fields["head_dim_qk"])
    if not fields["layout"].startswith("paged"):
        fields["page_size"] = None
    return AttentionCase(**fields)


def cases_of(backend: str) -> Iterator[tuple[str, AttentionCase]]:
    """Name and case, the risky ones last."""
    if backend.startswith("flex"):
        yield from cases_of_flex()
        return
    page, *others = PAGES.get(backend, (16, 64))
    for layout in LAYOUTS:
        for name, batch in BATCHES.items():
            yield f"{name}, {layout} {page}", case(batch, layout=layout, page_size=page)
    for other in others:
        for layout in ("paged_nhd", "paged_hnd"):
            for name in ("mixed", "decode", "pages"):
                yield f"{name}, {layout} {other}", case(BATCHES[name], layout=layout, page_size=other)
    for dim in (64, 128, 256):
        for dtype in ("bfloat16", "float16", "float32"):
            for layout in LAYOUTS[:2]:
                one = case(head_dim_qk=dim, dtype=dtype, layout=layout, page_size=page)
                yield f"mixed, {layout}, D{dim} {dtype}", one
            one = case(BATCHES["even decode"], head_dim_qk=dim, dtype=dtype, layout="contiguous")
            yield f"even decode, contiguous, D{dim} {dtype}", one
    for ratio in (1, 3, 5, 6, 7):
        for name in ("mixed", "even decode", "decode"):
            yield f"{name}, GQA {ratio}", case(BATCHES[name], heads_q=2 * ratio, page_size=page)
    for feature, changes in FEATURES.items():
        for layout in LAYOUTS:
            for name in ("mixed", "decode"):
                yield f"{name}, {layout}, {feature}", case(BATCHES[name], layout=layout, page_size=page, **changes)
        yield f"prefill, {feature}", case(BATCHES["prefill"], layout="ragged", **changes)
        yield f"mixed, D128, {feature}", case(layout="ragged", head_dim_qk=128, **changes)
    for name, batch in EDGES.items():
        for layout in LAYOUTS:
            yield f"{name}, {layout}", case(batch, layout=layout, page_size=page)
        yield f"{name}, window", case(batch, page_size=page, window=(20, 0))
        yield f"{name}, not causal", case(batch, page_size=page, causal=False)
        yield f"{name}, sinks", case(batch, layout="ragged", sinks=True)
        yield f"{name}, custom mask", case(batch, layout="ragged", custom_mask=True)
        yield f"{name}, ALiBi", case(batch, layout="ragged", alibi=True)


def cases_of_flex() -> Iterator[tuple[str, AttentionCase]]:
    """FlexAttention compiles for seconds a structure: every batch and feature once, in few structures."""
    for name, batch in BATCHES.items():
        yield f"{name}, paged_hnd", case(batch, layout="paged_hnd", page_size=16)
    for name in ("mixed", "decode"):
        yield f"{name}, paged_nhd 64", case(BATCHES[name], page_size=64)
        yield f"{name}, contiguous", case(BATCHES[name], layout="contiguous")
    yield "mixed, ragged", case(layout="ragged")
    for changes in ({"dtype": "float16"}, {"dtype": "float32"}, {"head_dim_qk": 128}, {"heads_q": 2}, {"heads_q": 10}):
        yield f"mixed, {', '.join(map(str, changes.values()))}", case(page_size=16, **changes)
    for feature, changes in FEATURES.items():
        for name in ("mixed", "decode"):
            yield f"{name}, {feature}", case(BATCHES[name], page_size=16, **changes)
    for name, batch in EDGES.items():
        yield f"{name}, paged_nhd", case(batch, page_size=16)
        yield f"{name}, window", case(batch, page_size=16, window=(20, 0))
        yield f"{name}, not causal", case(batch, page_size=16, causal=False)
    for feature in ("sinks", "custom mask", "ALiBi"):
        yield f"no keys, {feature}", case(EDGES["no keys"], page_size=16, **FEATURES[feature])


TABLE = [
    pytest.param(backend, one, id=f"{backend}: {name}")
    for backend in (BACKENDS if torch.cuda.is_available() else ())
    for name, one in cases_of(backend)
]


@cache
def problem_of(one: AttentionCase, inputs: Inputs) -> Problem:
    """One problem for all backends: its truth costs more than any of them."""
    return make(one, inputs, 3, device="cuda")


def skip_what_is_declared(backend: str, one: AttentionCase) -> None:
    reasons = declared_reasons(backend, one, device="cuda")
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def plan(backend: str, problem: Problem, *, graph: bool = False) -> Planned:
    """The plan; a test skips where it is refused with a reason."""
    try:
        return create(backend, "cuda").plan(problem.batch, problem.spec, graph=graph)
    except UserError as refused:
        pytest.skip(f"refused at plan: {refused}")


def found_wrong(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> list[str]:
    """Everything that is wrong with an answer, in words."""
    truth, spec = problem.truth, problem.spec
    dtype = str(spec.dtype).removeprefix("torch.")
    wrong = []
    if out.shape != truth.out_QHD.shape or out.dtype != spec.dtype:
        return [f"output {list(out.shape)} {out.dtype}, wanted {list(truth.out_QHD.shape)} {spec.dtype}"]
    blind = ~torch.isfinite(truth.lse_QH)
    if not torch.isfinite(out).all():
        rows = (~torch.isfinite(out)).flatten(1).any(1).nonzero()[:, 0].tolist()
        wrong.append(
            f"NaN or Inf in token rows {rows[:20]} ({len(rows)}): unowned slots hold NaN; {where(problem, rows[0])}"
        )
    elif bool((out[blind] != 0).any()):
        wrong.append(f"{int((out[blind] != 0).any(-1).sum())} (token, head) rows without a key are not 0")
    else:
        figures = compare(out, lse, truth, spec.dtype)
        limits = load_limits("replay", "full").of_class(dtype)
        for name in ("r_rms", "r_max", "r_row"):
            if not getattr(figures, name) <= limits.value(name):
                token, head = divmod(figures.worst_row_index, spec.heads_q)
                wrong.append(
                    f"{name} {getattr(figures, name):.3g} over {limits.value(name):g}; relative L2 "
                    f"{figures.rel_l2:.3g}, worst row {figures.worst_row:.3g} at head {head}, {where(problem, token)}"
                )
    if lse is None:
        return wrong
    if lse.shape != truth.lse_QH.shape or lse.dtype != torch.float32:
        return [*wrong, f"LSE {list(lse.shape)} {lse.dtype}, wanted {list(truth.lse_QH.shape)} float32"]
    if not bool((lse[blind] == float("-inf")).all()):
        wrong.append(f"LSE of rows without a key is {lse[blind].unique()[:4].tolist()}, wanted -inf")
    error = (lse.double() - truth.lse_QH)[~blind].abs()
    limit = load_limits("replay", "full").value("lse")
    if error.numel() and not float(error.max()) <= limit:
        base2 = (lse.double() * torch.log(torch.tensor(2.0)).item() - truth.lse_QH)[~blind].abs().max()
        hint = ", it is of base 2" if float(base2) <= limit else ""
        token, head = divmod(int(((lse.double() - truth.lse_QH).abs().masked_fill(blind, 0)).argmax()), spec.heads_q)
        wrong.append(f"LSE off by {float(error.max()):.3g} over {limit:g}{hint}; head {head}, {where(problem, token)}")
    return wrong


def where(problem: Problem, token: int) -> str:
    """`member 2 (q20 kv40), query 7`."""
    for member, (q_len, kv_len) in enumerate(zip(problem.batch.q_lens, problem.batch.kv_lens, strict=True)):
        if token < q_len:
            return f"member {member} (q{q_len} kv{kv_len}), query {token}"
        token -= q_len
    return "no member"


@pytest.mark.parametrize(("backend", "one"), TABLE)
def test_a_declared_case_is_computed_and_confirmed(backend: str, one: AttentionCase) -> None:
    skip_what_is_declared(backend, one)
    whole = all(m.q_len and m.kv_len for m in one.members)
    kinds: tuple[Inputs, ...] = ("normal", "needle") if whole else ("normal",)
    wrong = []
    for inputs in kinds:
        problem = problem_of(one, inputs)
        planned = plan(backend, problem)
        with torch.inference_mode():
            (out, lse), confirmed = confirm.watch(
                lambda planned=planned, problem=problem: planned.run(problem.q_THD, problem.k, problem.v),
                device="cuda",
            )
            again, again_lse = planned.run(problem.q_THD, problem.k, problem.v)
        torch.cuda.synchronize()
        wrong += [f"{inputs}: {what}" for what in found_wrong(problem, out, lse)]
        if backend in NOT_REPEATABLE:
            wrong += [f"{inputs}, second run: {what}" for what in found_wrong(problem, again, again_lse)]
        elif not torch.equal(out.nan_to_num(-9), again.nan_to_num(-9)):
            wrong.append(f"{inputs}: a second run of the plan differs by {float((out - again).abs().max()):.3g}")
        launched = any(m.q_len and m.kv_len for m in one.members)
        if launched and confirmed != backend:
            wrong.append(f"{inputs}: the profiler saw {confirmed}")
    assert not wrong, f"{backend} on {one.batch} {one.layout} ({planned.forced_copies}):\n  " + "\n  ".join(wrong)


GRAPHS = [
    pytest.param(backend, layout, changes, id=f"{backend}: {layout}, {name}")
    for backend in expand("flash_attn")
    for layout in LAYOUTS
    for name, changes in {
        "decode": {"batch": "q1s300_q1s600_q1s64_q1s129"},
        "mixed": {"batch": "q5s300_q1s600_q1s64_q17s129"},
        "window": {"batch": "q1s300_q1s600_q1s64_q1s129", "window": (20, 0)},
        "MHA": {"batch": "q1s300_q1s600_q1s64_q1s129", "heads_kv": 8},
    }.items()
]


@pytest.mark.parametrize(("backend", "layout", "changes"), GRAPHS)
def test_a_captured_plan_serves_a_shorter_batch(backend: str, layout: str, changes: dict[str, Any]) -> None:
    page = PAGES.get(backend, (16,))[0]
    one = case(layout=layout, page_size=page, execution="cuda_graph", **changes)
    skip_what_is_declared(backend, one)
    long = make(one, "normal", 5, device="cuda")
    planned = plan(backend, long, graph=True)
    q, k, v = (tensor.clone() for tensor in (long.q_THD, long.k, long.v))
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            planned.run(q, k, v)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = planned.run(q, k, v)
        graph.replay()
        torch.cuda.synchronize()
        wrong = [f"as captured: {what}" for what in found_wrong(long, out, lse)]
        for name, batch in (
            ("shorter", "{0}s31_{1}s513_{2}s1_{3}s129"),
            ("an empty member", "{0}s31_{1}s9_{2}s0_{3}s64"),
        ):
            text = batch.format(*(f"q{q_len}" for q_len in long.batch.q_lens))
            short = make(one.model_copy(update={"batch": text}), "normal", 6, device="cuda")
            try:
                planned.replan(short.batch)
            except UserError:
                assert name == "an empty member", "a batch that only shrinks is served"
                continue
            q.copy_(short.q_THD)
            laid_into(k, short.k, short.batch)
            laid_into(v, short.v, short.batch)
            graph.replay()
            torch.cuda.synchronize()
            wrong += [f"{name}: {what}" for what in found_wrong(short, out, lse)]
    assert not wrong, f"{backend}, {layout}, graph of {one.batch}:\n  " + "\n  ".join(wrong)


def laid_into(cache: torch.Tensor, keys: torch.Tensor, batch: Batch) -> None:
    """A shorter problem's keys at the captured address, NaN in all that it does not own."""
    cache.fill_(float("nan"))
    if batch.layout == "contiguous":
        cache[:, : keys.shape[1]] = keys
    else:
        cache[: keys.shape[0]] = keys
