from __future__ import annotations

from dataclasses import replace

import pytest

from data.candidate import Loaded, load_candidate
from data.paths import repo_dir
from data.plan import TrafficScale
from data.requests import RequestLength
from tasks.baseline import plan_cells, request_lengths, scaled
from tasks.context import Context


@pytest.fixture(scope="module")
def demo() -> Context:
    loaded: Loaded = load_candidate(repo_dir() / "data" / "candidates" / "torch-flash-cpu.yaml")
    return Context(
        release_id="r1", cell=loaded.cells[0], candidate=loaded, champion=loaded, lease=None, say=lambda line: None
    )


def test_the_cells_are_the_heaviest_shapes_of_each_family(demo: Context) -> None:
    cells = list(plan_cells(demo, request_lengths(demo)))
    plan = demo.plan.baseline
    for family in ("prefill", "decode"):
        kernels = [cell for cell in cells if cell.metric == "kernel_s" and cell.bucket.family == family]
        weights = [cell.bucket.weight for cell in kernels]
        assert 1 <= len(kernels) <= plan.cells_per_family
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) >= plan.min_weight, "the plan's own gate could never pass"
        assert all(cell.bucket.kv_len <= plan.max_kv_len for cell in kernels)
        assert all(cell.case.phase == family for cell in kernels)


def test_a_cell_is_the_case_that_the_model_launches(demo: Context) -> None:
    cached = RequestLength("one", 512, 16, cached_tokens=384)
    by_family = {cell.bucket.family: cell for cell in plan_cells(demo, [*request_lengths(demo), cached])}
    prefill, decode, extend = (by_family[family] for family in ("prefill", "decode", "extend"))
    # SmolLM2-135M: 9 query heads, 3 KV heads, head size 64.
    shape = (prefill.case.heads_q, prefill.case.heads_kv, prefill.case.head_dim_qk, prefill.case.head_dim_vo)
    assert shape == (9, 3, 64, 64)
    assert str(prefill.case.batch) == f"q{prefill.bucket.kv_len}"
    assert str(decode.case.batch) == f"4q1s{decode.bucket.kv_len}"
    assert str(extend.case.batch) == "q128s512"


def test_every_decode_batch_of_the_plan_is_a_cell_and_they_share_the_work(demo: Context) -> None:
    batches = demo.plan.baseline.model_copy(update={"decode_batches": (1, 8), "cells_per_family": 2})
    loaded = demo.candidate.model_copy(update={"plan": demo.plan.model_copy(update={"baseline": batches})})
    cells = [c for c in plan_cells(replace(demo, candidate=loaded), request_lengths(demo)) if c.case.phase == "decode"]
    assert [len(cell.case.members) for cell in cells] == [1, 8, 1, 8]
    whole = [c for c in plan_cells(demo, request_lengths(demo)) if c.case.phase == "decode"][:2]
    assert sum(cell.bucket.weight for cell in cells) == pytest.approx(sum(cell.bucket.weight for cell in whole))


def test_lengths_are_scaled_as_the_plan_plays_them() -> None:
    plan = TrafficScale(divide_lengths_by=16, max_output_tokens=16, requests_per_s=1, max_in_flight=1)
    long = scaled(RequestLength("a", 1600, 800, cached_tokens=512, count=0.25), plan)
    assert (long.prompt_tokens, long.output_tokens, long.cached_tokens, long.count) == (100, 16, 32, 0.25)
    short = scaled(RequestLength("b", 5, 3, cached_tokens=4), plan)
    assert (short.prompt_tokens, short.output_tokens, short.cached_tokens) == (5, 2, 0)


def test_own_traffic_weighs_the_cells_where_the_candidate_says_so(demo: Context) -> None:
    source = demo.candidate.candidate.traffic.model_copy(update={"mix": "own"})
    named = demo.candidate.candidate.model_copy(update={"traffic": source})
    loaded = demo.candidate.model_copy(update={"candidate": named})
    own = request_lengths(replace(demo, candidate=loaded))
    assert len(own) == len(demo.candidate.traffic().requests)
    assert own != request_lengths(demo)
