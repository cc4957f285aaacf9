"""The FlashInfer adapter on the CPU, over a stand-in that computes from what the library's calls are given.

The numbers are judged by the oracle, so that a wrong page, length, scale or base shows; the real library is judged
in gpu/test_flashinfer_gpu.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import matrix
from attention.backends import create, expand, flashinfer_plan, flashinfer_tables
from attention.backends.base import Batch, alibi_slopes
from attention.backends.flashinfer import FlashInfer, library_call
from attention.backends.flashinfer_jit import jit_modules, warm
from attention.backends.flashinfer_plan import LN_2, workspace
from attention.confirm import backend_of
from attention.errors import UserError
from attention.matrix import declared_reasons
from attention.reasons import Code
from attention.replay.problems import Problem, make
from tests.attention.flashinfer_problems import MLA, case, problem_of, shorter
from tests.fakes import flashinfer as fake
from tests.fakes.flashinfer_numerics import slopes_of

ATOL = {"bfloat16": 2e-2, "float16": 4e-3}
LAYOUTS = ("paged_nhd", "paged_hnd", "contiguous", "ragged")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fake.Call]]:
    monkeypatch.setattr(flashinfer_plan, "WORKSPACE_BYTES", 1024)
    flashinfer_plan._workspaces.clear()
    flashinfer_tables._cudnn_graphs.clear()
    yield fake.install(monkeypatch)
    flashinfer_plan._workspaces.clear()


def plan(kernel: str, problem: Problem, **options: Any) -> Any:
    return FlashInfer(kernel, "cpu").plan(problem.batch, problem.spec, **options)


def judged(kernel: str, problem: Problem, **options: Any) -> Any:
    """Plan, run, compare with the oracle; the plan."""
    planned = plan(kernel, problem, **options)
    assert_right(problem, *planned.run(problem.q_THD, problem.k, problem.v))
    return planned


def assert_right(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    exact = problem.truth
    torch.testing.assert_close(out.double(), exact.out_QHD, rtol=0, atol=ATOL[str(problem.spec.dtype)[6:]])
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), exact.lse_QH, rtol=0, atol=1e-3)


def noted(calls: list[fake.Call], name: str) -> dict[str, Any]:
    return next(given for called, given in reversed(calls) if called == name)


# Pages, lengths and features, through the numbers.


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", ["q5s37_q1s16_q20", "q1s37_q1s16_q1s1", "q33"])
def test_wrappers_serve_every_layout(calls: list[fake.Call], kernel: str, layout: str, batch: str) -> None:
    planned = judged(kernel, make(case(batch, layout=layout), "needle", 1))
    assert planned.forced_copies == [], "no layout costs a copy"


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd"])
def test_every_page_size_is_served(calls: list[fake.Call], layout: str, page_size: int) -> None:
    judged("fa2", make(case("q5s300_q1s256", layout=layout, page_size=page_size), "needle", 2))


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 8])
def test_every_ratio_of_heads_is_served_by_tensor_cores(calls: list[fake.Call], ratio: int) -> None:
    judged("fa2", make(case("q1s40_q1s7", heads_q=2 * ratio), "normal", 3))
    assert noted(calls, "decode.init")["use_tensor_cores"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"window": (7, 0)},
        {"window": (0, 0)},
        {"window": (7, None), "causal": False},
        {"window": (None, 0), "causal": False},
        {"causal": False},
        {"softcap": 5.0},
        {"dtype": "float16"},
        {"custom_mask": True},
        {"custom_mask": True, "window": (7, 0)},
        {"head_dim_qk": 128, "head_dim_vo": 128},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
@pytest.mark.parametrize("layout", ["paged_hnd", "contiguous", "ragged"])
def test_features_reach_the_library(calls: list[fake.Call], layout: str, changes: dict[str, Any]) -> None:
    for batch in ("q5s37_q1s16_q20", "q1s37_q1s16"):
        judged("fa2", make(case(batch, layout=layout, **changes), "needle", 4))


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("changes", [{}, {"window": (7, 0)}], ids=["full", "window"])
@pytest.mark.parametrize("batch", ["q5s37_q1s16", "q1s37_q1s16"])
def test_sinks_run_as_a_module_of_their_own(
    calls: list[fake.Call], kernel: str, changes: dict[str, Any], batch: str
) -> None:
    judged(kernel, make(case(batch, sinks=True, **changes), "normal", 5))
    names = []
    for dims in (64, 128):
        plan(kernel, make(case(batch, sinks=True, head_dim_qk=dims, head_dim_vo=dims, **changes), "normal", 5))
        names.append(noted(calls, "prefill.init")["jit_args"][0])
    assert len(set(names)) == 2, "modules of two head dims must not share a name"
    assert noted(calls, "prefill.init")["jit_args"][-2:] == ["AttentionSink", f"{kernel} sink"]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("batch", ["q5s37_q1s16", "q1s37_q1s16"])
@pytest.mark.parametrize("sinks", [False, True])
def test_scales_of_quantised_keys_are_applied_once(
    calls: list[fake.Call], kv_dtype: str, batch: str, sinks: bool
) -> None:
    # The CPU cannot index float8; the stand-in sees the same numbers in float16.
    problem = make(case(batch, kv_dtype=kv_dtype, sinks=sinks), "normal", 6)
    spec = replace(problem.spec, kv_dtype=torch.float16)
    judged("fa2", replace(problem, spec=spec, k=problem.k.half(), v=problem.v.half()))


@pytest.mark.parametrize("heads", [6, 8])
@pytest.mark.parametrize("batch", ["q5s37_q20", "q1s37_q1s16"])
def test_alibi_with_the_librarys_own_slopes_and_without_lse(calls: list[fake.Call], heads: int, batch: str) -> None:
    problem = problem_of(case(batch, heads_q=heads, alibi=True), "normal", 7)
    planned = judged("fa2", problem)
    assert planned.run(problem.q_THD, problem.k, problem.v)[1] is None


def test_the_slopes_are_those_of_the_library() -> None:
    for heads in (1, 6, 8, 12, 32):
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)).double(), slopes_of(heads), rtol=1e-6, atol=0)


def test_rows_that_see_no_key_give_zero_and_an_lse_of_minus_infinity(calls: list[fake.Call]) -> None:
    for batch in ("q9s4_q1s0_q5", "q1s0_q1s5"):
        problem = make(case(batch, sinks=False), "normal", 8)
        out, lse = plan("fa2", problem).run(problem.q_THD, problem.k, problem.v)
        assert torch.equal(lse == -math.inf, problem.truth.lse_QH == -math.inf)
        assert_right(problem, out, lse)
    problem = make(case("q9s4_q5", custom_mask=True), "normal", 8)
    assert (problem.truth.lse_QH == -math.inf).any()
    judged("fa2", problem)


# What exactly is asked for.


def test_plan_gives_indptr_indices_and_last_page_lengths(calls: list[fake.Call]) -> None:
    problem = make(case("q5s37_q1s16_q1s1"), "normal", 1)
    tables = ((3, 1, 4, 9), (0,), (5, 7))  # longer than the keys need: the rest must not be counted
    FlashInfer("fa2", "cpu").plan(Batch((5, 1, 1), (37, 16, 1), tables, 16), problem.spec)
    given = noted(calls, "prefill.plan")
    assert given["qo_indptr"].tolist() == [0, 5, 6, 7]
    assert given["paged_kv_indptr"].tolist() == [0, 3, 4, 5]
    assert given["paged_kv_indices"].tolist() == [3, 1, 4, 0, 5]
    assert given["paged_kv_last_page_len"].tolist() == [5, 16, 1]
    assert {given[name].dtype for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices")} == {torch.int32}
    assert (given["causal"], given["window_left"], given["sm_scale"]) == (True, -1, 1 / 8)
    assert (given["num_qo_heads"], given["num_kv_heads"], given["page_size"]) == (6, 2, 16)
    assert given["q_data_type"] == given["kv_data_type"] == torch.bfloat16


@pytest.mark.parametrize(("longest", "page_size"), [(48, 16), (40, 8), (37, 1)])
def test_a_contiguous_cache_is_seen_as_pages_that_divide_it(
    calls: list[fake.Call], longest: int, page_size: int
) -> None:
    problem = make(case(f"q1s{longest}_q1s16", layout="contiguous"), "normal", 1)
    judged("fa2", problem)
    given, (k, v) = noted(calls, "decode.plan"), noted(calls, "decode.run")["paged_kv_cache"]
    assert given["page_size"] == page_size
    assert (k.data_ptr(), v.data_ptr()) == (problem.k.data_ptr(), problem.v.data_ptr()), "a view, not a copy"


@pytest.mark.parametrize("kernel", ["cudnn", "xqa"])
def test_what_reads_no_strides_refuses_them(calls: list[fake.Call], kernel: str) -> None:
    """On an H200, XQA read a cache of other strides as if it were dense, and said nothing."""
    problem = make(case("q1s48_q1s16", dtype="bfloat16"), "normal", 1)
    planned = plan(kernel, problem)
    planned.run(problem.q_THD, problem.k, problem.v)
    turned = problem.k.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=f"flashinfer:{kernel}: q, k and v must be contiguous"):
        planned.run(problem.q_THD, turned, problem.v)


def test_a_contiguous_cache_of_another_length_is_refused(calls: list[fake.Call]) -> None:
    problem = make(case("q1s48_q1s16", layout="contiguous"), "normal", 1)
    with pytest.raises(ValueError, match="planned for a contiguous cache of 48 rows, not 40"):
        plan("fa2", problem).run(problem.q_THD, problem.k[:, :40], problem.v[:, :40])


@pytest.mark.parametrize("batch", ["q5s37_q1s16", "q1s37_q1s16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_lse_a_run_is_the_librarys_call_alone(
    calls: list[fake.Call], batch: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make(case(batch, layout=layout), "normal", 1)
    planned = plan("fa2", problem, lse=False)
    monkeypatch.setattr(type(planned), "_natural", lambda *_: pytest.fail("an extra kernel"))
    calls.clear()
    assert planned.run(problem.q_THD, problem.k, problem.v)[1] is None
    ((_, given),) = calls
    assert given["return_lse"] is False


@pytest.mark.parametrize("batch", ["q5s37_q1s16", "q1s37_q1s16"])
def test_the_plain_call_is_that_of_the_planned_wrapper(calls: list[fake.Call], batch: str) -> None:
    problem = make(case(batch), "normal", 1)
    planned = plan("fa2", problem, lse=False)
    plain = library_call(planned, problem.q_THD, problem.k, problem.v)()
    assert torch.equal(plain, planned.run(problem.q_THD, problem.k, problem.v)[0])
    ragged = make(case(batch, layout="ragged"), "normal", 1)
    with pytest.raises(UserError, match="for pages"):
        library_call(plan("fa2", ragged), ragged.q_THD, ragged.k, ragged.v)


def test_workspaces_are_shared_and_counters_have_one_of_their_own(calls: list[fake.Call]) -> None:
    problem = make(case("q1s37"), "normal", 1)
    plan("fa2", problem)
    first = noted(calls, "decode.init")["float_workspace_buffer"]
    plan("fa3", make(case("q5s37"), "normal", 1))
    assert noted(calls, "prefill.init")["float_workspace_buffer"] is first
    judged("xqa", problem)
    counters = noted(calls, "xqa.run")["workspace_buffer"]
    assert counters is workspace(torch.device("cpu"), counters=True)
    assert counters is not first
    assert not counters.any()


# MLA.


def mla(batch: str, layout: str) -> Problem:
    changes = {**MLA, "layout": layout, "page_size": 16 if layout.startswith("paged") else None}
    return problem_of(case(batch, **changes), "normal", 3)


@pytest.mark.parametrize(("kernel", "layout"), [("fa3", "paged_nhd"), *(("fa2", layout) for layout in LAYOUTS)])
def test_absorbed_mla_takes_parts_of_the_cache_as_views(calls: list[fake.Call], kernel: str, layout: str) -> None:
    problem = mla("q1s37_q1s16_q3s20", layout)
    planned = judged(kernel, problem)
    given = noted(calls, "mla.run")
    assert given["ckv_cache"].data_ptr() == problem.k.data_ptr()
    assert given["kpe_cache"].data_ptr() == problem.k.data_ptr() + 512 * 2
    assert given["return_lse_base_on_e"] is True, "MLA converts its LSE itself"
    assert planned.forced_copies == []
    assert noted(calls, "mla.plan")["kv_len_arr"].tolist() == [37, 16, 20]


def test_absorbed_mla_with_values_of_their_own_is_refused(calls: list[fake.Call]) -> None:
    problem = mla("q1s37", "paged_nhd")
    with pytest.raises(ValueError, match=r"v must be k\[..., :512\] itself"):
        plan("fa2", problem).run(problem.q_THD, problem.k, problem.v.clone())


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_mla_prefill_runs_ragged(calls: list[fake.Call], kernel: str) -> None:
    judged(kernel, make(case("q20_q7s30", head_dim_qk=192, head_dim_vo=128, layout="ragged"), "normal", 3))


# cudnn, xqa, trtllm-gen.


@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd"])
@pytest.mark.parametrize("changes", [{}, {"window": (7, 0)}, {"sinks": True}], ids=["full", "window", "sinks"])
def test_xqa_decodes(calls: list[fake.Call], layout: str, changes: dict[str, Any]) -> None:
    judged("xqa", make(case("q1s37_q1s16_q1s100", layout=layout, **changes), "needle", 4))
    given = noted(calls, "xqa.module")
    assert (given["page_size"], given["head_group_ratio"]) == (16, 3)
    assert given["use_sliding_window"] is ("window" in changes)


def test_xqa_takes_the_scales_of_quantised_keys(calls: list[fake.Call]) -> None:
    plan("xqa", make(case("q1s37", kv_dtype="float8_e4m3fn"), "normal", 4))
    planned = plan("xqa", make(case("q1s37", kv_dtype="float8_e4m3fn"), "normal", 4))
    assert planned._options["bmm1_scale"] == 0.25 / 8
    assert planned._options["bmm2_scale"] == 0.5
    assert noted(calls, "xqa.module")["kv_cache_dtype"] == torch.float8_e4m3fn


@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd"])
@pytest.mark.parametrize("batch", ["q5s37_q1s16_q20", "q1s37_q1s16"])
@pytest.mark.parametrize("changes", [{}, {"window": (7, 0)}], ids=["full", "window"])
def test_trtllm_gen_serves_prefill_and_decode(
    calls: list[fake.Call], layout: str, batch: str, changes: dict[str, Any]
) -> None:
    judged("trtllm-gen", make(case(batch, layout=layout, **changes), "needle", 4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd", "ragged"])
@pytest.mark.parametrize("batch", ["q5s37_q1s16_q20", "q1s37_q1s16"])
def test_cudnn_serves_prefill_and_decode(calls: list[fake.Call], dtype: str, layout: str, batch: str) -> None:
    problem = make(case(batch, dtype=dtype, layout=layout, head_dim_qk=128, head_dim_vo=128), "needle", 4)
    planned = judged("cudnn", problem)
    decode = dtype == "bfloat16" and layout != "ragged" and batch.startswith("q1s")
    assert calls[-1][0] == ("cudnn.decode" if decode else "cudnn.prefill")
    assert (planned.run(problem.q_THD, problem.k, problem.v)[1] is None) == decode


def test_a_cudnn_graph_of_another_scale_is_refused_before_it_is_confused(calls: list[fake.Call]) -> None:
    problem = make(case("q5s37", head_dim_qk=128, head_dim_vo=128), "normal", 1)
    plan("cudnn", problem)
    plan("cudnn", problem)
    with pytest.raises(UserError, match="would reuse a cuDNN graph of this shape"):
        plan("cudnn", replace(problem, spec=replace(problem.spec, scale=0.5)))


def test_cudnn_needs_its_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch, cudnn_available=False)
    with pytest.raises(UserError, match="pip install nvidia-cudnn-frontend"):
        plan("cudnn", make(case("q5s37", head_dim_qk=128, head_dim_vo=128), "normal", 1))


# CUDA graphs: buffers stay, contents change.


@pytest.mark.parametrize(
    ("kernel", "batch", "changes"),
    [
        ("fa2", "q1s37_q1s20", {}),
        ("fa2", "q5s37_q3s20", {}),
        ("fa2", "q1s37_q1s20", {"layout": "contiguous"}),
        ("fa3", "q1s37_q1s20", {"layout": "paged_hnd"}),
        ("fa3", "q5s37_q3s20", {"sinks": True}),
        ("xqa", "q1s37_q1s20", {}),
        ("trtllm-gen", "q5s37_q3s20", {}),
        ("cudnn", "q5s37_q3s20", {"head_dim_qk": 128, "head_dim_vo": 128}),
    ],
)
def test_replan_fills_the_captured_buffers_anew(
    calls: list[fake.Call], kernel: str, batch: str, changes: dict[str, Any]
) -> None:
    problem = make(case(batch, **changes), "needle", 5)
    planned = judged(kernel, problem, graph=True)
    buffers = [v for v in vars(planned).values() if isinstance(v, torch.Tensor)]
    after = shorter(problem)
    planned.replan(after.batch)
    assert_right(after, *planned.run(problem.q_THD, problem.k, problem.v))
    same = [v for v in vars(planned).values() if isinstance(v, torch.Tensor)]
    assert [t.data_ptr() for t in buffers] == [t.data_ptr() for t in same]


def test_replan_needs_a_graph_and_a_batch_that_fits(calls: list[fake.Call]) -> None:
    problem = make(case("q1s37_q1s20"), "normal", 5)
    with pytest.raises(UserError, match="not planned for a CUDA graph"):
        plan("fa2", problem).replan(problem.batch)
    planned = plan("fa2", problem, graph=True)
    with pytest.raises(ValueError, match="above the captured one"):
        planned.replan(Batch((1, 1), (38, 20), ((0, 1, 2), (3, 4)), 16))


def test_a_batch_that_would_launch_otherwise_is_not_replanned(calls: list[fake.Call]) -> None:
    problem = make(case("q1s37_q1s20"), "normal", 5)
    planned = plan("fa2", problem, graph=True)
    planned._wrapper.plan = lambda *_, **__: setattr(planned._wrapper, "_plan_info", [7])
    with pytest.raises(UserError, match="needs another launch than the captured one"):
        planned.replan(problem.batch)


# Refusals.


@pytest.mark.parametrize(
    ("kernel", "changes", "why"),
    [
        ("fa2", {"alibi": True, "heads_q": 8, "causal": False}, "under a causal mask"),
        ("fa2", {"alibi": True, "heads_q": 8, "softcap": 5.0}, "without softcap"),
        ("fa2", {"window": (3, 5), "causal": False}, "bounded on the right at 5"),
        ("fa2", {"sinks": True, "softcap": 5.0}, "sinks do not go with softcap"),
        ("fa2", {"kv_dtype": "float8_e4m3fn", "layout": "ragged"}, "takes quantised KV"),
        ("fa3", {"kv_dtype": "float8_e4m3fn"}, "fa3 does not take quantised KV"),
        ("fa3", {"custom_mask": True}, "fa3 does not take custom mask"),
        ("fa2", {"sinks": True, "layout": "ragged"}, "takes sinks"),
        ("cudnn", {"softcap": 5.0}, "takes softcap"),
        ("cudnn", {"layout": "contiguous"}, "layout contiguous is not served"),
        ("xqa", {}, "one query token a member, not 20"),
        ("xqa", {"custom_mask": True}, "takes custom mask"),
        ("trtllm-gen", {"window": (7, None), "causal": False}, "a window goes with a causal mask only"),
    ],
)
def test_what_a_call_would_ignore_is_refused_at_plan(
    calls: list[fake.Call], kernel: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        plan(kernel, make(case(**changes), "normal", 1))


def test_other_slopes_than_the_librarys_are_refused_at_plan(calls: list[fake.Call]) -> None:
    problem = make(case("q5", alibi=True), "normal", 1)
    steep = replace(problem.spec, alibi_slopes=(0.5,) * problem.spec.heads_q)
    with pytest.raises(UserError, match="derives its ALiBi slopes"):
        plan("fa2", replace(problem, spec=steep))


def test_without_the_library_plan_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"flashinfer:fa2: flashinfer cannot be imported .*pip install"):
        plan("fa2", make(case("q5"), "normal", 1))
    with pytest.raises(UserError, match="no kernel 'fa9': known are fa2"):
        create("flashinfer:fa9")
    assert [create(name, "cuda").name for name in expand("flashinfer")] == list(expand("flashinfer"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(matrix, "_importable", lambda package: True)


@pytest.mark.parametrize(
    ("kernel", "changes", "codes"),
    [
        ("fa2", {}, []),
        ("fa2", {"layout": "contiguous", "softcap": 30.0, "window": (7, 0)}, []),
        ("fa2", {"kv_dtype": "float8_e5m2"}, []),
        ("fa2", {"kv_dtype": "float8_e5m2", "layout": "ragged"}, [Code.KV_SCALE_IGNORED]),
        ("fa2", {"head_dim_qk": 80, "head_dim_vo": 80}, [Code.HEAD_DIM_UNSUPPORTED] * 2),
        ("fa2", {"head_dim_qk": 192, "head_dim_vo": 128, "layout": "ragged"}, []),
        ("fa2", {"head_dim_qk": 192, "head_dim_vo": 128}, [Code.STRIDE_UNSUPPORTED]),
        ("fa2", {"dtype": "float32"}, [Code.DTYPE_UNSUPPORTED, Code.KV_DTYPE_UNSUPPORTED]),
        ("fa2", {"execution": "compile"}, [Code.GRAPH_CAPTURE_FAILED]),
        ("fa2", {"window": (3, 5), "causal": False}, [Code.SWA_UNSUPPORTED]),
        ("fa2", {"window": (3, 5)}, []),
        ("fa2", {"alibi": True, "causal": False}, [Code.ALIBI_UNSUPPORTED]),
        ("fa2", {"sinks": True, "custom_mask": True}, [Code.SINK_UNSUPPORTED]),
        ("fa2", MLA, []),
        (
            "fa2",
            {**MLA, "softcap": 3.0, "sinks": True},
            [Code.SINK_UNSUPPORTED, Code.SOFTCAP_UNSUPPORTED, Code.SINK_UNSUPPORTED],
        ),
        ("fa3", MLA, []),
        ("fa3", {"head_dim_qk": 192, "head_dim_vo": 192}, [Code.HEAD_DIM_UNSUPPORTED] * 2),
        ("fa3", {"head_dim_qk": 192, "head_dim_vo": 128, "layout": "ragged"}, []),
        ("fa3", {"kv_dtype": "float8_e4m3fn"}, [Code.KV_DTYPE_UNSUPPORTED]),
        ("fa3", {"custom_mask": True}, [Code.MASK_UNSUPPORTED]),
        ("fa3", {"batch": "q9s4"}, [Code.EMPTY_ROW_SEMANTICS]),
        ("cudnn", {"head_dim_qk": 128, "head_dim_vo": 128, "batch": "q1s40"}, []),
        ("cudnn", {"head_dim_qk": 128, "head_dim_vo": 128, "layout": "ragged"}, []),
        ("cudnn", {"head_dim_qk": 128, "head_dim_vo": 128}, [Code.PAD_POISON]),
        ("cudnn", {"batch": "q1s40"}, [Code.HEAD_DIM_UNSUPPORTED] * 3),
        ("xqa", {"batch": "q1s40", "sinks": True}, []),
        ("xqa", {"batch": "q1s40", "sinks": True, "kv_dtype": "float8_e4m3fn"}, [Code.PAD_POISON]),
        ("xqa", {"page_size": 8}, [Code.PAGE_SIZE_UNSUPPORTED, Code.MASK_UNSUPPORTED]),
        ("trtllm-gen", {}, [Code.ARCH_UNSUPPORTED]),
    ],
)
def test_rules_on_hopper(hopper: None, kernel: str, changes: dict[str, Any], codes: list[Code]) -> None:
    found = declared_reasons(f"flashinfer:{kernel}", case(**{"batch": "q5s37", **changes}), device="cuda")
    assert [reason.code for reason in found] == codes
    read_or_seen = ("0.6.13", "cuDNN", "data/evidence/h200")
    assert all(any(words in reason.source for words in read_or_seen) for reason in found)


def test_a_rule_with_a_condition_says_it_in_its_reason(hopper: None) -> None:
    one = case("q5", kv_dtype="float8_e5m2", layout="ragged")
    (reason,) = declared_reasons("flashinfer:fa2", one, device="cuda")
    assert reason.allowed.endswith("(where kv_dtype_effective is float8_e4m3fn or float8_e5m2)")


# Confirmation and compilation.


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<...>>", "flashinfer:fa2"),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<...>", "flashinfer:fa2"),
        ("void flashinfer::SinglePrefillWithKVCacheKernel<...>", "flashinfer:fa2"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "flashinfer:fa2"),
        ("void flashinfer::mla::BatchMLAPagedAttentionKernel<...>", "flashinfer:fa2"),
        ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop<...>>", "flashinfer:fa3"),
        ("void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<...>", "flashinfer:fa3"),
        ("kernel_mha", "flashinfer:xqa"),
        ("fmhaSm100aKernel_QkvBfloat16OBfloat16H128PagedKvCausal", "flashinfer:trtllm-gen"),
    ],
)
def test_kernels_tell_the_backends_apart(kernel: str, backend: str) -> None:
    merge = "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, float, ...>"
    assert backend_of([kernel, "aten::empty", merge]) == backend


def test_other_kernels_of_the_library_confirm_nothing() -> None:
    assert backend_of(["void flashinfer::norm::RMSNormKernel<8u, half>"]).startswith("unconfirmed(")


def test_cudnns_kernel_belongs_to_whoever_called_it() -> None:
    kernel = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128"
    assert backend_of([kernel, "aten::_scaled_dot_product_cudnn_attention", "aten::empty"]) == "torch_sdpa:cudnn"
    assert backend_of([kernel, "aten::empty", "cudaLaunchKernelExC"]) == "flashinfer:cudnn"
    assert backend_of([kernel]) == "torch_sdpa:cudnn"


def test_warming_up_names_what_was_built_and_how_long_it_took(
    calls: list[fake.Call], hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = sys.modules["flashinfer.jit.core"]
    source = tmp_path / "batch_prefill.cu"
    source.write_text("__global__ void f() {}")
    wrapper = sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper
    real = wrapper.plan

    def building(self: Any, *args: Any, **options: Any) -> None:
        spec = core.jit_spec_registry.specs.setdefault("decode_64", core.JitSpec("decode_64", [source]))
        spec.build_and_load()
        real(self, *args, **options)

    monkeypatch.setattr(wrapper, "plan", building)
    monkeypatch.setattr(FlashInfer, "check", lambda self, one: [Code.TIMEOUT] if one.softcap else [])
    build = core.JitSpec.build_and_load
    seconds = warm("flashinfer:fa2", [case("q1s37"), case("q1s37", softcap=3.0)], "cpu")
    assert list(seconds) == ["decode_64"]
    assert seconds["decode_64"] >= 0
    assert core.JitSpec.build_and_load is build, "the library is left as it was"
    assert sum(name == "decode.plan" for name, _ in calls) == 1, "what the rules refuse is skipped"
    (module,) = jit_modules()
    assert (module.name, module.library) == ("decode_64", Path("/cache/decode_64.so"))
    assert "-arch=sm_90a" in module.flags
    before = module.source_hash
    source.write_text("__global__ void g() {}")
    assert jit_modules()[0].source_hash != before


def test_the_stand_in_is_as_wrong_as_it_should_be_when_misled(calls: list[fake.Call]) -> None:
    """The numbers can tell: a base-2 LSE, a lost page and a wrong scale are seen."""
    problem = make(case("q1s37_q1s16"), "needle", 1)
    out, lse = plan("fa2", problem).run(problem.q_THD, problem.k, problem.v)
    with pytest.raises(AssertionError):
        assert_right(problem, out, lse / LN_2)
    first, second = problem.batch.block_tables
    lost = replace(problem, batch=replace(problem.batch, block_tables=((*first[:-1], second[0]), second)))
    out, lse = plan("fa2", lost).run(problem.q_THD, problem.k, problem.v)
    with pytest.raises(AssertionError):
        assert_right(problem, out, None)
    louder = replace(problem, spec=replace(problem.spec, scale=problem.spec.scale * 1.05))
    with pytest.raises(AssertionError):
        assert_right(problem, plan("fa2", louder).run(problem.q_THD, problem.k, problem.v)[0], None)
