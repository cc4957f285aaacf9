"""torch_sdpa on the CPU against the oracle, and the same judgement on backends that are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attention.backends import NAMES, create, expand
from attention.backends.base import AttentionSpec, Backend, Batch, Planned, case_of
from attention.backends.oracle import OracleBackend
from attention.cases import AttentionCase, Inputs
from attention.confirm import backend_of, watch
from attention.errors import UserError
from attention.replay.figures import Figures, compare
from attention.replay.problems import Problem, make
from gates.thresholds import load_limits

KERNELS = ("flash", "math")
BATCHES = {
    "prefill": ("q17", "q64_q33"),
    "decode": ("q1s63", "q1s16_q1s255_q1s300"),
    "extend": ("q16s144", "q48s49_q5s200"),
}
SHAPES = [(phase, batch) for phase, batches in BATCHES.items() for batch in batches]


def case(phase: str, batch: str, dtype: str, **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {
        "phase": phase,
        "batch": batch,
        "heads_q": 6,
        "heads_kv": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "dtype": dtype,
    }
    return AttentionCase(**{**fields, **changes})


def run(kernel: str, problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    spec, batch = replace(problem.spec, **changes), problem.batch
    with torch.inference_mode():
        return create(f"torch_sdpa:{kernel}").plan(batch, spec).run(problem.q_THD, problem.k, problem.v)


def judge(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[Figures, list[str]]:
    """The figures, and the limits of the replay gate that they exceed."""
    figures = compare(out, lse, problem.truth, problem.spec.dtype)
    dtype = str(problem.spec.dtype).removeprefix("torch.")
    limits = load_limits("replay", "full").of_class(dtype)
    seen = {"r_rms": figures.r_rms, "r_max": figures.r_max, "r_row": figures.r_row, "lse": figures.lse_max_abs or 0.0}
    return figures, [name for name, value in seen.items() if not value <= limits.value(name)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["normal", "needle", "large_logit"])
@pytest.mark.parametrize(("phase", "batch"), SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_stay_within_the_limits(kernel: str, phase: str, batch: str, inputs: Inputs, dtype: str) -> None:
    for seed in range(2):
        problem = make(case(phase, batch, dtype), inputs, seed)
        out, lse = run(kernel, problem)
        figures, exceeded = judge(problem, out, lse)
        assert figures.finite_mask_equal, "NaN of unused slots must not leak"
        assert not exceeded, figures
        assert out.dtype == problem.spec.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"heads_q": 4, "heads_kv": 4},
        {"heads_kv": 1},
        {"window": (20, 0)},
        {"window": (0, 0)},
        {"causal": False},
        {"page_size": 1},
        {"page_size": 64},
        {"head_dim_qk": 128, "head_dim_vo": 128},
        {"head_dim_qk": 40, "head_dim_vo": 40},
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_windows_pages_and_head_dims_are_served(kernel: str, changes: dict[str, Any], dtype: str) -> None:
    for phase, batch in (("prefill", "q40"), ("extend", "q16s90_q5s130"), ("decode", "q1s16_q1s17_q1s130")):
        problem = make(case(phase, batch, dtype, **changes), "needle", 3)
        figures, exceeded = judge(problem, *run(kernel, problem))
        assert not exceeded, (phase, figures)


def test_math_serves_value_heads_of_another_size_and_flash_says_why_not() -> None:
    one = case("extend", "q5s40", "float32", head_dim_qk=48, head_dim_vo=32)
    problem = make(one, "normal", 0)
    assert not judge(problem, *run("math", problem))[1]
    assert [reason.dimension for reason in create("torch_sdpa:flash").check(one)] == ["same_head_dims"]


@pytest.mark.parametrize("batch", ["q16s90", "q1s90", "q1s90_q1s40", "q40"])
def test_flash_returns_the_natural_log_of_the_sum(batch: str) -> None:
    problem = make(case("extend", batch, "float32"), "normal", 1)
    _, lse = run("flash", problem)
    assert lse is not None
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), problem.truth.lse_QH, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("members", [((5, 40), (1, 33), (20, 20)), ((1, 40), (1, 33), (1, 7))])
def test_queries_keep_their_order_in_any_company(kernel: str, members: tuple[tuple[int, int], ...]) -> None:
    problem = make(case("extend", "_".join(f"q{q}s{kv}" for q, kv in members), "float32"), "normal", 4)
    whole, _ = run(kernel, problem)
    order = [2, 0, 1]
    starts = [sum(problem.batch.q_lens[:i]) for i in range(3)]
    rows = torch.cat([torch.arange(starts[i], starts[i] + problem.batch.q_lens[i]) for i in order])
    batch = Batch(
        tuple(problem.batch.q_lens[i] for i in order),
        tuple(problem.batch.kv_lens[i] for i in order),
        tuple(problem.batch.block_tables[i] for i in order),
        problem.batch.page_size,
    )
    moved, _ = run(kernel, replace(problem, batch=batch, q_THD=problem.q_THD[rows]))
    torch.testing.assert_close(moved, whole[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_runs_once_per_layer_and_names_the_copies_that_pages_force(kernel: str) -> None:
    problem = make(case("decode", "q1s20_q1s40", "float32"), "normal", 0)
    planned = create(f"torch_sdpa:{kernel}").plan(problem.batch, problem.spec)
    first, _ = planned.run(problem.q_THD, problem.k, problem.v)
    second, _ = planned.run(problem.q_THD, problem.k, problem.v)
    assert torch.equal(first, second)
    assert planned.forced_copies == ["paged KV gathered to dense", "KV padded to the longest member"]


def test_running_changes_neither_the_cache_nor_the_queries() -> None:
    problem = make(case("decode", "q1s20_q1s40", "float32"), "normal", 0)
    before = [t.clone() for t in (problem.q_THD, problem.k, problem.v)]
    run("flash", problem)
    for old, new in zip(before, (problem.q_THD, problem.k, problem.v), strict=True):
        assert torch.equal(old.nan_to_num(-99), new.nan_to_num(-99))


# Broken on purpose: what the limits are there to catch.


def scale_off(problem: Problem) -> torch.Tensor:
    return run("flash", problem, scale=problem.spec.scale * 1.05)[0]


def last_key_dropped(problem: Problem) -> torch.Tensor:
    batch = replace(problem.batch, kv_lens=tuple(n - 1 for n in problem.batch.kv_lens))
    return run("math", replace(problem, batch=batch))[0]


def wrong_page(problem: Problem) -> torch.Tensor:
    first, *others = problem.batch.block_tables
    # The second page of the first member where its first should be.
    batch = replace(problem.batch, block_tables=((first[1], *first[1:]), *others))
    return run("flash", replace(problem, batch=batch))[0]


def top_left_causal(problem: Problem) -> torch.Tensor:
    outs, row = [], 0
    page = problem.batch.page_size
    for q_len, kv_len, table in zip(
        problem.batch.q_lens, problem.batch.kv_lens, problem.batch.block_tables, strict=True
    ):
        at = torch.tensor([table[i // page] * page + i % page for i in range(kv_len)])
        k, v = (c.flatten(0, 1)[at].transpose(0, 1)[None] for c in (problem.k, problem.v))
        q = problem.q_THD[row : row + q_len].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=problem.spec.scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
        row += q_len
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["normal", "needle", "large_logit"])
@pytest.mark.parametrize("broken", [scale_off, wrong_page, top_left_causal])
def test_a_broken_kernel_exceeds_the_limits(
    broken: Callable[[Problem], torch.Tensor], inputs: Inputs, dtype: str
) -> None:
    for batch in ("q1s63_q1s130", "q16s144"):
        problem = make(case("extend", batch, dtype), inputs, 5)
        figures, exceeded = judge(problem, broken(problem), None)
        assert {"r_rms", "r_max", "r_row"} & set(exceeded), (batch, figures)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", ["q1s63", "q1s1000", "q1s300_q1s130"])
def test_a_dropped_last_key_exceeds_the_limits(batch: str, dtype: str) -> None:
    problem = make(case("decode", batch, dtype), "needle", 5)
    assert {"r_rms", "r_max", "r_row"} <= set(judge(problem, last_key_dropped(problem), None)[1])


def test_a_scale_fault_moves_the_lse_beyond_its_limit() -> None:
    for inputs in ("normal", "needle", "large_logit"):
        problem = make(case("decode", "q1s130", "float32"), inputs, 5)
        assert "lse" in judge(problem, *run("flash", problem, scale=problem.spec.scale * 1.05))[1]


# Names.


def test_a_family_lists_its_kernels_and_the_documents_names_are_aliases() -> None:
    assert expand("torch_sdpa") == expand("pytorch_sdpa") == tuple(n for n in NAMES if n.startswith("torch_sdpa:"))
    assert expand("flashattention") == ("flash_attn:fa4", "flash_attn:fa3", "flash_attn:fa2")
    assert expand("math") == ("torch_sdpa:math",)
    assert expand("flashinfer:fa2") == ("flashinfer:fa2",)


@pytest.mark.parametrize(("name", "near"), [("flashinfr", "flashinfer"), ("torch_sdpa:flsh", "torch_sdpa:flash")])
def test_an_unknown_backend_is_answered_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"unknown backend '{name}': did you mean .*{near}") as caught:
        expand(name)
    assert "\n" not in str(caught.value)


def test_a_batch_whose_pages_cannot_hold_its_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="member 1: 2 pages of 16 cannot hold 33 keys"):
        Batch((1, 1), (16, 33), ((0,), (1, 2)), 16)
    with pytest.raises(ValueError, match="one entry a member"):
        Batch((1, 1), (16,), ((0,),), 16)


_ALL = torch.ones(1, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q_lens": ()}, "one entry a member"),
        ({"q_lens": (-1,)}, "no length is negative"),
        ({"page_size": 0}, "needs a page size"),
        ({"masks": ()}, "masks must have one entry a member"),
        ({"masks": (_ALL[:, :8],)}, "masks must have one entry a member"),
        ({"masks": (_ALL.float(),)}, "masks must be boolean"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(changes: dict[str, Any], why: str) -> None:
    sound: dict[str, Any] = {"q_lens": (1,), "kv_lens": (16,), "block_tables": ((0,),), "page_size": 16}
    Batch(**sound, masks=(_ALL,))
    with pytest.raises(ValueError, match=why):
        Batch(**{**sound, **changes})
    with pytest.raises(ValueError, match="a batch has a member at least"):
        Batch((), (), page_size=16)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heads_q": 5}, "5 query heads over 2 KV heads"),
        ({"scale": float("nan")}, "scale must be positive and finite"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"kv_dtype": torch.float8_e4m3fn, "k_scale": -1.0}, "k_scale must be positive"),
        ({"k_scale": 2.0}, "belong to quantised KV"),
        ({"kv_dtype": torch.float32, "v_scale": 2.0}, "belong to quantised KV"),
        ({"sinks": (1.0,) * 3}, "sinks must have one entry a query head: 4, not 3"),
        ({"alibi_slopes": (1.0,) * 5}, "alibi_slopes must have one entry a query head"),
    ],
)
def test_a_spec_that_no_kernel_means_is_refused(changes: dict[str, Any], why: str) -> None:
    sound = AttentionSpec(4, 2, 16, 16, torch.float32, 0.25)
    with pytest.raises(ValueError, match=why):
        replace(sound, **changes)
    assert replace(sound, kv_dtype=torch.float32) == sound


def test_keys_in_another_dtype_than_the_querys_are_refused_by_rule() -> None:
    for kv_dtype, says in (("float16", "float16 under bfloat16"), ("bfloat16", None), ("int8", "int8")):
        found = create("torch_sdpa:math").check(case("decode", "q1s16", "bfloat16", kv_dtype=kv_dtype))
        assert [reason.observed for reason in found] == [says] * (says is not None)


@pytest.mark.parametrize("batch", ["2q1s4", "2q2s4", "q1s4_q2s4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_to_spare_of_a_ragged_cache_are_not_read(kernel: str, batch: str) -> None:
    problem = make(case("extend", batch, "float32", layout="ragged", page_size=None), "normal", 1)
    spare = torch.full((2, *problem.k.shape[1:]), torch.nan)
    wide = replace(problem, k=torch.cat([problem.k, spare]), v=torch.cat([problem.v, spare]))
    assert judge(problem, *run(kernel, wide))[1] == []


@pytest.mark.parametrize("backend", [*(create(f"torch_sdpa:{kernel}") for kernel in KERNELS), OracleBackend()])
def test_a_plan_takes_the_query_tokens_that_it_was_made_for_and_gives_an_lse_where_asked(backend: Backend) -> None:
    for batch in ("q1s16", "2q1s16", "q2s0"):
        problem = make(case("extend", batch, "float32"), "normal", 1)
        planned = backend.plan(problem.batch, problem.spec, lse=False)
        assert planned.run(problem.q_THD, problem.k, problem.v)[1] is None
        with pytest.raises(ValueError, match=r"planned for \d query tokens, not \d"):
            planned.run(torch.cat([problem.q_THD, problem.q_THD[:1]]), problem.k, problem.v)


def test_the_oracle_calls_a_nan_a_nan() -> None:
    problem = make(case("decode", "q1s16", "float32"), "normal", 1)
    out, lse = OracleBackend().plan(problem.batch, problem.spec).run(problem.q_THD * torch.nan, problem.k, problem.v)
    assert out.isnan().all() and lse is not None and lse.isnan().all()


def test_a_step_of_a_model_is_a_case_with_its_lengths() -> None:
    spec = AttentionSpec(6, 2, 64, 64, torch.bfloat16, 1 / 8, window=(7, 0))
    found = case_of(Batch((1, 5), (40, 20), ((0, 1, 2), (3, 4)), 16), spec)
    assert found == case("extend", "q1s40_q5s20", "bfloat16", window=(7, 0))


# Confirmation.


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", ["q16s40", "q1s20_q1s40", "q30"])
def test_what_ran_is_read_from_the_execution_layer(kernel: str, batch: str) -> None:
    problem = make(case("extend", batch, "float32"), "normal", 0)
    planned: Planned = create(f"torch_sdpa:{kernel}").plan(problem.batch, problem.spec)
    _, confirmed = watch(lambda: planned.run(problem.q_THD, problem.k, problem.v))
    assert confirmed == f"torch_sdpa:{kernel}"


def test_a_kernel_that_matches_no_pattern_is_unconfirmed_by_name() -> None:
    assert watch(lambda: torch.softmax(torch.ones(2), 0))[1] == "unconfirmed(aten::_softmax, aten::softmax)"
    assert backend_of([]) == "unconfirmed(nothing ran)"
