"""triton:paged against the oracle. Triton decides at its import whether it interprets, so on a machine without a GPU
the tests of the kernels run in one process of their own, started by the first test here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from attention.backends import create
from attention.backends.oracle import OracleBackend
from attention.backends.triton_paged import (
    _DECODE,
    _PREFILL,
    Tiles,
    TritonPaged,
    default_tiles,
    split_dim,
    split_keys,
)
from attention.cases import AttentionCase, Inputs
from attention.confirm import backend_of, watch
from attention.errors import UserError
from attention.reasons import Code
from attention.replay.figures import compare
from attention.replay.problems import Problem, make, spec_of
from gates.thresholds import load_limits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = Tiles(16, 16, 4, 1)
#: A test that launches kernels: in the interpreter's process, or on a GPU.
on_device = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
outside = pytest.mark.skipif(INTERPRETED, reason="the interpreter's own process")


@outside
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked gpu run the kernels themselves")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_hold_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def case(batch: str, dtype: str = "float16", **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": "extend",
        "heads_q": 2,
        "heads_kv": 1,
        "head_dim_qk": 16,
        "head_dim_vo": 16,
    }
    if changes.get("layout") in ("ragged", "contiguous"):
        fields["page_size"] = None
    return AttentionCase(batch=batch, dtype=dtype, **{**fields, **changes})


def run(
    problem: Problem, *, prefill: Tiles | None = SMALL, decode: Tiles | None = SMALL
) -> tuple[torch.Tensor, torch.Tensor]:
    planned = TritonPaged(DEVICE, prefill=prefill, decode=decode).plan(problem.batch, problem.spec)
    out, lse = planned.run(problem.q_THD, problem.k, problem.v)
    assert lse is not None
    assert planned.forced_copies == []
    return out, lse


def check(one: AttentionCase, inputs: Inputs = "needle", **tiles: Any) -> None:
    """The figures of a case stay within the limits of the replay gate."""
    problem = make(one, inputs, 3, device=DEVICE)
    out, lse = run(problem, **tiles)
    assert (out.dtype, lse.dtype) == (problem.spec.dtype, torch.float32)
    figures = compare(out, lse, problem.truth, problem.spec.dtype)
    assert figures.finite_mask_equal, "NaN of slots that nobody owns must not leak"
    assert torch.equal(torch.isfinite(lse.double()), torch.isfinite(problem.truth.lse_QH))
    limits = load_limits("replay", "full").of_class(one.dtype)
    # The interpreter cuts bfloat16 off where a GPU rounds: twice the error.
    slack = 2 if INTERPRETED and one.dtype == "bfloat16" else 1
    for name in ("r_rms", "r_max", "r_row"):
        assert getattr(figures, name) <= slack * limits.value(name), (name, figures)
    assert (figures.lse_max_abs or 0) < 1e-5


@on_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", ["q1s37_q1s16_q1s1", "q20s40_q17_q9s31", "q4s33_q1s50_q19s70"])
def test_decode_prefill_and_both_in_one_batch(batch: str, dtype: str) -> None:
    check(case(batch, dtype))


@on_device
@pytest.mark.parametrize(
    "changes",
    [
        {"window": (7, 0)},
        {"window": (20, 0)},
        {"causal": False},
        {"causal": False, "window": (5, 9)},
        {"causal": False, "window": (None, 3)},
        {"softcap": 3.0},
        {"alibi": True},
        {"sinks": True},
        {"custom_mask": True},
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float8_e5m2"},
        {"window": (18, 0), "softcap": 5.0, "alibi": True, "sinks": True, "custom_mask": True},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_every_feature_whole_and_split(changes: dict[str, Any]) -> None:
    check(case("q1s49_q18s40", **changes), decode=replace(SMALL, num_splits=2))


@on_device
@pytest.mark.parametrize(
    "changes", [{"softcap": 3.0}, {"alibi": True, "sinks": True}, {"kv_dtype": "float8_e4m3fn"}], ids=str
)
def test_features_in_float32(changes: dict[str, Any]) -> None:
    check(case("q2s30", "float32", **changes))


@on_device
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd"])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_pages_of_any_size(page_size: int, layout: str) -> None:
    check(case("q1s65_q10s47", layout=layout, page_size=page_size, heads_q=4, heads_kv=2))


@on_device
@pytest.mark.parametrize("layout", ["ragged", "contiguous"])
def test_ragged_and_contiguous_keys_without_a_copy(layout: str) -> None:
    check(case("q1s33_q10s47_q16", layout=layout, heads_q=4, heads_kv=2))


@on_device
@pytest.mark.parametrize("kv_len", [15, 16, 17, 32, 33])
def test_residues_of_the_block(kv_len: int) -> None:
    check(case(f"q1s{kv_len}_q{kv_len}"))


@on_device
@pytest.mark.parametrize("heads", [(3, 1), (5, 1), (6, 1), (14, 2), (3, 3), (20, 1)])
def test_any_ratio_of_heads(heads: tuple[int, int]) -> None:
    check(case("q1s33_q9s20", heads_q=heads[0], heads_kv=heads[1]))


@on_device
@pytest.mark.parametrize("dims", [(32, 32), (24, 24), (40, 16), (80, 80), (192, 128), (256, 256)])
def test_head_dims_that_are_no_power_of_two_and_differ(dims: tuple[int, int]) -> None:
    check(case("q1s33_q9s20", heads_q=2, heads_kv=1, head_dim_qk=dims[0], head_dim_vo=dims[1]))


@on_device
def test_large_logits_do_not_overflow() -> None:
    check(case("q1s65_q10s47"), "large_logit", decode=replace(SMALL, num_splits=2))


@on_device
def test_absorbed_mla_reads_its_values_from_the_keys() -> None:
    one = case("q1s40", "float32", heads_q=18, heads_kv=1, head_dim_qk=576, head_dim_vo=512)
    problem = make(one, "normal", 1, device=DEVICE)
    apart = replace(problem, v=problem.k[..., :512].clone())
    shared = replace(problem, v=problem.k[..., :512])
    for left, right in zip(run(apart), run(shared), strict=True):
        assert torch.equal(left, right)


@on_device
@pytest.mark.parametrize("batch", ["q1s70_q1s33_q2s64", "q1s64_q1s5"])
def test_split_and_whole_agree(batch: str) -> None:
    problem = make(case(batch, "float32", sinks=True), "needle", 2, device=DEVICE)
    whole, whole_lse = run(problem, decode=replace(SMALL, num_splits=1))
    for num_splits in (2, 3, 4):
        out, lse = run(problem, decode=replace(SMALL, num_splits=num_splits))
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
        assert compare(out, lse, problem.truth, torch.float32).finite_mask_equal


@on_device
def test_pages_in_another_order_give_the_same_bits() -> None:
    problem = make(case("q1s90_q20s70"), "normal", 2, device=DEVICE)
    order = torch.randperm(len(problem.k), generator=torch.Generator().manual_seed(1))
    place = {int(old): new for new, old in enumerate(order)}
    tables = tuple(tuple(place[page] for page in table) for table in problem.batch.block_tables)
    order = order.to(DEVICE)
    moved = replace(problem, batch=replace(problem.batch, block_tables=tables), k=problem.k[order], v=problem.v[order])
    for left, right in zip(run(problem), run(moved), strict=True):
        assert torch.equal(left, right)


@on_device
def test_rows_without_keys_give_zero_and_members_without_queries_nothing() -> None:
    problem = make(case("q3s0_q20s7_q1s9", heads_q=1), "normal", 2, device=DEVICE)
    empty = replace(
        problem.batch, q_lens=(0, *problem.batch.q_lens), kv_lens=(0, *problem.batch.kv_lens),
        block_tables=((), *problem.batch.block_tables),
    )  # fmt: skip
    for batch in (problem.batch, empty):
        for num_splits in (1, 2):
            out, lse = run(replace(problem, batch=batch), decode=replace(SMALL, num_splits=num_splits))
            assert torch.equal(out[: 3 + 13], torch.zeros_like(out[:16]))
            assert (lse[:16] == -math.inf).all()
            assert compare(out, lse, problem.truth, torch.float16).r_rms < 1.5


@on_device
@pytest.mark.parametrize("batch", ["q1s90", "q10s90"])
def test_pages_left_of_the_window_may_hold_anything(batch: str) -> None:
    problem = make(case(batch, window=(20, 0)), "normal", 2, device=DEVICE)
    before = run(problem)
    first_seen = problem.batch.kv_lens[0] - problem.batch.q_lens[0] - 20
    table = problem.batch.block_tables[0]
    for i in range(first_seen):
        problem.k[table[i // 16], i % 16] = math.nan
        problem.v[table[i // 16], i % 16] = math.nan
    for left, right in zip(before, run(problem), strict=True):
        assert torch.equal(left, right)


@on_device
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_graph_plan_serves_shorter_batches_from_the_same_buffers(num_splits: int) -> None:
    long = make(case("q1s90_q1s33_q12s60"), "normal", 2, device=DEVICE)
    backend = TritonPaged(DEVICE, prefill=SMALL, decode=replace(SMALL, num_splits=num_splits))
    planned = backend.plan(long.batch, long.spec, graph=True)
    address = planned._buffer.data_ptr()  # type: ignore[attr-defined]
    for batch in ("q1s20_q1s33_q12s49", "q1s1_q1s0_q12", "q1s90_q1s1_q12s13", "q1s90_q1s33_q12s60"):
        short = make(case(batch), "normal", 5, device=DEVICE)
        planned.replan(short.batch)
        out, lse = planned.run(short.q_THD, short.k, short.v)
        figures = compare(out, lse, short.truth, torch.float16)
        assert figures.finite_mask_equal and figures.r_rms < 1.5, (batch, figures)
        assert planned._buffer.data_ptr() == address  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="above the captured one"):
        planned.replan(replace(long.batch, kv_lens=(91, 33, 60)))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_graph_follows_its_replans() -> None:
    long = make(case("4q1s300_q40s200", head_dim_qk=64, head_dim_vo=64), "normal", 2, device="cuda")
    planned = create("triton:paged", "cuda").plan(long.batch, long.spec, graph=True)
    q, k, v = (t.clone() for t in (long.q_THD, long.k, long.v))
    planned.run(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = planned.run(q, k, v)
    for batch in ("q1s300_q1s12_q1s77_q1s1_q40s190", "4q1s290_q40s40"):
        short = make(case(batch, head_dim_qk=64, head_dim_vo=64), "normal", 5, device="cuda")
        planned.replan(short.batch)
        q.copy_(short.q_THD)
        k[: len(short.k)].copy_(short.k)
        v[: len(short.v)].copy_(short.v)
        graph.replay()
        figures = compare(out, lse, short.truth, torch.float16)
        assert figures.finite_mask_equal and figures.r_rms < 1.5, (batch, figures)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the table's tiles are those of a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_the_tables_tiles_fit_the_gpu(page_size: int, dims: tuple[int, int], dtype: str) -> None:
    sizes = {"head_dim_qk": dims[0], "head_dim_vo": dims[1], "heads_q": 16, "heads_kv": 1, "page_size": page_size}
    for changes in ({}, {"window": (200, 0), "softcap": 20.0}, {"kv_dtype": "float8_e4m3fn"}):
        check(case("q1s3000_q1s77_q5s300_q150s400", dtype, **sizes, **changes), "normal", prefill=None, decode=None)


@on_device
def test_what_ran_is_our_kernel() -> None:
    problem = make(case("q1s90_q20s70"), "normal", 2, device=DEVICE)
    assert watch(lambda: run(problem), device=DEVICE)[1] == "triton:paged"


@on_device
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd", "ragged"])
def test_values_that_lie_where_the_keys_do_but_with_other_strides_are_read_as_they_are(layout: str) -> None:
    """Only V that is the first columns of K is read once with it; here every head has the values of the first."""
    pages = {"page_size": None} if layout == "ragged" else {}
    problem = make(case("q1s90_q20s70", heads_q=4, heads_kv=2, layout=layout, **pages), "normal", 2, device=DEVICE)
    heads = 1 if layout == "paged_hnd" else -2
    v = problem.k.narrow(heads, 0, 1).expand_as(problem.k)
    out, _ = create("triton:paged", DEVICE).plan(problem.batch, problem.spec).run(problem.q_THD, problem.k, v)
    true, _ = OracleBackend().plan(problem.batch, problem.spec).run(problem.q_THD, problem.k, v)
    torch.testing.assert_close(out, true, atol=2e-3, rtol=1e-2)


@on_device
def test_what_cannot_be_served_is_an_error() -> None:
    problem = make(case("q1s20"), "normal", 2, device=DEVICE)
    backend = create("triton:paged", DEVICE)
    with pytest.raises(UserError, match="float8 or q's own"):
        backend.plan(problem.batch, replace(problem.spec, kv_dtype=torch.int8))
    with pytest.raises(UserError, match="stride 1"):
        backend.plan(problem.batch, problem.spec).run(problem.q_THD.mT.contiguous().mT, problem.k, problem.v)
    mask = (torch.ones(1, 20, dtype=torch.bool),)
    with pytest.raises(UserError, match="other masks"):
        backend.plan(replace(problem.batch, masks=mask), problem.spec, graph=True)
    with pytest.raises(UserError, match="not planned for a CUDA graph"):
        backend.plan(problem.batch, problem.spec).replan(problem.batch)


# What needs no kernel.


@outside
def test_without_the_interpreter_the_cpu_is_told_how() -> None:
    backend = create("triton:paged", "cpu")
    (reason,) = backend.check(case("q1s20"))
    assert reason.code == Code.ARCH_UNSUPPORTED
    assert "TRITON_INTERPRET=1" in reason.message
    problem = make(case("q1s20"), "normal", 1)
    with pytest.raises(UserError, match="TRITON_INTERPRET=1"):
        backend.plan(problem.batch, problem.spec)


def test_the_matrix_bounds_what_the_tiles_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend = create("triton:paged", "cpu")
    assert backend.check(case("q1s20", head_dim_qk=576, head_dim_vo=512, sinks=True, custom_mask=True)) == []
    found = backend.check(case("q1s20", head_dim_qk=640, head_dim_vo=640, kv_dtype="int8"))
    assert [reason.code for reason in found] == [
        Code.HEAD_DIM_UNSUPPORTED,
        Code.HEAD_DIM_UNSUPPORTED,
        Code.KV_DTYPE_UNSUPPORTED,
    ]


@pytest.mark.parametrize("name", ["prefill", "decode", "combine"])
def test_the_kernels_names_are_confirmed(name: str) -> None:
    assert backend_of([f"attention_release_paged_{name}"]) == "triton:paged"


def test_a_head_dim_is_covered_by_two_powers_of_two_where_that_pads_less() -> None:
    found = {dim: split_dim(dim) for dim in (8, 16, 40, 64, 80, 96, 112, 128, 192, 256, 512, 576)}
    assert found == {
        8: (16, 0), 16: (16, 0), 40: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 128: (128, 0),
        192: (128, 64), 256: (256, 0), 512: (512, 0), 576: (512, 64),
    }  # fmt: skip


def keys(spans: list[int], **changes: Any) -> int:
    fields: dict[str, Any] = {"units": 8, "slots": 264, "block_n": 64, "most_tiles": None, "wanted": None}
    return split_keys(spans, **{**fields, **changes})


def test_keys_are_split_until_the_gpu_is_full() -> None:
    assert keys([4096]) == 128, "8 groups of one sequence: 32 parts use 256 of 264 places"
    assert keys([100]) == 128, "a short sequence is not worth a second kernel"
    assert keys([4096] * 528) == 4096, "many sequences fill it by themselves"
    ragged = keys([100] * 63 + [100_000])
    assert 63 + math.ceil(100_000 / ragged) > 100, "a long member among short ones is split"
    assert keys([4096], wanted=4) == 1024
    assert keys([4096, 64], most_tiles=4) >= 4096 / 3
    assert keys([0]) == 64


def test_every_tile_has_a_shape_that_triton_takes() -> None:
    for table in (_PREFILL, _DECODE):
        for dim in (16, 64, 96, 128, 256, 512, 576):
            for dtype in ("float32", "float16", "bfloat16"):
                for page in (None, 1, 16, 64, 256):
                    spec = spec_of(case("q1s20", dtype, head_dim_qk=dim))
                    tiles = default_tiles(table, spec, page)
                    for size in (tiles.block_m, tiles.block_n, tiles.num_warps):
                        assert size & (size - 1) == 0
    with pytest.raises(UserError, match="head dim 640"):
        default_tiles(_PREFILL, spec_of(case("q1s20", head_dim_qk=640)), 16)
