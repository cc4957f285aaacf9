from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from attention.cases import AttentionCase
from data.candidate import Loaded, load_candidate
from data.paths import repo_dir
from data.requests import Bucket
from tasks import baseline
from tasks.baseline import DECODE_BATCH, Cell, plan_cells, verdict
from tasks.context import Context


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, "SAME"),
        (1 / 1.05, 1.05, "SAME"),
        (1.06, 1.30, "SLOW"),
        (0.70, 0.90, "FAST"),
        (1.00, 1.20, "AMBG"),
        (0.80, 1.00, "AMBG"),
        (0.50, 2.00, "AMBG"),
        (1.05, 1.20, "AMBG"),
        (math.nan, math.nan, "AMBG"),
    ],
)
def test_a_verdict_is_told_by_the_whole_interval(low: float, high: float, said: str) -> None:
    assert verdict(low, high) == said


@pytest.fixture(scope="module")
def demo() -> Context:
    loaded: Loaded = load_candidate(repo_dir() / "data" / "candidates" / "torch-flash-cpu.yaml")
    return Context(
        release_id="r1", cell=loaded.cells[0], candidate=loaded, champion=loaded, lease=None, say=lambda line: None
    )


def test_the_cells_are_the_heaviest_shapes_of_prefill_and_decode(demo: Context) -> None:
    cells = list(plan_cells(demo))
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
    by_family = {cell.bucket.family: cell for cell in plan_cells(demo)}
    prefill, decode = by_family["prefill"].case, by_family["decode"].case
    # SmolLM2-135M: 9 query heads, 3 KV heads, head size 64.
    assert (prefill.heads_q, prefill.heads_kv, prefill.head_dim_qk, prefill.head_dim_vo) == (9, 3, 64, 64)
    assert str(prefill.batch) == f"q{by_family['prefill'].bucket.kv_len}"
    assert str(decode.batch) == f"{DECODE_BATCH}q1s{by_family['decode'].bucket.kv_len}"


def cell_row(champion: list[float], candidate: list[float], demo: Context) -> dict[str, Any]:
    bucket = Bucket("decode", 64, "decode/kv<=64", 0.5)
    case: AttentionCase = baseline._case(demo, bucket)
    workers: Any = {
        "champion": SimpleNamespace(resolved={"decode": "torch_sdpa:math"}, fingerprint_id="fp-champion"),
        "candidate": SimpleNamespace(resolved={"decode": "torch_sdpa:flash"}, fingerprint_id="fp-measured"),
    }
    samples = {"champion": champion, "candidate": candidate}
    return baseline._cell_row(Cell("kernel_s", bucket, case), samples, workers)


def test_a_ratio_is_paired_by_block_so_that_a_drift_of_the_machine_cancels(demo: Context) -> None:
    drifting = [1.0, 2.0, 4.0, 8.0]
    row = cell_row(drifting, [seconds * 1.5 for seconds in drifting], demo)
    assert row["ratio"] == pytest.approx(1.5)
    assert (row["ratio_low"], row["ratio_high"]) == (pytest.approx(1.5), pytest.approx(1.5))
    assert (row["verdict"], row["num_blocks"], row["weight"]) == ("SLOW", 4, 0.5)
    assert (row["backend"], row["champion_backend"]) == ("torch_sdpa:flash", "torch_sdpa:math")
    assert row["champion_p50_s"] == 3.0
    assert row["fingerprint_id"] == "fp-measured", "the environment that the worker found, not the one expected"


def test_noise_widens_the_interval_around_the_same_ratio(demo: Context) -> None:
    row = cell_row([1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.5, 2.0], demo)
    assert row["ratio"] == pytest.approx(1.0)
    assert row["ratio_low"] < 0.6 and row["ratio_high"] > 1.6
    assert row["verdict"] == "AMBG"
