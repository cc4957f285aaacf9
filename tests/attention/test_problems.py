"""Seeded problems: the same everywhere, poisoned where nothing may look, with needles that must be found."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.backends.base import member_keys
from attention.backends.oracle import attend
from attention.cases import REPLAY_INPUTS, AttentionCase, Inputs
from attention.replay.problems import Problem, make


def case(batch: str = "q5s40_q1s33_q20", **changes: Any) -> AttentionCase:
    fields: dict[str, Any] = {"phase": "extend", "heads_q": 4, "heads_kv": 2, "head_dim_qk": 16, "head_dim_vo": 24}
    return AttentionCase(batch=batch, dtype="float32", **{**fields, **changes})


def slots(problem: Problem, member: int) -> torch.Tensor:
    page = problem.batch.page_size or 1
    table = problem.batch.block_tables[member]
    return torch.tensor([table[i // page] * page + i % page for i in range(problem.batch.kv_lens[member])])


@pytest.mark.parametrize("inputs", REPLAY_INPUTS)
def test_the_same_seed_gives_the_same_problem(inputs: Inputs) -> None:
    one, again, other = (make(case(), inputs, seed) for seed in (3, 3, 4))
    assert one.batch == again.batch
    for name in ("q_THD", "k", "v"):
        left, right = getattr(one, name), getattr(again, name)
        assert torch.equal(left.nan_to_num(-99), right.nan_to_num(-99))
    assert torch.equal(one.truth.out_QHD, again.truth.out_QHD)
    assert not torch.equal(one.q_THD, other.q_THD)


def test_unused_slots_hold_nan_and_used_ones_do_not() -> None:
    problem = make(case(), "normal", 0)
    used = torch.cat([slots(problem, i) for i in range(3)])
    assert len(set(used.tolist())) == 40 + 33 + 20, "no slot belongs to two members"
    for cache in (problem.k, problem.v):
        flat = cache.flatten(0, 1)
        assert torch.isfinite(flat[used]).all()
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[used] = False
        assert rest.any()
        assert flat[rest].isnan().all()


def test_pages_are_handed_out_in_shuffled_order() -> None:
    tables = make(case("q1s512"), "normal", 0).batch.block_tables
    assert list(tables[0]) != sorted(tables[0])


def test_the_truth_is_that_of_the_pages() -> None:
    problem = make(case(), "needle", 1)
    row = 0
    for i, q_len in enumerate(problem.batch.q_lens):
        at = slots(problem, i)
        q = problem.q_THD[row : row + q_len]
        one = attend(q, problem.k.flatten(0, 1)[at], problem.v.flatten(0, 1)[at], problem.spec)
        assert torch.equal(problem.truth.out_QHD[row : row + q_len], one.out_QHD)
        row += q_len
    assert row == len(problem.q_THD)


@pytest.mark.parametrize("lost", [0, 16, 999])
def test_a_needle_that_is_lost_changes_the_answer_where_random_inputs_hide_it(lost: int) -> None:
    effects = {}
    for inputs in ("normal", "needle"):
        problem = make(case("q1s1000"), inputs, 2)
        at = slots(problem, 0)
        keep = torch.tensor([i for i in range(1000) if i != lost])
        spec = replace(problem.spec, causal=False)
        k, v = (cache.flatten(0, 1)[at][keep] for cache in (problem.k, problem.v))
        without = attend(problem.q_THD, k, v, spec).out_QHD
        effects[inputs] = float((without - problem.truth.out_QHD).norm() / problem.truth.out_QHD.norm())
    assert effects["needle"] > 0.1 > effects["normal"]


def test_the_last_query_of_a_prompt_has_a_needle_at_the_last_key() -> None:
    problem = make(case("q40s300"), "needle", 2)
    at = slots(problem, 0)[:-1]
    k, v = (cache.flatten(0, 1)[at] for cache in (problem.k, problem.v))
    without = attend(problem.q_THD[-1:], k, v, problem.spec).out_QHD[0]
    exact = problem.truth.out_QHD[-1]
    assert float((without - exact).norm() / exact.norm()) > 0.1


def test_large_logits_are_large() -> None:
    assert float(make(case(), "large_logit", 0).truth.lse_QH.max()) > 25
    assert float(make(case(), "normal", 0).truth.lse_QH.max()) < 15


def test_the_default_scale_is_that_of_the_head_dim() -> None:
    assert make(case(), "normal", 0).spec.scale == 1 / math.sqrt(16)


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("layout", ["paged_nhd", "paged_hnd", "ragged", "contiguous"])
def test_every_layout_holds_the_keys_that_the_truth_was_made_of(layout: str, kv_dtype: str) -> None:
    page = 16 if layout.startswith("paged") else None
    problem = make(case(layout=layout, page_size=page, kv_dtype=kv_dtype, alibi=True, sinks=True), "normal", 3)
    spec, batch, row = problem.spec, problem.batch, 0
    for member, q_len in enumerate(batch.q_lens):
        k, v = (member_keys(cache, batch, member) for cache in (problem.k, problem.v))
        assert k.dtype == (torch.float32 if kv_dtype == "auto" else getattr(torch, kv_dtype))
        truth = attend(problem.q_THD[row : row + q_len], k, v, spec)
        torch.testing.assert_close(truth.out_QHD, problem.truth.out_QHD[row : row + q_len])
        row += q_len


def test_a_sink_takes_its_share_of_every_row() -> None:
    spec = replace(make(case(), "normal", 0).spec, sinks=(100.0,) * case().heads_q)
    problem = make(case(), "normal", 0)
    k, v = (member_keys(cache, problem.batch, 0) for cache in (problem.k, problem.v))
    truth = attend(problem.q_THD[: problem.batch.q_lens[0]], k, v, spec)
    assert float(truth.out_QHD.abs().max()) < 1e-9
    torch.testing.assert_close(truth.lse_QH, torch.full_like(truth.lse_QH, 100.0))


def test_a_custom_mask_narrows_what_causal_leaves() -> None:
    one = case(custom_mask=True)
    problem = make(one, "normal", 5)
    assert problem.batch.masks is not None
    k, v = (member_keys(cache, problem.batch, 0) for cache in (problem.k, problem.v))
    q = problem.q_THD[: problem.batch.q_lens[0]]
    assert torch.equal(attend(q, k, v, problem.spec, problem.batch.masks[0]).out_QHD, problem.truth.out_QHD[: len(q)])
    assert not torch.equal(attend(q, k, v, problem.spec).out_QHD, problem.truth.out_QHD[: len(q)])
