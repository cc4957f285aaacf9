"""FlashInfer on a GPU, judged by the oracle: a table of (kernel, case), CUDA graphs, and what a run costs.

    python -m pytest tests/attention/gpu/test_flashinfer_gpu.py

The first run compiles (20 to 90 s a module); the modules stay in FlashInfer's cache. A case that the device cannot
serve by its architecture is skipped with the reason; any other refusal is a failure, since the table holds what the
rules allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import FlashInfer
from attention.backends.flashinfer_jit import jit_modules, warm
from attention.cases import AttentionCase, Inputs
from attention.confirm import watch
from attention.reasons import Code
from attention.replay.figures import compare
from attention.replay.problems import Problem
from gates.thresholds import load_limits
from tests.attention.flashinfer_problems import MLA, case, problem_of, shorter

pytestmark = pytest.mark.gpu

DECODE = "q1s257_q1s16_q1s1000_q1s1"
EXTEND = "q70s300_q1s129_q64"
D128 = {"head_dim_qk": 128, "head_dim_vo": 128, "heads_q": 8}
D256 = {"head_dim_qk": 256, "head_dim_vo": 256}
MLA_PREFILL = {"head_dim_qk": 192, "head_dim_vo": 128, "heads_q": 4, "heads_kv": 4, "layout": "ragged"}

#: What both wrappers' kernels serve.
BOTH: list[tuple[str, dict[str, Any]]] = [
    *((batch, {"layout": layout}) for batch in (DECODE, EXTEND) for layout in ("paged_nhd", "paged_hnd", "ragged")),
    *((batch, {"layout": "contiguous"}) for batch in (DECODE, EXTEND)),
    *((DECODE, {"page_size": size}) for size in (1, 2, 32, 128, 256)),
    *((EXTEND, {"page_size": size}) for size in (1, 256)),
    *((DECODE, {"heads_q": 2 * ratio}) for ratio in (1, 5, 6, 7, 8)),
    (EXTEND, {"heads_q": 14, **{k: D128[k] for k in ("head_dim_qk", "head_dim_vo")}}),
    (DECODE, {"window": (63, 0)}),
    (EXTEND, {"window": (63, 0)}),
    (EXTEND, {"window": (0, 0)}),
    (DECODE, {"softcap": 20.0}),
    (EXTEND, {"softcap": 20.0}),
    (EXTEND, {"causal": False}),
    (EXTEND, {"dtype": "float16"}),
    (DECODE, {"sinks": True, **D128}),
    (EXTEND, {"sinks": True, **D128}),
    (EXTEND, {"sinks": True, "window": (63, 0), **D128}),
    (DECODE, D256),
    (EXTEND, D256),
    (EXTEND, MLA_PREFILL),
    *(("q1s257_q1s16_q1s700", {**MLA, "layout": layout}) for layout in ("paged_nhd", "paged_hnd", "contiguous")),
    ("q1s257_q3s40", {**MLA, "page_size": 64}),
]
TABLE: list[tuple[str, str, dict[str, Any]]] = [
    *((kernel, *row) for kernel in ("fa2", "fa3") for row in BOTH),
    ("fa2", EXTEND, {"custom_mask": True}),
    ("fa2", DECODE, {"custom_mask": True, "window": (63, 0)}),
    ("fa2", EXTEND, {"custom_mask": True, "layout": "ragged"}),
    ("fa2", DECODE, {"alibi": True, "heads_q": 8}),
    ("fa2", EXTEND, {"alibi": True, "heads_q": 6}),
    *(("fa2", b, {"kv_dtype": kv, **D128}) for b in (DECODE, EXTEND) for kv in ("float8_e4m3fn", "float8_e5m2")),
    ("fa2", EXTEND, {"kv_dtype": "float8_e4m3fn", "layout": "paged_hnd"}),
    ("fa2", EXTEND, {"kv_dtype": "float8_e4m3fn", "sinks": True, **D128}),
    ("fa2", "q9s4_q5", {}),
    ("fa2", "q5_q1s0_q1s40", {}),
    *(("cudnn", b, {"layout": layout, **D128}) for b in (DECODE, EXTEND) for layout in ("paged_nhd", "paged_hnd")),
    ("cudnn", DECODE, {"dtype": "float16", **D128}),
    ("cudnn", EXTEND, {"layout": "ragged", **D128}),
    ("cudnn", EXTEND, MLA_PREFILL),
    *(("xqa", DECODE, {"layout": layout, **D128}) for layout in ("paged_nhd", "paged_hnd")),
    *(("xqa", DECODE, {"page_size": size}) for size in (32, 64, 128)),
    *(("xqa", DECODE, {"heads_q": 2 * ratio, "dtype": "float16"}) for ratio in (1, 5, 7)),
    ("xqa", DECODE, {"window": (63, 0), **D128}),
    ("xqa", DECODE, {"sinks": True, **D128}),
    ("xqa", DECODE, {"kv_dtype": "float8_e4m3fn", **D128}),
    ("trtllm-gen", DECODE, D128),
    ("trtllm-gen", EXTEND, D128),
]
GRAPHS: list[tuple[str, str, dict[str, Any]]] = [
    ("fa2", DECODE.removesuffix("_q1s1"), {}),
    ("fa2", "q70s300_q1s129_q64s70", {}),
    ("fa2", "q1s257_q1s700", {"layout": "contiguous"}),
    ("fa2", "q1s257_q1s700", {"kv_dtype": "float8_e4m3fn", **D128}),
    ("fa2", "q1s257_q1s700", MLA),
    ("fa3", "q1s257_q1s700", {"layout": "paged_hnd", **D128}),
    ("fa3", "q70s300_q4s129", D128),
    ("fa3", "q1s257_q1s700", MLA),
    ("xqa", "q1s257_q1s700", D128),
    ("cudnn", "q1s257_q1s700", D128),
]


def name(row: tuple[str, str, dict[str, Any]]) -> str:
    kernel, batch, changes = row
    return "-".join([kernel, batch, *(f"{key}={value}" for key, value in changes.items())])


def problem_for(kernel: str, batch: str, changes: dict[str, Any], inputs: Inputs = "needle") -> tuple[str, Problem]:
    """A line that says what runs, and the problem; skips what this GPU is not made for."""
    pytest.importorskip("flashinfer")
    one: AttentionCase = case(batch, **changes)
    reasons = FlashInfer(kernel, "cuda").check(one)
    if any(reason.code == Code.ARCH_UNSUPPORTED for reason in reasons):
        pytest.skip("; ".join(map(str, reasons)))
    assert not reasons, f"flashinfer:{kernel} is refused by the rules: {'; '.join(map(str, reasons))}"
    line = f"flashinfer:{kernel} {one.case_id} {one.layout} page {one.page_size} {inputs} {changes}"
    return line, problem_of(one, inputs, 11, device="cuda")


def judge(line: str, problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """By the limits of the tensor gate. The LSE of rows without keys must be -inf, too."""
    figures = compare(out, lse, problem.truth, problem.spec.dtype)
    assert figures.finite_mask_equal, f"{line}: NaN or inf in row {figures.worst_row_index} (unused slots hold NaN)"
    limits = load_limits("replay", "full").of_class(str(problem.spec.dtype).removeprefix("torch."))
    seen = {"r_rms": figures.r_rms, "r_max": figures.r_max, "r_row": figures.r_row, "lse": figures.lse_max_abs or 0.0}
    over = {key: (value, limits.value(key)) for key, value in seen.items() if not value <= limits.value(key)}
    assert not over, f"{line}: figure (seen, limit) {over}; worst row {figures.worst_row_index}: {figures}"
    if lse is not None:
        empty = torch.equal(lse == -torch.inf, problem.truth.lse_QH == -torch.inf)
        assert empty, f"{line}: the LSE is -inf elsewhere than in the rows without keys"


@pytest.mark.parametrize("inputs", ["normal", "needle", "large_logit"])
@pytest.mark.parametrize("row", TABLE, ids=name)
def test_the_table_agrees_with_the_oracle_and_is_confirmed(
    row: tuple[str, str, dict[str, Any]], inputs: Inputs
) -> None:
    if "s0" in row[1] and inputs == "needle":
        pytest.skip("a member without keys has no place for a needle")
    line, problem = problem_for(*row, inputs)
    planned = FlashInfer(row[0], "cuda").plan(problem.batch, problem.spec)
    assert planned.forced_copies == []
    with torch.inference_mode():
        result, confirmed = watch(lambda: planned.run(problem.q_THD, problem.k, problem.v), device="cuda")
    judge(line, problem, *result)
    assert confirmed == planned.backend, f"{line}: the profiler names {confirmed}"


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("row", GRAPHS, ids=name)
def test_a_captured_run_serves_a_shorter_batch_after_replan(row: tuple[str, str, dict[str, Any]], lse: bool) -> None:
    line, problem = problem_for(*row)
    planned = FlashInfer(row[0], "cuda").plan(problem.batch, problem.spec, graph=True, lse=lse)
    with torch.inference_mode():
        graph, result = capture(lambda: planned.run(problem.q_THD, problem.k, problem.v))
        graph.replay()
        judge(f"{line}, captured", problem, *result)
        after = shorter(problem)
        planned.replan(after.batch)
        graph.replay()
        judge(f"{line}, replanned", after, *result)
        planned.replan(problem.batch)
        graph.replay()
        judge(f"{line}, replanned back", problem, *result)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_a_run_without_lse_launches_what_the_library_launches_and_takes_no_longer() -> None:
    _, problem = problem_for("fa2", DECODE, D128)
    planned: Any = FlashInfer("fa2", "cuda").plan(problem.batch, problem.spec, lse=False)
    pages = (problem.k, problem.v)

    def ours() -> Any:
        return planned.run(problem.q_THD, problem.k, problem.v)

    def theirs() -> Any:
        return planned._wrapper.run(problem.q_THD, pages)

    with torch.inference_mode():
        assert launches(ours) == launches(theirs)
        extra_us = min(host_us(ours) - host_us(theirs) for _ in range(5))
    assert extra_us < 1, f"run takes {extra_us:.2f} us of host time more than the wrapper's own"


def launches(call: Callable[[], Any]) -> dict[str, int]:
    """Names of the GPU kernels of one call, with their counts."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return {e.key: e.count for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA}


def host_us(call: Callable[[], Any], repeats: int = 500) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return sorted(times)[repeats // 2] * 1e6


def test_plans_share_scratch_memory_and_do_not_disturb_each_other() -> None:
    problems = [problem_for("fa2", batch, D128)[1] for batch in (DECODE, EXTEND)]
    plans = [FlashInfer("fa2", "cuda").plan(p.batch, p.spec) for p in problems]
    for _ in range(2):
        for planned, problem in zip(plans, problems, strict=True):
            judge("two plans, alternately", problem, *planned.run(problem.q_THD, problem.k, problem.v))


def test_every_module_that_a_case_needs_is_built_when_warmed() -> None:
    pytest.importorskip("flashinfer")
    cases = [case(DECODE, **D128), case(EXTEND, **D128)]
    warm("flashinfer:fa2", cases)
    assert warm("flashinfer:fa2", cases) == {}, "what is loaded is not built again"
    built = {module.name for module in jit_modules() if module.library is not None}
    assert any(name.startswith("batch_prefill_with_kv_cache") for name in built), built
