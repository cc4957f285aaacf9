"""Figures: ratios to the dtype's own error that read the same at every shape, and never hide a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from attention.backends.oracle import Truth, attend
from attention.cases import AttentionCase
from attention.replay.figures import compare, half_ulp
from attention.replay.problems import spec_of


def truth_of(dtype: str = "bfloat16", kv_len: int = 128) -> Truth:
    case = AttentionCase(
        phase="decode", batch=f"q1s{kv_len}", heads_q=4, heads_kv=4, head_dim_qk=32, head_dim_vo=32, dtype=dtype
    )
    spec = spec_of(case)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, 4, 32, generator=generator).to(spec.dtype) for n in (1, kv_len, kv_len))
    return attend(q, k, v, spec)


def test_an_output_that_rounds_as_its_class_must_reads_about_one() -> None:
    for kv_len in (16, 128, 2048):
        truth = truth_of(kv_len=kv_len)
        figures = compare(truth.rounded_QHD.bfloat16(), truth.lse_QH.float(), truth, torch.bfloat16)
        assert figures.finite_mask_equal
        assert 0.3 < figures.r_rms <= 1.0
        assert figures.r_row <= 1.0
        assert figures.r_max <= 1.0
        assert figures.lse_max_abs is not None
        assert figures.lse_max_abs < 1e-5


def test_the_exact_output_has_no_error() -> None:
    truth = truth_of()
    figures = compare(truth.out_QHD, None, truth, torch.bfloat16)
    assert figures.max_abs == figures.mean_abs == figures.rel_l2 == figures.r_rms == 0
    assert figures.cosine == pytest.approx(1.0)
    assert figures.lse_max_abs is None


def test_a_single_nan_takes_every_figure_with_it_and_names_its_row() -> None:
    truth = truth_of()
    out = truth.out_QHD.clone()
    out[0, 2, 5] = math.nan
    figures = compare(out, truth.lse_QH.float(), truth, torch.bfloat16)
    assert not figures.finite_mask_equal
    assert figures.worst_row_index == 2
    assert all(math.isnan(value) for value in (figures.max_abs, figures.r_rms, figures.r_max, figures.r_row))


def test_one_wrong_row_shows_in_the_row_ratio() -> None:
    truth = truth_of()
    out = truth.rounded_QHD.clone()
    out[0, 3] = truth.out_QHD[0, 3] * 1.1
    figures = compare(out, None, truth, torch.bfloat16)
    assert figures.worst_row_index == 3
    assert figures.r_row > 10


def test_rounding_toward_zero_shows_as_a_bias() -> None:
    truth = truth_of()
    shrunk = truth.out_QHD.abs() * 0.99  # all positive truth, all errors of one sign
    positive = Truth(truth.out_QHD.abs(), truth.lse_QH, truth.rounded_QHD.abs())
    assert compare(shrunk, None, positive, torch.bfloat16).bias_z < -6


def test_an_empty_row_costs_nothing_when_it_is_zero_and_its_lse_is_not_compared() -> None:
    truth = truth_of()
    empty = Truth(truth.out_QHD.clone(), truth.lse_QH.clone(), truth.rounded_QHD.clone())
    empty.out_QHD[0, 1] = empty.rounded_QHD[0, 1] = 0
    empty.lse_QH[0, 1] = -math.inf
    figures = compare(
        empty.rounded_QHD, torch.where(empty.lse_QH.isinf(), 0, empty.lse_QH).float(), empty, torch.bfloat16
    )
    assert figures.r_row <= 1.0
    assert figures.lse_max_abs is not None
    assert figures.lse_max_abs < 1e-5


def test_an_infinite_lse_where_the_oracle_is_finite_is_no_small_error() -> None:
    truth = truth_of()
    lse = truth.lse_QH.float().clone()
    lse[0, 0] = math.inf
    assert compare(truth.out_QHD, lse, truth, torch.bfloat16).lse_max_abs == math.inf
    lse[0, 0] = math.nan
    found = compare(truth.out_QHD, lse, truth, torch.bfloat16).lse_max_abs
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_an_ulp_is_half_the_distance_to_the_next_value(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 3.0, 0.0078125, 100.0], dtype=dtype)
    above = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    distance = above.double() - values.double()
    assert torch.equal(half_ulp(values.double(), dtype), distance / 2)
